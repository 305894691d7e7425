"""The scripts in training/: the network against timm's, every stage for a few steps on a few small images."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save_file
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))
images, network, losses, recipe, evaluate, distill = (
    importlib.import_module(name) for name in ("images", "network", "losses", "recipe", "evaluate", "distill")
)

SMALL = network.Dimensions(depth=3, width=64, grid=4, classes=10)
LENGTHS = {"forced": 2, "whole": 1, "dropped": 2, "registers": 3}
EIGHT_STEPS = tuple(word for stage, steps in LENGTHS.items() for word in (f"--{stage}", str(steps)))
RECIPE = recipe.Recipe(**LENGTHS, batch=4, lr_scale=1.0, seed=0)
Run = Callable[..., int]


def timm_twin(registers: int) -> Any:
    """A small network of timm's with lively weights."""
    options: dict[str, Any] = {"reg_tokens": registers, "no_embed_class": True} if registers else {}
    net = VisionTransformer(img_size=64, patch_size=16, embed_dim=64, depth=3, num_heads=1, num_classes=10, **options)
    generator = torch.Generator().manual_seed(registers)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
        net.pos_embed[:, 6] *= 80  # one patch is outlying
    return net.eval()


def noise(count: int = 2, side: int = 64) -> Tensor:
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def global_state() -> Iterator[None]:
    """The command sets torch's seed and the precision of matrix products."""
    precision = torch.get_float32_matmul_precision()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield
    torch.set_float32_matmul_precision(precision)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four images in a nested folder, and one file that only looks like one."""
    folder = tmp_path_factory.mktemp("images")
    (folder / "more").mkdir()
    rng = np.random.default_rng(0)
    for name, size in (("a.png", (40, 30)), ("b.png", (24, 51)), ("more/c.jpg", (200, 200)), ("more/d.jpg", (99, 70))):
        small = Image.fromarray(rng.integers(0, 256, (5, 5, 3), np.uint8))
        small.resize(size[::-1], Image.Resampling.BICUBIC).save(folder / name)
    (folder / "broken.jpg").write_bytes(b"not an image")
    return folder


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("teacher") / "teacher.safetensors"
    save_file(timm_twin(0).state_dict(), path)
    return path


@pytest.fixture(scope="module")
def pool(folder: Path) -> Tensor:
    loaded, unreadable = images.load_images(images.find_images(folder), 64, 64)
    assert [path.name for path in unreadable] == ["broken.jpg"]
    return loaded


@pytest.fixture
def run(folder: Path, teacher: Path) -> Run:
    def call(out: Path, *more: str) -> int:
        always = ["--teacher", str(teacher), "--out", str(out), "--batch", "4", "--device", "cpu"]
        return int(distill.main([str(folder), *always, *EIGHT_STEPS, *more]))

    return call


# ---------------------------------------------------------------------------------------------------- network


@pytest.mark.parametrize("registers", [0, 4])
def test_forward_is_timms_also_without_some_patches(registers: int, tmp_path: Path) -> None:
    twin = timm_twin(registers)
    save_file(twin.state_dict(), tmp_path / "twin.safetensors")
    net = network.load(tmp_path / "twin.safetensors")
    assert net.dimensions == SMALL and net.prefix == 1 + registers

    batch = noise()
    run = net(batch)
    torch.testing.assert_close(run.logits, twin(batch))
    assert [len(run.stream), len(run.blocks), len(run.attention)] == [7, 4, 3]
    torch.testing.assert_close(net.norm(run.stream[-1]), twin.forward_features(batch))

    keep = torch.tensor([[3, 0, 15], [7, 8, 2]])
    tokens = twin._pos_embed(twin.patch_embed(batch))  # class token, registers, patches
    left = [tokens[number, [*range(net.prefix), *(kept + net.prefix).tolist()]] for number, kept in enumerate(keep)]
    removed = twin.forward_head(twin.norm(twin.blocks(torch.stack(left))))
    torch.testing.assert_close(net(batch, keep).logits, removed)


def test_the_attention_rows_are_those_of_the_class_token(tmp_path: Path) -> None:
    net = network.ViT(SMALL, registers=4).eval()
    run = net(noise())
    block, tokens = net.blocks[1], run.blocks[1]
    query, key, _ = block.attn.qkv(block.norm1(tokens)).chunk(3, -1)
    torch.testing.assert_close(run.attention[1][:, 0], (query @ key.mT / 8).softmax(-1)[:, 0])


@pytest.mark.parametrize("registers", [0, 4])
def test_at_full_size_weights_go_to_timm_and_back(registers: int, tmp_path: Path) -> None:
    options = {"reg_tokens": registers} if registers else {}
    net = network.ViT(network.Dimensions(), registers).eval()
    network.save(net, tmp_path / "new" / "net.safetensors")
    weights = load_file(tmp_path / "new" / "net.safetensors")
    assert {value.dtype for value in weights.values()} == {torch.float16}
    twin = timm.create_model("deit_tiny_patch16_224", no_embed_class=True, **options).eval()
    twin.load_state_dict(weights, strict=True)
    batch = noise(1, 224)
    torch.testing.assert_close(network.load(tmp_path / "new" / "net.safetensors")(batch).logits, twin(batch))


def test_mixing_is_linear() -> None:
    start, trained = network.ViT(SMALL, 4), network.ViT(SMALL, 4)
    mixed = network.mix(start, trained, 0.85).state_dict()
    wanted = {name: 0.15 * value + 0.85 * trained.state_dict()[name] for name, value in start.state_dict().items()}
    torch.testing.assert_close(dict(mixed), wanted)
    torch.testing.assert_close(network.mix(start, trained, 0.0).state_dict(), start.state_dict(), rtol=0, atol=0)


def test_centring_keeps_the_function_and_makes_the_mean_token_zero() -> None:
    net = network.ViT(SMALL, 4).double().eval()
    with torch.no_grad():
        net.blocks[-1].norm1.bias += torch.randn(64)
    batches = [noise(2).double(), noise(3).double()[2:]]  # of different sizes
    centred = network.centre(net, batches)

    def entering(which: Any) -> Tensor:
        before = torch.cat([which(batch).blocks[-2][:, which.prefix :] for batch in batches])
        return which.blocks[-1].norm1(before).mean((0, 1)).detach()

    assert entering(net).abs().max() > 0.1
    assert entering(centred).abs().max() < 1e-12
    for batch in batches:
        torch.testing.assert_close(centred(batch).logits, net(batch).logits, rtol=0, atol=1e-10)


# ----------------------------------------------------------------------------------------------------- losses


def test_a_forced_sublayer_learns_alone(teacher: Path) -> None:
    student, batch = network.ViT(SMALL), noise()
    wanted = network.load(teacher)(batch)
    names, parameters = zip(*student.named_parameters(), strict=True)
    logits, written = student.forced(batch, wanted.stream)

    def touched(loss: Tensor) -> set[str]:
        gradients = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
        found = [
            name for name, gradient in zip(names, gradients, strict=True) if gradient is not None and gradient.any()
        ]
        return {re.sub(r"\.?(weight|bias|qkv|proj|fc1|fc2)", "", name) for name in found}

    errors = losses.sublayer_errors(written, wanted.stream)
    assert touched(errors[0]) == {"cls_token", "pos_embed", "patch_embed"}
    for block in range(3):
        assert touched(errors[1 + 2 * block]) == {f"blocks.{block}.norm1", f"blocks.{block}.attn"}
        assert touched(errors[2 + 2 * block]) == {f"blocks.{block}.norm2", f"blocks.{block}.mlp"}
    assert touched(losses.divergence(logits, wanted.logits)) == {"norm", "head"}


def test_forced_and_whole_agree_on_a_perfect_student(teacher: Path) -> None:
    net, batch = network.load(teacher), noise()
    wanted = net(batch)
    forced = losses.forced_terms(*net.forced(batch, wanted.stream), wanted)
    for terms in (forced, losses.stream_terms(net(batch), wanted)):
        assert all(term.abs() < 1e-10 for term in terms.values())


def test_registers_start_as_the_mean_input_of_outlying_patches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "START_NOISE", 0.0)
    plain, batch = network.ViT(SMALL).eval(), noise()
    corners = torch.tensor([0, 3, 12, 15])  # of the 4 × 4 patches, one in each quarter
    with torch.no_grad():
        plain.pos_embed[:, corners] += 1.0
    grown = losses.add_registers(plain, batch.split(1))
    tokens = plain.embed(batch)[0][:, 1:]
    torch.testing.assert_close(grown.reg_token[0], tokens[:, corners].mean(0))
    assert {name for name in grown.state_dict() if name not in plain.state_dict()} == {"reg_token"}
    torch.testing.assert_close(grown.state_dict()["pos_embed"], plain.state_dict()["pos_embed"])

    with torch.no_grad():
        plain.pos_embed[:, 3] -= 1.0  # nothing is outlying in the second quarter
    assert losses.add_registers(plain, [batch]).reg_token[0].norm(dim=-1).gt(0).tolist() == [True, False, True, True]


def test_attention_on_outlying_patches_moves_to_the_registers() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = F.normalize(torch.randn(2, 17, 64, generator=generator), dim=-1)
    tokens[:, 1 + 5] *= 3  # patch 5 is outlying: second row, second column
    scores = 0.3 * torch.randn(2, 3, 17, generator=generator)
    scores[..., 1 + 5] += 3
    attention = scores.softmax(-1)
    goal = losses.moved_attention(attention, tokens)

    assert goal.shape == (2, 3, 18)
    torch.testing.assert_close(goal.sum(-1), torch.ones(2, 3))
    others = [patch for patch in range(16) if patch != 5]
    torch.testing.assert_close(goal[..., 0], attention[..., 0])
    torch.testing.assert_close(goal[..., 2:][..., others], attention[..., 1:][..., others])
    around = attention[..., 1:][..., [0, 1, 2, 4, 6, 8, 9, 10]].sum(-1) / 9
    mean = attention[..., 1:][..., others].mean(-1)
    torch.testing.assert_close(goal[..., 2 + 5], (around + 0.01 * mean) / (8 / 9 + 0.01))
    torch.testing.assert_close(goal[..., 1], attention[..., 1 + 5] - goal[..., 2 + 5])
    assert (goal[..., 1] > 0.3).all()

    spread = torch.cat([goal[..., :1], goal[..., 1:2].expand(-1, -1, 4) / 4, goal[..., 2:]], -1)  # four registers
    assert losses.move_divergence(spread, goal).abs() < 1e-6
    assert losses.move_divergence(spread.flip(-1), goal) > 0.1


def test_the_register_terms_vanish_for_a_student_that_does_as_told(teacher: Path) -> None:
    batch = noise()
    wanted = network.load(teacher)(batch)
    wanted.attention[2] = 0.5 * (wanted.attention[2] + F.one_hot(torch.tensor(6), 17))  # on the outlying patch
    goal = losses.moved_attention(wanted.attention[2], wanted.blocks[2])  # in the last third of the blocks
    assert (goal[..., 1] > 0.4).all()
    row = torch.cat([goal[..., :2], torch.zeros(2, 1, 3), goal[..., 2:]], -1)  # all on the first register
    stream = [torch.cat([tokens[:, :1], torch.ones(2, 4, 64), tokens[:, 1:]], 1) for tokens in wanted.stream]
    student = wanted._replace(stream=stream, attention=[row, row, row])
    decoders = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
    for decoder in decoders:
        nn.init.zeros_(decoder.weight)
        nn.init.zeros_(decoder.bias)
    terms = losses.register_terms(student, wanted, 5, decoders)
    assert all(terms[name].abs() < 1e-6 for name in ("classes", "class_token", "early", "moved"))
    torch.testing.assert_close(terms["local"], 2 * wanted.patches.square().mean() / wanted.patches.var())

    for block, early in ((1, True), (2, False)):  # of three blocks the first is compared, later ones are free
        other = [tokens + 0.1 * (number == 2 * block) for number, tokens in enumerate(stream)]
        terms = losses.register_terms(student._replace(stream=other), wanted, 5, decoders)
        assert (terms["early"] > 1e-5) == early


def test_outlying_norms_and_single_bright_patches_are_penalised(teacher: Path) -> None:
    student = network.ViT(SMALL, 4).eval()
    batch = noise()
    run, wanted = student(batch), network.load(teacher)(batch)
    calm = losses.dropped_register_terms(run, wanted, 5)
    large = [tokens.clone() for tokens in run.stream]
    large[-1][:, 5 + 2] *= 4
    bright = [row.clone() for row in run.attention]
    bright[-1][..., 5 + 2] += 0.5
    terms = losses.dropped_register_terms(run._replace(stream=large, attention=bright), wanted, 5)
    assert terms["norms"] > calm["norms"] and terms["cap"] > calm["cap"] + 0.2
    assert terms["classes"] == calm["classes"]


@pytest.mark.parametrize(
    ("step", "name"), [(0, "forced"), (2, "whole"), (4, "dropped"), (5, "registers"), (7, "fewer")]
)
def test_each_stage_lowers_its_loss(pool: Tensor, teacher: Path, step: int, name: str) -> None:
    distiller = distill.Distiller(pool, network.load(teacher), RECIPE)
    assert RECIPE.removed(step) == (3 if name in ("dropped", "fewer") else None)
    values = []
    for _ in range(10):  # the same images, crops and patches
        distiller.done = step
        values.append(losses.weighted(distiller.advance(), RECIPE.weights(step)))
    assert values[-1] < 0.95 * values[0]
    assert distiller.student.registers == (4 if step > 4 else 0)


@pytest.mark.slow
@pytest.mark.filterwarnings("default:The .grad attribute")  # torch looks at it while it compiles
def test_networks_and_losses_compile_without_breaks(teacher: Path) -> None:
    compiled = {"backend": "eager", "dynamic": False, "fullgraph": True}
    wanted_net, plain, grown = network.load(teacher), network.ViT(SMALL), network.ViT(SMALL, 4)
    for net in (wanted_net, plain, grown):
        for block in net.blocks:
            block.compile(**compiled)
    batch, keep = noise(), torch.tensor([[3, 0, 15], [7, 8, 2]])
    wanted, decoders = wanted_net(batch), nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
    calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
        (losses.forced_terms, (*plain.forced(batch, wanted.stream), wanted)),
        (losses.stream_terms, (plain(batch), wanted)),
        (losses.stream_terms, (plain(batch, keep), wanted)),
        (losses.register_terms, (grown(batch), wanted, 5, decoders)),
        (losses.dropped_register_terms, (grown(batch, keep), wanted, 5)),
    ]
    for function, given in calls:
        torch.testing.assert_close(torch.compile(function, **compiled)(*given), function(*given))
    torch.compiler.reset()


# ---------------------------------------------------------------------------------------------------- command


def test_the_stages_follow_one_another() -> None:
    stages = [RECIPE.stage(step)[0] for step in range(RECIPE.total)]
    assert stages == ["forced"] * 2 + ["whole"] + ["dropped"] * 2 + ["registers"] * 3
    assert [RECIPE.batch_size(step) for step in (1, 2)] == [2, 4]

    long = recipe.Recipe(100, 100, 100, 100, batch=4, lr_scale=0.5, seed=0)
    assert [long.removed(step) for step in range(198, 206)] == [None] * 3 + [3, None, 2, None, 3]
    assert [long.removed(step) for step in range(300, 306)] == [None, None, 3, None, None, 2]
    assert long.weights(200) == losses.WHOLE and long.weights(201) == losses.DROPPED
    assert [long.weights(step)["local"] for step in (300, 310)] == [0.01, 0.5]

    rates = [long.learning_rate(step) for step in range(400)]
    for start, end, peak in ((0, 100, 1e-3), (100, 300, 5e-4), (300, 400, 2.5e-4)):
        top = max(rates[start:end])
        assert 0.97 * peak < top <= peak
        first = rates.index(top)
        assert first < start + 10 and rates[start:first] == sorted(rates[start:first])
        assert rates[first:end] == sorted(rates[first:end], reverse=True) and rates[end - 1] < 0.06 * peak


def test_the_command_writes_a_timm_model_in_half_precision(
    run: Run, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labels = tmp_path / "labels.csv"
    labels.write_text("name,imagenet_index\na,3\nd.jpg,4\n", encoding="utf-8")
    out = tmp_path / "new" / "student.safetensors"
    assert run(out, "--samples", str(folder), "--labels", str(labels)) == 0
    weights = load_file(out)
    assert {value.dtype for value in weights.values()} == {torch.float16}
    assert all(value.isfinite().all() for value in weights.values())
    twin = timm_twin(4)
    twin.load_state_dict(weights, strict=True)
    torch.testing.assert_close(network.load(out)(noise()).logits, twin(noise()), rtol=1e-4, atol=1e-4)

    printed = capsys.readouterr().out
    assert "4 images, 1 unreadable files left out" in printed
    lines = [line for line in printed.splitlines() if line.startswith("step")]  # one at the end of each stage
    assert [line.split("  ")[:2] for line in lines] == [
        ["step 2/8", "forced"],
        ["step 3/8", "whole"],
        ["step 5/8", "dropped"],
        ["step 8/8", "registers"],
    ]
    assert all(re.search(r"classes \d+\.\d{4} .* lr \S+e-0\d .* top-1 \S+ % \(", line) for line in lines)


def test_a_continued_run_equals_an_uninterrupted_one(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, parts = tmp_path / "whole.safetensors", tmp_path / "parts.safetensors"
    assert run(whole) == 0
    for steps, done in ((1, 1), (3, 4), (1, 5), (2, 7)):  # in stages, at a border, across borders
        assert run(parts, "--stop-after", str(steps)) == 0
        assert torch.load(tmp_path / "parts.ckpt", weights_only=True)["done"] == done
        assert f"stopped at step {done} of 8" in capsys.readouterr().out
        assert not parts.exists()
    assert run(parts) == 0
    assert "continuing at step 7 of 8" in capsys.readouterr().out
    torch.testing.assert_close(load_file(parts), load_file(whole), rtol=0, atol=0)

    assert run(parts, "--lr-scale", "0.5") == 2
    assert "was made with lr_scale = 1.0, not 0.5" in capsys.readouterr().err


def test_mistakes_are_told_in_one_line(
    run: Run, folder: Path, teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def error(code: int) -> str:
        printed = capsys.readouterr()
        assert code == 2 and printed.out == "" and printed.err.count("\n") == 1
        return printed.err

    student, other, empty = tmp_path / "student.safetensors", tmp_path / "other.safetensors", tmp_path / "empty"
    out = ("--out", str(student))
    empty.mkdir()
    assert "no images under" in error(distill.main([str(empty), "--teacher", str(other), *out]))
    assert "is not a folder" in error(distill.main([str(empty / "no"), "--teacher", str(other), *out]))
    assert "cannot read the weights" in error(distill.main([str(folder), "--teacher", str(other), *out]))
    save_file({"pos_embed": torch.zeros(1, 577, 192)}, other)
    assert "no classifier: it is not a DeiT" in error(distill.main([str(folder), "--teacher", str(other), *out]))
    save_file({**load_file(teacher), "head.weight": torch.zeros(10, 65)}, other)
    wrong = error(distill.main([str(folder), "--teacher", str(other), *out]))
    assert "1 tensors differ, first head.weight, whose shape is (10, 65) instead of (10, 64)" in wrong
    network.save(network.ViT(SMALL, 4), other)
    assert "must be a plain DeiT" in error(distill.main([str(folder), "--teacher", str(other), *out]))
    assert "belong together" in error(run(student, "--samples", str(folder)))
    assert "--batch must be positive" in error(run(student, "--batch", "0"))
    assert "--registers must be positive" in error(run(student, "--registers", "0"))
    labels = tmp_path / "labels.csv"
    for text, problem in (
        ("name,imagenet_index\nzebra,3\n", "names zebra, which is not under"),
        ("name,imagenet_index\nbroken,3\n", "cannot read"),
        ("name,imagenet_index\n", "names no images"),
        ("name,index\na,3\n", "needs the columns name and imagenet_index"),
    ):
        labels.write_text(text, encoding="utf-8")
        assert problem in error(run(student, "--samples", str(folder), "--labels", str(labels)))
    assert "give --samples" in error(evaluate.main([str(teacher)]))
    assert "cannot use the device" in error(evaluate.main([str(teacher), "--pets", str(folder), "--device", "abacus"]))
    assert not student.exists()


# ------------------------------------------------------------------------------------------------- evaluation


def test_images_are_prepared_as_timm_does(folder: Path) -> None:
    options = {"input_size": (3, 64, 64), "crop_pct": 1.0, "interpolation": "bicubic"}
    transform = timm.data.create_transform(**options, mean=images.MEAN, std=images.STD)
    paths = [folder / "a.png", folder / "b.png", folder / "more" / "d.jpg"]
    ours = images.inputs(images.load_images(paths, 64, 64)[0], 64)
    theirs = torch.stack([transform(Image.open(path).convert("RGB")) for path in paths])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_evaluation_prints_a_table(
    pool: Tensor, folder: Path, teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three of four images have the class the network says; two of four masks are full, two empty."""
    order = network.load(teacher)(images.inputs(pool, 64)).logits.argsort(1, descending=True)
    first, sixth = order[:, 0].tolist(), order[:, 5].tolist()
    rows = [*zip(["a", "b", "c"], first[:3], strict=True), ("d", sixth[3])]
    pets = tmp_path / "pets"
    (pets / "masks").mkdir(parents=True)
    (pets / "images").symlink_to(folder)
    lines = ["name,imagenet_index", *(f"{name},{index}" for name, index in rows)]
    (pets / "labels.csv").write_text("\n".join(lines), encoding="utf-8")
    for name, value in (("a", 255), ("b", 0), ("c", 255), ("d", 0)):
        with Image.open(next(folder.rglob(f"{name}.*"))) as image:
            Image.new("L", image.size, value).save(pets / "masks" / f"{name}.png")

    network.save(network.ViT(SMALL, 4), tmp_path / "student.safetensors")
    samples = ["--samples", str(folder), "--labels", str(pets / "labels.csv"), "--pets", str(pets), "--device", "cpu"]
    assert evaluate.main([str(teacher), *samples, "--teacher", str(tmp_path / "student.safetensors")]) == 0
    printed = capsys.readouterr().out
    cells = {line.split(" | ")[0].strip("| "): line.split(" | ")[1] for line in printed.splitlines() if "%" in line}
    assert "| 4 labelled images | teacher |" in printed and "| 4 pets |" in printed
    assert cells["top-1"] == cells["top-5"] == "75.0 % (30.1–95.4)"
    assert cells["last attention of the class token: share on the animal"] == "50.0 % (1.0–99.0)"
    assert cells["last attention of the class token: largest on the animal"] == "50.0 % (15.0–85.0)"
    assert {"top-1, a third of the patches removed", "same first choice as the teacher"} <= cells.keys()

    assert cells["patches with norm > 1.5 × median"].startswith("6.2 %")  # one of sixteen


def test_intervals() -> None:
    share = evaluate.proportion(torch.arange(10) < 8)
    assert (share.value, round(share.low, 3), round(share.high, 3)) == (0.8, 0.490, 0.943)
    none = evaluate.proportion(torch.zeros(20, dtype=torch.bool))
    assert (none.low, round(none.high, 3)) == (0.0, 0.161)
    assert str(evaluate.mean(torch.tensor([0.4, 0.6, 0.4, 0.6]))) == "50.0 % (40.2–59.8)"


def test_patches_are_removed_at_random_but_the_same_every_time(pool: Tensor, teacher: Path) -> None:
    keep = images.random_patches(3, 16, 11, torch.Generator().manual_seed(0))
    assert keep.shape == (3, 11) and all(len(set(row)) == 11 and max(row) < 16 for row in keep.tolist())
    net = network.load(teacher)
    first, second = (evaluate.answers(net, pool, 8) for _ in range(2))
    assert torch.equal(first.attention, second.attention) and first.attention.shape == (4, 8)
