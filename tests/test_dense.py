"""Models with an output for each place: targets at points, boxes, masks and predicted areas, and maps for them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

import vitreous
from vitreous import Model, Region, Trace
from vitreous.errors import ModelError, TargetError
from vitreous.images.preprocess import Preprocess
from vitreous.models.output import Form, Meaning
from vitreous.trace.apply import choose
from vitreous.trace.placing import place
from vitreous.trace.target import Target

SIZE, PATCH, CLASSES = 32, 8, 3


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        found: Tensor = x + self.mlp(x)
        return found


class Segmenter(nn.Module):
    """A plain ViT that scores the classes of every patch, enlarged to the size of the image by `scale`."""

    def __init__(self, depth: int = 2, width: int = 16, scale: int = 1, local: bool = False) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, PATCH, PATCH)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head, self.scale, self.local = nn.Linear(width, CLASSES), scale, local
        with torch.no_grad():
            self.embed.weight.mul_(8)  # so that each class is the best one somewhere
            self.head.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x)
        grid = tokens.shape[-2:]
        tokens = tokens.flatten(2).mT
        for block in self.blocks:
            tokens = tokens + block.mlp(tokens) if self.local else block(tokens)
        scores: Tensor = self.head(tokens).mT.unflatten(-1, grid)
        return F.interpolate(scores, scale_factor=self.scale) if self.scale > 1 else scores


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(0)
    return Model(Segmenter().eval(), labels=["cat", "dog", "t-shirt"], preprocess=lambda image: torch.zeros(3, 32, 32))


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.randn(2, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1))


def placed(model: Model, images: Any, target: Any) -> tuple[Trace, Target]:
    trace = Trace(model, images)
    return trace, choose(trace, target, vitreous.METHODS["gradient"])


# ------------------------------------------------------------------------------------------------ what an output is


def test_an_output_for_each_place_has_its_form(model: Model, images: Tensor) -> None:
    trace = Trace(model, images)
    assert model.form is Form.DENSE and model.outputs == CLASSES and model.meaning is Meaning.LOGITS
    assert trace.output.shape == (2, CLASSES, 4, 4) and trace.classifies


def test_a_dictionary_of_places_and_one_number_per_pixel() -> None:
    net = Segmenter(scale=8).eval()
    named = Model(net, forward=lambda x: {"out": net(x), "aux": net(x)})
    depth = Model(net, forward=lambda x: net(x)[:, 0])
    for one, outputs in ((named, CLASSES), (depth, 1)):
        assert one.run(torch.zeros(1, 3, SIZE, SIZE)).shape == (1, outputs, SIZE, SIZE) and one.form is Form.DENSE
    _ = depth.layout_at((SIZE, SIZE))
    assert depth.meaning is Meaning.VALUE


def test_mask_queries_are_summed_by_class() -> None:
    classes, masks = torch.randn(1, 5, CLASSES + 1), torch.randn(1, 5, 4, 4)
    net = Segmenter().eval()
    model = Model(net, forward=lambda x: {"class_queries_logits": classes, "masks_queries_logits": masks})
    found = model.run(torch.zeros(1, 3, SIZE, SIZE))
    share, drawn = classes[0].softmax(-1), masks[0].sigmoid()
    for c in range(CLASSES):
        assert torch.allclose(found[0, c], sum(share[q, c] * drawn[q] for q in range(5)), atol=1e-6)


def test_places_last_are_refused_with_the_remedy() -> None:
    net = Segmenter(scale=4).eval()
    model = Model(net, forward=lambda x: net(x).permute(0, 2, 3, 1))
    with pytest.raises(ModelError, match=r"put the classes first: .*permute\(0, 3, 1, 2\)"):
        model.run(torch.zeros(1, 3, SIZE, SIZE))


# ------------------------------------------------------------------------------------------------------- targets


def test_the_score_is_the_mean_over_the_region(model: Model, images: Tensor, tmp_path: Path) -> None:
    mask = np.zeros((SIZE, SIZE), np.uint8)
    mask[8:24, 16:32] = 255
    file = tmp_path / "my-mask.png"
    Image.fromarray(mask).save(file)
    output = Trace(model, images).output
    best = output.argmax(1)
    known = {
        "dog@31,0": output[:, 1, 0, 3],
        "1@8,16,32,24": output[:, 1, 2, 1:].mean(-1),
        "cat@4,8,12,16": (output[:, 0, 1, 0] + output[:, 0, 1, 1]) / 2,  # half of each of two places
        f"dog@{file}": output[:, 1, 1:3, 2:].mean((-2, -1)),
        "t-shirt@0,0": output[:, 2, 0, 0],
        "cat@0,0-dog@31,31": output[:, 0, 0, 0] - output[:, 1, 3, 3],
        "cat-t-shirt@9,9": output[:, 0, 1, 1] - output[:, 2, 1, 1],
        "top-1@9,9": output[:, :, 1, 1].amax(1),
    }
    for text, score in known.items():
        trace, target = placed(model, images, text)
        assert torch.allclose(trace.score(target), score, atol=1e-6), text
        fixed = target.fix(trace.output)
        again = placed(model, images, str(fixed))[1]
        assert torch.equal(trace.score(again), trace.score(fixed)) and str(again) == str(fixed), text
    there = torch.stack([output[i, 1][best[i] == 1].mean() for i in range(2)])
    trace, target = placed(model, images, "dog@predicted")
    assert torch.allclose(trace.score(target), there, atol=1e-6)


def test_regions_in_python_are_those_of_the_text(model: Model, images: Tensor) -> None:
    mask = np.zeros((SIZE, SIZE), bool)
    mask[:8, :8] = True
    pairs = [
        (Region("dog", point=(31, 0)), "1@31,0"),
        (Region(1, box=(8, 16, 32, 24)), "1@8,16,32,24"),
        (Region(0, mask=mask), "0@0,0,8,8"),
        (Region("t-shirt", predicted=True), "2@predicted"),
        (2, "2@predicted"),
    ]
    for region, text in pairs:
        trace, one = placed(model, images, region)
        assert torch.allclose(trace.score(one), trace.score(placed(model, images, text)[1]), atol=1e-6)


def test_the_default_is_the_class_with_the_largest_area(model: Model, images: Tensor) -> None:
    trace, target = placed(model, images, None)
    best = trace.output.argmax(1).flatten(1)
    largest = [int(row.bincount(minlength=CLASSES).argmax()) for row in best]
    assert target.fix(trace.output).strings() == [f"{number}@predicted" for number in largest]


def test_a_predicted_region_is_fixed(model: Model, images: Tensor) -> None:
    trace, target = placed(model, images, "1@predicted")
    fixed = target.fix(trace.output)
    other = torch.randn_like(trace.output)
    where = trace.output.argmax(1) == 1
    assert torch.allclose(fixed(other, other)[0], other[0, 1][where[0]].mean(), atol=1e-6)
    variants = fixed.of_rows([1, 1, 0])(other[[0, 0, 0]], other[[0, 0, 0]])
    assert torch.allclose(variants[1], other[0, 1][where[1]].mean(), atol=1e-6)
    assert torch.allclose(variants[2], other[0, 1][where[0]].mean(), atol=1e-6)


def test_graded_is_the_mean_probability(model: Model, images: Tensor) -> None:
    trace, target = placed(model, images, "1@0,0,16,8")
    graded = target.graded(model.meaning)(trace.output, trace.output)
    assert torch.allclose(graded, trace.output.softmax(1)[:, 1, 0, :2].mean(-1), atol=1e-6)
    found = vitreous.explain(model, images, "gradient", "1@0,0,16,8")
    assert found.probabilities == pytest.approx(graded.tolist()) and found.targets == ("1@0,0,16,8",) * 2
    assert found.labels == ("dog in 0,0,16,8",) * 2


def test_each_image_has_its_own_target(model: Model, images: Tensor) -> None:
    trace, target = placed(model, images, ["cat@0,0", "dog@predicted"])
    alone = [placed(model, images[i : i + 1], text) for i, text in enumerate(("cat@0,0", "dog@predicted"))]
    expected = torch.cat([one.score(aim) for one, aim in alone])
    assert torch.allclose(trace.score(target), expected, atol=1e-6)
    assert str(target.fix(trace.output)) == "0@0,0;1@predicted"


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("dog@40,2", "lies outside the image, which has 32×32 pixels"),
        ("dog@40,2,50,9", "lies outside what"),
        ("dog@nowhere.png", "nowhere.png: no such mask"),
        ("dog@nowhere", "no place and no mask"),
        ("dog@1,2,3", "no place and no mask"),
        ("9@1,2", "class 9 is out of range"),
        ("bird@1,2", "unknown class 'bird'"),
        ("value@1,2", "3 numbers at each place"),
        ("neuron:3", "neuron 3 is out of range|is no score"),
        ("neuron:1", "is no score of an image"),
        ("dog@5,5,2,9", "is no place|not \\(left"),
    ],
)
def test_targets_that_do_not_exist(model: Model, images: Tensor, target: str, said: str) -> None:
    with pytest.raises(TargetError, match=said):
        placed(model, images, target)


def test_a_class_predicted_nowhere_is_refused_with_those_that_are(images: Tensor) -> None:
    net = Segmenter().eval()
    with torch.no_grad():
        net.head.bias.copy_(torch.tensor([100.0, -100.0, 0.0]))
    model = Model(net, labels=["cat", "dog", "bird"])
    with pytest.raises(TargetError, match=r"dog is predicted nowhere .* cat \(100%\)"):
        vitreous.explain(model, images, "gradient", "dog")
    with pytest.raises(TargetError, match="predicts 1 class"):
        vitreous.explain(model, images, "gradient", "top-2")


@pytest.mark.parametrize("given", [{}, {"point": (1, 2), "predicted": True}, {"point": (1,)}, {"box": (5, 5, 1, 1)}])
def test_a_region_is_one_place(given: dict[str, Any]) -> None:
    with pytest.raises(TargetError):
        Region(0, **given)


def test_regions_need_an_output_for_each_place() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIZE * SIZE, CLASSES)).eval()
    for target in (Region(0, point=(1, 2)), "0@1,2"):
        with pytest.raises(TargetError, match="one vector per image"):
            vitreous.explain(Model(net), torch.randn(1, 3, SIZE, SIZE), "gradient", target)


# ---------------------------------------------------------------------------------------------- pixels of the image


def crop(image: Image.Image) -> Tensor:
    """The middle 64×64 pixels of the image, at half their size."""
    left, top = (image.width - 64) // 2, (image.height - 64) // 2
    small = image.crop((left, top, left + 64, top + 64)).resize((SIZE, SIZE))
    return torch.from_numpy(np.array(small)).permute(2, 0, 1).float() / 255


def test_coordinates_are_pixels_of_the_image() -> None:
    torch.manual_seed(0)
    steps = Preprocess(crop, (0, 0, 0), (1, 1, 1))
    model = Model(Segmenter().eval(), preprocess=steps)
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 255, (84, 128, 3), np.uint8))
    mask = np.zeros((84, 128), bool)
    mask[10 + 32 : 10 + 64, 32 + 16 : 32 + 32] = True
    ready = model.prepare([photo])
    for pixels, own in (("1@33,12", "1@0,0"), ("1@95,73", "1@31,31"), ("1@48,42,64,74", "1@8,16,16,32")):
        trace, target = placed(model, [photo], pixels)
        other, inner = placed(model, ready, own)
        assert torch.allclose(trace.score(target), other.score(inner), atol=5e-3), pixels
    trace, target = placed(model, [photo], Region(1, mask=mask))
    assert torch.allclose(trace.score(target), placed_score(model, ready, "1@8,16,16,32"), atol=5e-3)
    with pytest.raises(TargetError, match=r"outside what .* sees .* x from 32.* to 9.*, y from 10.* to 74.* of 128×84"):
        placed(model, [photo], "1@5,5")
    mirrored = Model(model.net, preprocess=lambda image: crop(image).flip(-1))
    with pytest.raises(TargetError, match="no upright rectangle"):
        placed(mirrored, [photo], "1@50,50")


def placed_score(model: Model, images: Any, target: Any) -> Tensor:
    trace, aim = placed(model, images, target)
    return trace.score(aim)


# ------------------------------------------------------------------------------------------------------------ maps


def test_gradients_are_those_of_the_mean_score(model: Model, images: Tensor) -> None:
    leaf = images.clone().requires_grad_()
    (grad,) = torch.autograd.grad(model.net(leaf)[:, 1, 2, 1:].mean(-1).sum(), leaf)
    found = vitreous.explain(model, images, "gradient", "1@8,16,32,24", reduce="sum").map
    assert torch.allclose(found, grad.sum(1), atol=1e-6)


def test_occlusion_against_brute_force(model: Model, images: Tensor) -> None:
    found = vitreous.explain(model, images, "occlusion", "1@31,0", fill="zero").map
    hidden = images[:1].clone()
    hidden[..., 8:16, 24:] = 0
    before, after = (model.net(x)[0, 1, 0, 3] for x in (images[:1], hidden))
    assert found.shape == (2, 4, 4) and torch.allclose(found[0, 1, 3], (before - after).detach(), rtol=1e-3)


def test_place_leaves_a_placed_target_alone(model: Model, images: Tensor) -> None:
    trace, target = placed(model, images, "1@31,0")
    assert place(target, trace) is target


# --------------------------------------------------------------------------------- the rest of the package, for regions


@pytest.mark.slow
def test_several_targets_at_once_are_those_one_by_one(model: Model, images: Tensor) -> None:
    targets = ["1@31,0", Region(0, box=(0, 0, 16, 16)), "cat@9,9-dog@9,9"]
    for method in ("gradient", "gae"):
        together = vitreous.explain_targets(model, images, method, targets)
        for found, target in zip(together, targets):
            one = vitreous.explain(model, images, method, target)
            assert torch.allclose(found.map, one.map, atol=1e-6) and found.targets == one.targets


def test_rollout_and_attention_depend_on_the_region(model: Model, images: Tensor) -> None:
    for method in ("rollout", "attention"):
        here, there = (vitreous.explain(model, images, method, target) for target in ("1@2,2", "1@30,30"))
        assert here.targets == ("1@2,2",) * 2 and not torch.allclose(here.map, there.map, atol=1e-3)
    assert here.map[0].argmax() != there.map[0].argmax()


def test_the_readout_of_a_place_is_its_token(model: Model, images: Tensor) -> None:
    """The classifier reads each token by itself, so a rollout without attention is one at the place."""
    found = vitreous.explain(model, images, "rollout", "1@20,12", residual=1.0).map
    assert torch.allclose(found[:, 1, 2], torch.ones(2)) and torch.allclose(found.sum((1, 2)), torch.ones(2))
    box = vitreous.explain(model, images, "rollout", "1@0,0,16,8", residual=1.0).map[0]
    assert torch.allclose(box[0, :2], torch.tensor([0.5, 0.5]), atol=0.05) and torch.allclose(box.sum(), torch.ones(()))


def test_a_local_network_depends_on_the_patch_under_the_region(images: Tensor) -> None:
    torch.manual_seed(0)
    local = Model(Segmenter(local=True, scale=4).eval())
    for row, column in ((0, 0), (0, 3), (3, 0), (2, 1)):
        target = f"1@{column * PATCH + 3},{row * PATCH + 5}"
        for method in ("occlusion", "gradient"):
            map = vitreous.explain(local, images[:1], method, target).map[0]
            map = map if map.shape == (4, 4) else map.unfold(0, PATCH, PATCH).unfold(1, PATCH, PATCH).abs().sum((2, 3))
            assert int(map.abs().argmax()) == row * 4 + column and (map.abs() > 1e-5).sum() == 1


@pytest.mark.slow
def test_deletion_hides_patches_and_keeps_the_region(model: Model, images: Tensor) -> None:
    maps = torch.zeros(1, 4, 4)
    maps[0, 3, 3] = 1.0  # hidden first
    found = vitreous.evaluate(model, images[:1], maps, "deletion", target="1@31,0", steps=16)
    hidden = images[:1].clone()
    hidden[..., 24:, 24:] = images[0].mean((1, 2))[:, None, None]
    expected = [float(model.net(x).detach().softmax(1)[0, 1, 0, 3]) for x in (images[:1], hidden)]
    assert found.curve is not None and found.curve[0, :2].tolist() == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_a_figure_draws_the_region(model: Model, images: Tensor) -> None:
    point, box = (vitreous.explain(model, images[:1], "gradient", target) for target in ("1@16,16", "1@0,0,16,16"))
    plain = np.asarray(vitreous.explain(model, images[:1], "random").overlay())
    for found in (point, box):
        shown, bare = (np.asarray(one.overlay()) for one in (found, replace(found, regions=())))
        assert shown.shape == plain.shape and (shown != bare).any()
    changed = (np.asarray(box.overlay()) != np.asarray(replace(box, regions=()).overlay())).any(-1)
    half = changed.shape[0] // 2
    assert changed[:half, :half].any() and not changed[half:, half:].any()
    assert len(box[0].regions) == 1


@pytest.mark.slow
def test_leaderboards_and_studies_take_classes_not_pixels(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, steps = Segmenter().eval(), Preprocess(crop, (0, 0, 0), (1, 1, 1))
    for i in range(2):
        noise = np.random.default_rng(i).integers(0, 255, (70, 70, 3), np.uint8)
        Image.fromarray(noise).save(tmp_path / f"{i}.png")
    model = Model(net, preprocess=steps, labels=["cat", "dog", "bird"])
    board = vitreous.run_leaderboard(model, tmp_path, methods=["gradient", "rollout"], metrics=["deletion"])
    assert all(target.endswith("@predicted") for target in board.targets.values())
    with pytest.raises(TargetError, match="pixels of their own are not known"):
        vitreous.run_leaderboard(model, tmp_path, methods=["gradient"], metrics=["deletion"], target="0@10,10")


@pytest.mark.slow
def test_the_page_reads_no_files(model: Model, images: Tensor) -> None:
    targets = pytest.importorskip("vitreous.web.targets")

    class Stand:
        name = "segmenter"

    Stand.model = model  # type: ignore[attr-defined]
    Trace(model, images)
    with pytest.raises(TargetError, match="files are not read here"):
        targets.read(None, Stand, "cat@/etc/hostname.png", CLASSES)
    with pytest.raises(TargetError, match="files are not read here"):
        targets.read(None, Stand, "dog@1,2-cat@secret.png", CLASSES)
    assert str(targets.read(None, Stand, "cat@1,2", CLASSES)) == "0@1,2"


@pytest.mark.slow
def test_the_command_takes_several_places() -> None:
    from vitreous.cli.explain import split_targets

    model = Model(Segmenter().eval(), labels=["cat", "dog", "bird"], preprocess=Preprocess(crop, (0, 0, 0), (1, 1, 1)))
    assert split_targets("cat@1,2,dog@3,4,5,6,bird", model) == ["cat@1,2", "dog@3,4,5,6", "bird"]
    assert split_targets("cat@1,2", model) == ["cat@1,2"]
