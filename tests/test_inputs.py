"""Inputs beside the images: they travel with the images through every method, metric and study."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from conftest import Run, off
from machine import DIFFERENCES, ROUNDING
from PIL import Image
from test_kinds import Vit
from test_methods import CHEAP
from torch import Tensor, nn

import vitreous
from vitreous import METHODS, METRICS, Model, Trace
from vitreous.errors import InputError, ModelError, Unsupported
from vitreous.trace.run import Run as Pass

SIZE, TARGETS = (64, 80), [1, 4, 2]


class Table(Vit):
    """A table of four numbers: a token of its own, and beside the mean of all tokens before the classifier."""

    def __init__(self, token: bool = True, late: bool = True) -> None:
        super().__init__()
        self.token, self.late = token, late
        self.embed = nn.Linear(4, 32)
        self.last = nn.Linear(32 + 32, zoo.CLASSES)
        self.last.weight.data *= 4

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        made, tokens = self.embed(table)[:, None], self.tokens(x)
        tokens = self.through(torch.cat([made, tokens], 1) if self.token else tokens)[-1]
        read = tokens.mean(1)
        beside = made[:, 0] * torch.tanh(read) if self.late else read
        return self.last(torch.cat([read, beside], 1))


class ScaledBlock(zoo.Block):
    """A block whose step is scaled."""

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:  # type: ignore[override]
        return x + (super().forward(x) - x) * scale


class Scaled(Vit):
    """Every block is scaled by the table."""

    def __init__(self) -> None:
        super().__init__(cls=True, block=ScaledBlock)
        self.scale = nn.Linear(4, 32)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        x = self.tokens(x)
        for block in self.blocks:
            x = block(x, (1 + torch.tanh(self.scale(table)))[:, None])
        return self.read(x)


class Siamese(Vit):
    """Two images through the same blocks."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        one, other = (self.through(self.tokens(x))[-1].mean(1) for x in (a, b))
        return self.head(one * other)


class Towers(nn.Module):
    """Two images, each through blocks of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Vit(cls=True), Vit(cls=True)
        torch.manual_seed(5)
        for weight in self.two.parameters():
            weight.data += torch.randn_like(weight) / 20

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.one(a) * self.two(b)


class Half(Vit):
    """The same network of one image, the other held constant."""

    other: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.cls:
            return super().forward(x) * self.other
        return self.head(self.through(self.tokens(x))[-1].mean(1) * self.other)


NETS: dict[str, Any] = {
    "both": Table,
    "token": lambda: Table(late=False),
    "late": lambda: Table(token=False),
    "scaled": Scaled,
    "siamese": Siamese,
    "towers": Towers,
}
TABLES = [name for name in NETS if name not in ("siamese", "towers")]
PAIRS = ["siamese", "towers"]


@cache
def model(name: str) -> Model:
    torch.manual_seed(3)
    net = NETS[name]().eval()
    net.img_size = SIZE
    return Model(net, name=name, classifier=True)


def batch(count: int = 3) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(7)
    return torch.randn(count, 3, *SIZE, generator=random), 2 * torch.randn(count, 4, generator=random)


def built_in(name: str, row: Tensor) -> Model:
    """The same network as a function of one image, whatever its variants."""
    net = model(name).net
    return Model(net, name=name, forward=lambda x: net(x, row.expand(len(x), -1)), classifier=True)


def half(name: str, image: str, other: Tensor) -> Model:
    """The network of one of the two images."""
    net = model(name).net
    with torch.no_grad():
        if name == "siamese":
            made, state = Half(), net.state_dict()
            made.other = net.through(net.tokens(other))[-1].mean(1)
        else:
            own, far = (net.one, net.two) if image == "a" else (net.two, net.one)
            made, state = Half(cls=True), own.state_dict()
            made.other = far(other)
    made.load_state_dict(state)
    return Model(made.eval(), classifier=True)


# ------------------------------------------------------------------------------------------------- against brute force


def test_gradient_is_that_of_the_network_called_directly() -> None:
    images, table = batch()
    leaf = images.clone().requires_grad_()
    model("both").net(leaf, table)[:, 1].sum().backward()
    ours = vitreous.explain(model("both"), images, "gradient", 1, inputs={"table": table}, reduce="sum").map
    assert leaf.grad is not None and off(ours, leaf.grad.sum(1)) < ROUNDING


def test_occlusion_is_brute_force_with_the_inputs_of_each_image() -> None:
    images, table = batch()
    net, expected = model("late").net, torch.zeros(3, 4, 5)
    with torch.no_grad():
        for i in range(3):
            whole = net(images[i : i + 1], table[i : i + 1])[0, TARGETS[i]]
            for y in range(4):
                for x in range(5):
                    hidden = images[i : i + 1].clone()
                    mean = hidden.mean((2, 3), keepdim=True)
                    hidden[:, :, 16 * y : 16 * y + 16, 16 * x : 16 * x + 16] = mean
                    expected[i, y, x] = whole - net(hidden, table[i : i + 1])[0, TARGETS[i]]
    trace = Trace(model("late"), images, {"table": table})
    assert off(trace.explain("occlusion", TARGETS).map, expected) < DIFFERENCES


def test_token_ablation_is_brute_force_with_the_inputs_of_each_image() -> None:
    images, table = batch()
    net, expected = model("late").net, torch.zeros(3, 20)

    def score(i: int, keep: list[int]) -> Tensor:
        tokens = net.through(net.tokens(images[i : i + 1])[:, keep])[-1].mean(1)
        beside = net.embed(table[i : i + 1]) * torch.tanh(tokens)
        return net.last(torch.cat([tokens, beside], 1))[0, TARGETS[i]]

    with torch.no_grad():
        for i in range(3):
            for token in range(20):
                left = [one for one in range(20) if one != token]
                expected[i, token] = score(i, list(range(20))) - score(i, left)
    trace = Trace(model("late"), images, {"table": table})
    assert off(trace.explain("token_ablation", TARGETS).map.flatten(1), expected) < DIFFERENCES


QUICK = ["gae", "legrad"]


@pytest.mark.parametrize(
    ("method", "name"),
    [
        pytest.param(method, name, marks=() if method in QUICK and name == "both" else pytest.mark.slow)
        for method in METHODS
        for name in TABLES
    ],
)
def test_a_batch_gives_what_each_image_gives_with_its_own_inputs(method: str, name: str) -> None:
    images, table = batch()
    options = CHEAP.get(method, {})
    maps = Trace(model(name), images, {"table": table}).explain(method, TARGETS, **options).map
    for i in range(3):
        given = {"table": table[i : i + 1]}
        single = vitreous.explain(model(name), images[i], method, TARGETS[i], inputs=given, **options).map
        assert off(maps[i], single[0]) < DIFFERENCES, "the same alone"
        try:
            plain = vitreous.explain(built_in(name, table[i]), images[i], method, TARGETS[i], **options).map
        except Unsupported:  # more rows behind the blocks than images
            continue
        assert off(maps[i], plain[0]) < DIFFERENCES, "the same as the network with its input built in"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["both", "late", "scaled"])
@pytest.mark.parametrize("metric", [metric for metric, one in METRICS.items() if not one.masks])
def test_every_metric_gives_each_image_its_own_inputs(metric: str, name: str) -> None:
    images, table = batch(4)
    targets = [1, 4, 2, 0]
    found = vitreous.evaluate(model(name), images, "gae", metric, targets, inputs={"table": table})
    others = METRICS[metric].others  # a mosaic of several images
    for i in range(0 if others else 4):
        given = {"table": table[i : i + 1]}
        single = vitreous.evaluate(model(name), images[i], "gae", metric, targets[i], inputs=given)
        assert torch.allclose(found.value[i], single.value[0], atol=1e-4, equal_nan=True), "the same alone"
        if found.curve is not None and single.curve is not None:
            assert off(found.curve[i], single.curve[0]) < 1e-3
        if metric not in ("parameter_randomisation", "reparametrisation", "max_sensitivity"):
            plain = vitreous.evaluate(built_in(name, table[i]), images[i], "gae", metric, targets[i])
            assert torch.allclose(found.value[i], plain.value[0], atol=1e-4, equal_nan=True), "as built in"


# ---------------------------------------------------------------------------------------------------------- two images


@pytest.mark.parametrize(
    ("method", "image", "name"),
    [
        pytest.param(method, image, name, marks=() if (method, image) == ("gae", "b") else pytest.mark.slow)
        for method in METHODS
        for image in "ab"
        for name in PAIRS
    ],
)
def test_attention_is_that_of_the_explained_image(method: str, image: str, name: str) -> None:
    """Of two towers, also of the same weights: each method gives what the network of that image alone gives."""
    images, options = batch(2)[0], CHEAP.get(method, {})
    others, targets = images.flip(0, 3), [1, 2]
    own = Model(model(name).net, image=image, classifier=True)
    trace = Trace(own, images, {"ab".replace(image, ""): others})
    assert trace.layout.obstacle is None and trace.layout.layers == 3
    try:
        maps = trace.explain(method, targets, **options).map
    except Unsupported:
        assert name == "siamese", "its blocks run twice"
        return
    for i in range(2):
        expected = vitreous.explain(half(name, image, others[i : i + 1]), images[i], method, targets[i], **options).map
        assert off(maps[i], expected[0]) < DIFFERENCES


class Windowed(nn.Module):
    """Two images through the same Swin; with `other`, its embedding in place of the second image."""

    other: Tensor | None = None

    def __init__(self) -> None:
        import timm

        super().__init__()
        torch.manual_seed(0)
        options = {"img_size": 64, "window_size": 4, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 2)}
        self.swin = timm.create_model("swin_tiny_patch4_window7_224", num_classes=0, **options)
        self.head = nn.Linear(self.swin.num_features, zoo.CLASSES)

    def forward(self, a: Tensor, b: Tensor | None = None) -> Tensor:
        return self.head(self.swin(a) * (self.swin(b) if self.other is None else self.other))


@pytest.mark.slow
@pytest.mark.parametrize("image", ["a", "b"])
def test_windows_are_those_of_the_explained_image(image: str) -> None:
    images, net, half = batch(2)[0][..., :64], Windowed().eval(), Windowed().eval()
    own = Model(net, image=image, classifier=True)
    with torch.no_grad():
        far = net.swin(images.flip(0))
    for method in ("attention", "rollout", "gae", "grad_rollout", "norm_attention"):
        maps = Trace(own, images, {"ab".replace(image, ""): images.flip(0)}).explain(method, [1, 2]).map
        for i in range(2):
            half.other = far[i : i + 1]
            expected = vitreous.explain(Model(half, classifier=True), images[i], method, [1, 2][i]).map
            assert off(maps[i], expected[0]) < DIFFERENCES


@pytest.mark.parametrize(
    "method", ["gae", *(pytest.param(m, marks=pytest.mark.slow) for m in ("gradient", "occlusion"))]
)
def test_swapped_images_swap_the_maps(method: str) -> None:
    one, other = batch(2)[0].split(1)
    for net, target in ((model("siamese"), 1), (zoo_encoder(), None)):
        pair, swapped = (vitreous.explain_pair(net, *each, method, target) for each in ((one, other), (other, one)))
        assert off(pair.one.map, swapped.other.map) < ROUNDING and off(pair.other.map, swapped.one.map) < ROUNDING
        assert off(pair.one.map, pair.other.map) > 0.1
        assert pair.one.identity != pair.other.identity


@cache
def zoo_encoder() -> Model:
    net = Vit(cls=True).eval()
    net.img_size = SIZE
    return Model(net, name="encoder")


def test_likeness_is_the_cosine_of_the_embeddings() -> None:
    one, other = batch(2)[0].split(1)
    net, leaf = zoo_encoder().net, one.clone().requires_grad_()
    with torch.no_grad():
        far = net.through(net.tokens(other))[-1][:, 0]
    near = net.through(net.tokens(leaf))[-1][:, 0]
    torch.cosine_similarity(near, far).sum().backward()
    found = vitreous.explain_pair(zoo_encoder(), one, other, "gradient", reduce="sum")
    assert leaf.grad is not None and off(found.one.map, leaf.grad.sum(1)) < ROUNDING
    assert found.one.target == "like:image 0"


class Similar(Siamese):
    """One number for each pair."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.cosine_similarity(*(self.through(self.tokens(x))[-1].mean(1) for x in (a, b)))


def test_a_network_that_returns_one_number_for_a_pair() -> None:
    images, net = batch(2)[0], Similar().eval()
    others, leaf = images.flip(0, 2), images.clone().requires_grad_()
    net(leaf, others).sum().backward()
    found = vitreous.explain_pair(Model(net), images, others, "gradient", reduce="sum")
    assert leaf.grad is not None and off(found.one.map, leaf.grad.sum(1)) < ROUNDING and found.one.target == "neuron:0"


@pytest.mark.slow
def test_the_texts_of_a_clip_are_its_classes() -> None:
    """Texts that are the same for all images are given as they are, and the scores of the images are read."""
    from transformers import CLIPConfig, CLIPModel

    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**small, "vocab_size": 99, "max_position_embeddings": 20, "eos_token_id": 98, "bos_token_id": 0}
    sees = {**small, "image_size": 64, "patch_size": 16}
    net = CLIPModel(CLIPConfig(text_config=text, vision_config=sees, projection_dim=16)).eval()
    ids = torch.randint(2, 97, (3, 6), generator=torch.Generator().manual_seed(0))
    ids[:, -1] = 98
    images = batch(2)[0][:, :, :, :64]
    leaf = images.clone().requires_grad_()
    net(pixel_values=leaf, input_ids=ids).logits_per_image[:, 2].sum().backward()
    model = Model(net, inputs={"input_ids": ids}, classifier=True)
    assert leaf.grad is not None
    assert off(vitreous.explain(model, images, "gradient", 2, reduce="sum").map, leaf.grad.sum(1)) < ROUNDING
    assert model.outputs == 3 and Trace(model, images).layout.layers == 2
    for method in ("gae", "rollout", "token_ablation"):
        maps = [vitreous.explain(model, some, method, 2).map for some in (images, images[1:])]
        assert off(maps[0][1:], maps[1]) < DIFFERENCES


@pytest.mark.slow
def test_a_pair_is_drawn_side_by_side(tmp_path: Path) -> None:
    one, other = batch(2)[0].split(1)
    pair = vitreous.explain_pair(zoo_encoder(), one, other, "gradcam")
    assert len(pair.both) == 2 and pair._repr_png_()
    with Image.open(pair.save(tmp_path / "pair.png")) as drawn:
        assert drawn.width > 1.5 * drawn.height
    assert len(vitreous.Attribution.load(pair.save(tmp_path / "pair.npz"))) == 2


def test_pairs_that_cannot_be() -> None:
    images = batch()[0]
    with pytest.raises(InputError, match="2 and 1 images are no pairs"):
        vitreous.explain_pair(zoo_encoder(), images[:2], images[:1], "gradient")
    with pytest.raises(vitreous.TargetError, match=r"takes one image, .* arguments="):
        vitreous.explain_pair(zoo_encoder(), images[:1], images[1:2], "gradient", 3)
    with pytest.raises(InputError, match="name the two that take the images"):
        vitreous.explain_pair(zoo_encoder(), images[:1], images[1:2], "gradient", arguments=["x"])
    with pytest.raises(vitreous.TargetError, match=r"like:nothing\.jpg"):
        vitreous.explain(zoo_encoder(), images[:1], "gradient", "like:nothing.jpg")


# ----------------------------------------------------------------------------------------------- what is given, and how


class Named(Vit):
    """The image is neither the first argument nor called an image."""

    def forward(self, table: Tensor, rgb: Tensor, shift: float = 0.0) -> Tensor:
        return super().forward(rgb) * table[:, :1] + shift


class Optional(Vit):
    """Nothing is needed; what the first argument gets has two axes."""

    def forward(self, table: Tensor | None = None, rgb: Tensor | None = None, ids: Tensor | None = None) -> Tensor:
        assert rgb is not None and (ids is None or ids.dtype == torch.long)
        _, _ = (1, 1) if table is None else table.shape
        return super().forward(rgb) * (1 if ids is None else ids[:, :1]) * (1 if table is None else table[:, :1])


def test_the_image_is_found_among_the_arguments() -> None:
    images, table = batch()
    expected = vitreous.explain(Model(Vit().eval(), classifier=True), images, "gradient", 1).map
    scale = table[:, 0, None, None]
    found = vitreous.explain(Model(Named().eval(), classifier=True), images, "gradient", 1, inputs={"table": table})
    assert off(found.map, expected * scale.abs()) < ROUNDING, "by what is left"
    net = Model(Optional().eval(), classifier=True)
    ids = torch.arange(1, 4)[:, None]
    found = vitreous.explain(net, images, "gradient", 1, inputs={"ids": ids})
    assert off(found.map, expected * ids[:, :, None]) < ROUNDING, "by a trial; whole numbers stay whole"
    own = Model(Optional().eval(), image="rgb", classifier=True, inputs={"table": table[:1]})
    assert off(vitreous.explain(own, images, "gradient", 1).map, expected * scale[:1].abs()) < ROUNDING, "as named"


def test_a_function_of_the_user_gets_the_inputs() -> None:
    images, table = batch()
    net = model("both").net
    own = Model(net, forward=lambda x, **rest: net(x, rest["numbers"]), classifier=True)
    found = vitreous.explain(own, images, "gradient", 1, inputs={"numbers": table}).map
    assert off(found, vitreous.explain(model("both"), images, "gradient", 1, inputs={"table": table}).map) < ROUNDING


def test_one_row_serves_all_images_and_precision_follows_the_model() -> None:
    images, table = batch()
    one = vitreous.explain(model("both"), images, "gae", 1, inputs={"table": table[:1].double()}).map
    each = vitreous.explain(model("both"), images, "gae", 1, inputs={"table": table[:1].expand(3, -1)}).map
    assert off(one, each) < ROUNDING
    shared = Model(model("both").net, inputs={"table": table[:1].tolist() and table[:1]}, classifier=True)
    assert off(vitreous.explain(shared, images, "gae", 1).map, each) < ROUNDING


def test_wrong_inputs_are_refused() -> None:
    images, table = batch()
    net = model("both")
    for given, said in (
        ({"table": table[:2]}, "has 2 rows for 3 images; give one row for each image, or one for all"),
        ({"tabel": table}, "takes no argument 'tabel'; did you mean table"),
        ({"table": ["a", "b", "c"]}, "is no array of numbers"),
        ({"table": object()}, "is a object; give a tensor"),
        ({"table": table / 0}, "contains NaN or infinity"),
    ):
        with pytest.raises(InputError, match=said):
            vitreous.explain(net, images, "gradient", 1, inputs=given)
    with pytest.raises(InputError, match=r"takes a dictionary \{name: tensor\}"):
        Trace(net, images, [table])
    with pytest.raises(InputError, match=r"'x'\]: both takes its images there|takes no argument"):
        vitreous.explain(Model(net.net, name="both", image="x"), images, "gradient", 1, inputs={"x": images})
    with pytest.raises(InputError, match=r"image='picture': Table.* takes x, table"):
        Model(Table(), image="picture")
    with pytest.raises(InputError, match="a trace has its own inputs"):
        vitreous.explain(net, Trace(net, images, {"table": table}), "gradient", 1, inputs={"table": table})
    with pytest.raises(ModelError, match=r"needs the argument table; .*inputs=\{'table': …\}, one row for each image"):
        vitreous.explain(Model(Table().eval()), images, "gradient", 1)


def test_variants_of_unknown_images_are_refused() -> None:
    """A method that does not say of which image a variant is would mix the inputs up."""
    images, table = batch()
    trace = Trace(model("both"), images, {"table": table})
    with pytest.raises(Unsupported, match=r"does not say of which image each is \(Run.of\)"):
        trace.run(images.flip(0), Pass.to_output())
    flipped = trace.run(images.flip(0), Pass.to_output().of([2, 1, 0])).output
    assert off(flipped.flip(0), trace.output) < ROUNDING
    alone = Trace(model("both"), images[:1], {"table": table[:1]})
    assert len(alone.run(images, Pass.to_output()).output) == 3


def test_no_method_makes_a_trace_that_forgets_the_inputs() -> None:
    """Methods and metrics make further traces by `Trace.like`, which takes the inputs along."""
    package = Path(vitreous.__file__).parent
    files = [file for room in ("methods", "metrics", "trace") for file in (package / room).rglob("*.py")]
    wrong = [f.name for f in files if "Trace(trace.model, " in f.read_text() or "Trace(case.trace" in f.read_text()]
    assert [name for name in wrong if name != "apply.py"] == [], "apply.py: CUDA graphs, which take no inputs"


def test_provenance_tells_the_inputs(tmp_path: Path) -> None:
    images, table = batch()
    one, other = (
        vitreous.explain(model("both"), images, "gae", 1, inputs={"table": rows}) for rows in (table, table + 1)
    )
    assert len(one.provenance["inputs"]) == 3 and one.identity != other.identity
    assert one[1].inputs == one.inputs[1:2]
    assert vitreous.Attribution.load(one.save(tmp_path / "a.npz")).identity == one.identity
    shared = Model(model("both").net, inputs={"table": table[:1]}, classifier=True)
    assert vitreous.explain(shared, images, "gae", 1).provenance["shared_inputs"]


# ------------------------------------------------------------------------------------------------------- data sets


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for i, image in enumerate(torch.randint(0, 255, (4, *SIZE, 3), dtype=torch.uint8, generator=None)):
        Image.fromarray(image.numpy()).save(tmp_path / f"{i}.png")
    return tmp_path


@pytest.mark.slow
def test_leaderboards_and_studies_take_the_rows_of_the_images_they_choose(folder: Path, tmp_path: Path) -> None:
    table = batch(4)[1]
    np.savez(tmp_path / "rows.npz", table=table.numpy())
    net = model("both")
    whole = vitreous.run_leaderboard(net, folder, ["gae"], ["deletion"], inputs={"table": table}, target="1")
    some = vitreous.run_leaderboard(
        net, folder, ["gae"], ["deletion"], inputs=tmp_path / "rows.npz", target="1", sample=2
    )
    names = [sample.name for sample in whole.data.samples]
    places = [names.index(sample.name) for sample in some.data.samples]
    m = whole.methods.index("gae")
    assert np.allclose(some.values[m][0], whole.values[m][0][places], atol=1e-5)
    assert (
        some.data.fingerprint
        != vitreous.run_leaderboard(
            net, folder, ["gae"], ["deletion"], inputs={"table": table + 1}, target="1", sample=2
        ).data.fingerprint
    )
    study = vitreous.run_study(
        "maps", folder, net, tmp_path / "out", methods=["gae"], target="1", inputs={"table": table}, shard=2, batch=2
    )
    images = [str(folder / f"{i}.png") for i in range(4)]
    expected = vitreous.explain(net, images, "gae", 1, inputs={"table": table}).map
    for row in study.iter_maps():
        assert off(torch.as_tensor(np.array(row["map"])), expected[int(row["image"][0])]) < DIFFERENCES


def test_inputs_of_a_data_set_are_checked(folder: Path) -> None:
    with pytest.raises(InputError, match="has 3 rows for 4 images"):
        vitreous.run_leaderboard(model("both"), folder, ["gae"], ["deletion"], inputs={"table": batch()[1]})
    (folder / "no.npz").write_text("nothing")
    with pytest.raises(InputError, match="is no file of inputs"):
        vitreous.run_leaderboard(model("both"), folder, ["gae"], ["deletion"], inputs=folder / "no.npz")


# --------------------------------------------------------------------------------------------------------- commands


@pytest.mark.slow
def test_why_two_images_are_alike_on_the_command_line(run: Run, cat: Path, tmp_path: Path) -> None:
    with Image.open(cat) as image:
        image.transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(tmp_path / "turned.png")
    run("explain", cat, "--like", tmp_path / "turned.png", "--method", "gae", "--out", "maps")
    made = vitreous.Attribution.load("maps/cat-like-turned.npz")
    assert len(made) == 2 and Path("maps/cat-like-turned.png").is_file()
    expected = vitreous.explain_pair(None, str(cat), str(tmp_path / "turned.png"), "gae")
    assert off(made.map, expected.both.map) < DIFFERENCES


@pytest.mark.slow
def test_inputs_on_the_command_line(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each image gets its row, in the order of the images."""
    monkeypatch.setattr("vitreous.models.load.load", lambda *_, **__: model("both"))
    table = batch(4)[1]
    np.savez("rows.npz", table=table.numpy())
    run(
        "explain",
        folder,
        "--inputs",
        "rows.npz",
        "--method",
        "gae",
        "--target",
        "1",
        "--format",
        "npz",
        "--out",
        "maps",
    )
    for i in range(4):
        given = {"table": table[i : i + 1]}
        expected = vitreous.explain(model("both"), str(folder / f"{i}.png"), "gae", 1, inputs=given)
        made = vitreous.Attribution.load(f"maps/{i}.npz")
        assert off(made.map, expected.map) < DIFFERENCES and made.inputs == expected.inputs
    asked = ("--method", "gae", "--metric", "deletion", "--target", "1")
    run("evaluate", folder, "--inputs", "rows.npz", *asked, "--out", "board")
    run("study", "maps", folder, "--inputs", "rows.npz", "--method", "gae", "--target", "1", "--out", "studies")
    board = json.loads(Path("board/leaderboard.json").read_text())
    assert board["table"]
    (stored,) = Path("studies").glob("maps-*")
    for row in vitreous.open_study(stored).iter_maps():
        given = {"table": table[int(row["image"][0])][None]}
        expected = vitreous.explain(model("both"), str(folder / row["image"]), "gae", 1, inputs=given)
        assert off(torch.as_tensor(np.array(row["map"])), expected.map[0]) < DIFFERENCES
