"""Counterfactuals: against hand-made networks, exhaustive search, and runs written out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import detectors
import numpy as np
import pytest
import torch
import vlms
import windowed
import zoo
from PIL import Image
from test_dense import Segmenter
from torch import Tensor, nn
from typer.testing import CliRunner

import vitreous
from vitreous import Model, Trace, counterfactual
from vitreous._support.marks import read_mark
from vitreous.cli.main import app
from vitreous.counterfactuals.change import matched
from vitreous.counterfactuals.search import Search
from vitreous.errors import InputError, OptionError, TargetError, Unsupported
from vitreous.trace.perturb.dropped_runs import run_without

VIT = "timm ViT"  # 4 × 4 patches
GREY = {"search": "map", "method": "occlusion"}


@cache
def decided(name: str = VIT) -> Model:
    """A tiny model with clear opinions: its classifier is centred, so that patches decide."""
    net = zoo.network(name)
    with torch.no_grad():
        mean = net(zoo.images(name, 64)).mean(0)
    return Model(net, forward=lambda x: 20 * (net(x) - mean), name=name, classifier=True)


class Votes(nn.Module):
    """Each patch votes by its mean red for class 0 and by its mean blue for class 1: the optimum is known."""

    def __init__(self) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, 2, 8, 8, bias=False)
        self.cut.weight.data = torch.eye(3)[[0, 2]][..., None, None].expand(2, 3, 8, 8).contiguous() / 64

    def forward(self, x: Tensor) -> Tensor:
        votes = self.cut(x).flatten(2).sum(2)
        return torch.cat([votes, votes.new_full((len(votes), 1), -100.0)], 1)


@cache
def votes() -> Model:
    return Model(Votes().eval(), name="votes", classifier=True, labels=["red", "blue", "never"])


def coloured(red: Sequence[float]) -> Tensor:
    """A square of patches with so much red each."""
    side = round(len(red) ** 0.5)
    image = torch.zeros(1, 3, 8 * side, 8 * side)
    image[:, 0] = torch.tensor(red).reshape(side, side).repeat_interleave(8, 0).repeat_interleave(8, 1)
    return image


def masked(model: Model, image: Tensor, patches: Sequence[int]) -> Tensor:
    """The output without these tokens, by a run of its own with masked keys."""
    trace = Trace(model, image)
    gone = torch.zeros(1, trace.layout.tokens, dtype=torch.bool)
    gone[0, [trace.layout.patch_tokens[patch] for patch in patches]] = True
    with torch.no_grad():
        return run_without(trace, 0, gone).output.detach()[0]


# ---------------------------------------------------------------------------------------------------------- the optimum


def test_a_hand_made_network_gives_the_known_optimum() -> None:
    red = [1.5, 0.1, 0.1, 0.1, 0.1, 1.3, 0.1, 0.1, 0.1, 0.1, 1.2, 0.1, 0.1, 0.1, 0.1, 0.1]
    image, other = coloured(red), torch.zeros(1, 3, 32, 32)
    other[:, 2] = 0.5  # every patch of it votes 0.5 for blue, so k patches must leave less than 0.5 k of the red
    rest, needed = sum(red), 0
    for needed, value in enumerate(sorted(red, reverse=True), 1):
        rest -= value
        if 0.5 * needed > rest:
            break
    found = counterfactual(votes(), image, to="blue", other=other, proof=2**16, method="occlusion")
    assert len(found) == needed == 3 and {0, 5, 10} <= set(found.patches)
    assert found.certified and found.minimal and found.optimal and found.bound == needed
    assert (found.way, found.source.label, found.decision.label) == ("exchange", "red", "blue")


@pytest.mark.parametrize("number", [0, 6, pytest.param(2, marks=pytest.mark.slow)])
def test_the_exhaustive_optimum_of_a_small_grid(number: int) -> None:
    model, image = decided(), zoo.images(VIT, 8)[number : number + 1]
    trace = Trace(model, image)
    to = int(trace.output[0].topk(4).indices[3])
    found = counterfactual(model, image, to, proof=2**16)
    assert found.to.index == to and found.certified and found.optimal
    for size in range(1, len(found)):
        sets = list(combinations(range(16), size))
        gone = torch.zeros(len(sets), 17, dtype=torch.bool)
        gone[torch.arange(len(sets))[:, None], torch.tensor(sets) + 1] = True
        outputs = torch.cat([run_without(trace, 0, part).output.detach() for part in gone.split(256)])
        assert not (outputs.argmax(1) == to).any(), f"a set of {size} is enough"


def test_what_no_patch_can_change_is_said_and_proved() -> None:
    image = coloured([2.0, *[1.0] * 8])
    found = counterfactual(votes(), image, to="never", proof=2**9, **GREY)
    assert not found.certified and not found.minimal and not found.optimal
    assert found.impossible and found.bound == 10
    assert found.decision.label == "red" and "Not turned to never" in found.sentence


# ---------------------------------------------------------------------------------------------------------- certificate


def test_the_certified_run_is_that_of_masked_tokens() -> None:
    model, image = decided(), zoo.images(VIT, 4)[2:3]
    found = counterfactual(model, image)
    output = masked(model, image, found.patches)
    shares = output.softmax(-1)
    assert found.way == "tokens" and found.why is None
    assert found.decision.index == int(output.argmax()) == found.to.index
    for one in (found.source, found.to, found.decision):
        assert one.after == pytest.approx(float(shares[one.index]), abs=1e-5)
    assert found.path.to[-1] == pytest.approx(found.to.after, abs=1e-5)
    assert found.path.source[0] == pytest.approx(found.source.before, abs=1e-5)
    assert len(found.path.to) == len(found) + 1 and len(found.curve.to) == 16


def test_no_single_patch_can_be_put_back() -> None:
    model, image = decided(), zoo.images(VIT, 8)[3:4]
    found = counterfactual(model, image, "top-4", proof=0)
    assert len(found) > 1 and found.minimal and found.bound == 1 and not found.optimal
    for patch in found.patches:
        left = [one for one in found.patches if one != patch]
        assert int(masked(model, image, left).argmax()) != found.to.index
    assert found.undo == found.patches[::-1]


def test_the_curve_is_that_of_the_map() -> None:
    model, image = decided(), zoo.images(VIT, 4)[:1]
    found = counterfactual(model, image, method="gae", search="map", proof=0)
    contrast = f"{found.source.index}-{found.to.index}"
    map = vitreous.explain(model, image, "gae", contrast).map[0]
    order = map.flatten().argsort(descending=True, stable=True).tolist()
    assert torch.equal(found.map.map[0], map)
    for size in (1, 5, 11):
        share = masked(model, image, order[:size]).softmax(-1)[found.source.index]
        assert found.curve.source[size] == pytest.approx(float(share), abs=1e-5)


def test_any_other_class_will_do() -> None:
    model, image = decided(), zoo.images(VIT, 8)[3:4]
    found, second = counterfactual(model, image, "any", proof=2**16), counterfactual(model, image, proof=2**16)
    assert found.certified and found.decision.index == found.to.index != found.source.index
    assert len(found) <= len(second)


# ----------------------------------------------------------------------------------------------------------------- ways


def test_tokens_that_cannot_be_removed_are_hidden() -> None:
    image = coloured([2.0, *[0.0] * 15])
    image[:, 2] = 0.2
    found = counterfactual(votes(), image, **GREY)
    assert found.way == "pixels" and found.why
    hidden = image.clone()
    for patch in found.patches:
        row, column = divmod(patch, 4)
        hidden[..., 8 * row : 8 * row + 8, 8 * column : 8 * column + 8] = image.mean((-2, -1), keepdim=True)
    after = Votes()(hidden)[0].detach().softmax(-1)
    assert found.to.after == pytest.approx(float(after[found.to.index]), abs=1e-5)


@pytest.mark.parametrize("places", ["same", "matched"])
def test_an_exchange_is_pasted_pixels(places: Any) -> None:
    model = decided()
    images = zoo.images(VIT, 8)
    image, other = images[:1], images[4:5]
    found = counterfactual(model, image, "any", other=other, places=places, proof=0)
    pasted = image.clone()
    matches = range(16) if places == "same" else matched(Trace(model, image), Trace(model, other)).tolist()
    for patch in found.patches:
        (row, column), (down, across) = divmod(patch, 4), divmod(matches[patch], 4)
        taken = other[..., 16 * down : 16 * down + 16, 16 * across : 16 * across + 16]
        pasted[..., 16 * row : 16 * row + 16, 16 * column : 16 * column + 16] = taken
    share = Trace(model, pasted).output.softmax(-1)[0, found.to.index]
    assert found.way == "exchange" and found.other == "image 0" and found.patches
    assert found.to.after == pytest.approx(float(share), abs=1e-4)


def test_matching_an_image_with_itself_changes_nothing() -> None:
    trace = Trace(decided(), zoo.images(VIT, 1))
    assert matched(trace, trace).tolist() == list(range(16))


def test_a_whole_exchange_is_the_other_image() -> None:
    model, images = decided(), zoo.images(VIT, 8)
    classes = Trace(model, images).output.argmax(1).tolist()
    other = next(i for i in range(8) if classes[i] != classes[0])
    found = counterfactual(model, images[:1], classes[other], other=images[other : other + 1], search="map", proof=0)
    assert found.certified and len(found.curve.to) == 17
    share = Trace(model, images).output[other].softmax(-1)[classes[other]]
    assert found.curve.to[-1] == pytest.approx(float(share), abs=1e-4)


# ----------------------------------------------------------------------------------------------------------- invariance


def test_the_result_does_not_depend_on_the_batch_or_on_what_ran_before() -> None:
    model, image = decided(), zoo.images(VIT, 2)[1:]
    first = counterfactual(model, image)
    with vitreous.limit_memory(1):  # one variant at a time
        alone = counterfactual(model, image)
    trace = Trace(model, image)
    trace.explain("gae")
    again = counterfactual(model, trace)
    assert first.patches == alone.patches == again.patches
    assert first.curve.to == pytest.approx(alone.curve.to, abs=1e-5)
    assert first.mark["identity"] == alone.mark["identity"]


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in zoo.ZOO if "224" not in name])
def test_every_model_of_the_zoo(name: str) -> None:
    model, image = zoo.model(name), zoo.images(name, 1)
    if not Trace(model, image).classifies:
        with pytest.raises(TargetError, match="no classifier"):
            counterfactual(model, image)
        return
    found = counterfactual(model, image, proof=0)
    assert found.way in ("tokens", "pixels") and (found.why is None) == (found.way == "tokens")
    if found.certified and found.way == "tokens":
        assert int(masked(model, image, found.patches).argmax()) == found.to.index


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Swin", "Hiera"])
def test_windowed_models_hide_patches(name: str) -> None:
    model, images = windowed.kept(name)
    found = counterfactual(model, images[:1], proof=0, search="map")
    assert found.way == "pixels" and found.why and len(found.curve.to) == found.grid[0] * found.grid[1] + 1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions(dtype: torch.dtype) -> None:
    net = zoo.timm("vit_tiny_patch16_224")().eval().to(dtype)
    with torch.no_grad():
        for weights in net.head.parameters():
            weights.normal_(std=2.0, generator=torch.Generator().manual_seed(1))
    found = counterfactual(Model(net, classifier=True), zoo.images(VIT, 1).to(dtype), "any", proof=0)
    assert np.isfinite(found.curve.to).all()


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        ({"to": "no such class"}, TargetError, "unknown class"),
        ({"to": 99}, TargetError, "out of range"),
        ({"to": "top-1"}, TargetError, "already"),
        ({"to": "neuron:1"}, TargetError, "not one class"),
        ({"from_": "blue"}, TargetError, "decision is red, not blue"),
        ({"search": "best"}, OptionError, "search='best'"),
        ({"pool": 0}, OptionError, "pool"),
        ({"places": "matched"}, OptionError, "second image"),
        ({"other": torch.zeros(1, 3, 64, 64)}, InputError, "one size"),
        ({"steps": 3}, OptionError, "name the method"),
    ],
)
def test_what_cannot_be_asked(given: dict[str, Any], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        counterfactual(votes(), coloured([1.0] * 16), **given)


def test_several_images_are_refused() -> None:
    with pytest.raises(InputError, match="one image, not of 2"):
        counterfactual(votes(), torch.zeros(2, 3, 32, 32))


def test_models_without_a_decision_for_the_image() -> None:
    with pytest.raises(Unsupported, match="one decision for the whole image"):
        counterfactual(Model(Segmenter().eval(), classifier=True), torch.randn(1, 3, 64, 64))
    with pytest.raises(TargetError, match="no classifier"):
        counterfactual(Model(zoo.network(VIT), classifier=False), zoo.images(VIT, 1))
    with pytest.raises(Unsupported, match="no classes"):
        counterfactual(Model(zoo.network(VIT), output="value"), zoo.images(VIT, 1))
    net = zoo.network(VIT)
    with pytest.raises(Unsupported, match="one class only"):
        counterfactual(Model(net, forward=lambda x: net(x)[:, :1], output="sigmoid"), zoo.images(VIT, 1))


@pytest.mark.slow
def test_detectors_and_models_of_words_are_refused() -> None:
    with pytest.raises(Unsupported, match="one decision for the whole image"):
        counterfactual(Model(detectors.yolos(), name="yolos"), torch.randn(1, 3, 64, 64))
    from vitreous.models.speaker import Speaker

    own = Speaker(vlms.built("llava"), vlms.tokenizer(), "llava")
    images = torch.randn(1, 3, vlms.SIDE, vlms.SIDE)
    asked = own.model("what is this ?", own.generate("what is this ?", images, 2))
    with pytest.raises(Unsupported, match="one decision for the whole image"):
        counterfactual(asked, images)


# --------------------------------------------------------------------------------------------------------------- search


def table(sets: Sequence[set[int]], count: int = 8, most: int = 8) -> Search:
    """A search that turns where any of these sets is contained; each patch of the nearest brings it nearer."""

    def margin(rows: Tensor) -> Tensor:
        chosen = [set(row.nonzero()[:, 0].tolist()) for row in rows]
        return torch.tensor([max(0.5 - len(one - some) for one in sets) for some in chosen])

    return Search(margin, count, most, torch.device("cpu"))


def test_pruning_keeps_what_is_needed() -> None:
    search = table([{1, 4}, {2, 3, 5}])
    start = search.measure([[0, 1, 2, 3, 4, 5]])[0]
    from vitreous.counterfactuals.search import Reached

    found = search.pruned(Reached([0, 1, 2, 3, 4, 5], start))
    assert set(found.patches) in ({1, 4}, {2, 3, 5}) and found.turns


def test_growth_follows_true_effects_and_stops_at_its_limit() -> None:
    assert set(table([{1, 4, 6}]).grown(pool=3, most=8).patches) == {1, 4, 6}
    short = table([{1, 4, 6}]).grown(pool=3, most=2)
    assert not short.turns and len(short.patches) == 2


def test_proof_finds_what_greedy_misses() -> None:
    found = table([{5, 7}]).proved(below=4, budget=100)
    assert found.bound == 2 and found.found is not None and set(found.found.patches) == {5, 7}
    assert table([{5, 7}]).proved(below=2, budget=100) == (2, None)
    assert table([{5, 7}]).proved(below=4, budget=10).bound == 2  # sets of two were not run


# ---------------------------------------------------------------------------------------------------------------- files


def test_files_and_what_they_tell(tmp_path: Path) -> None:
    found = counterfactual(votes(), coloured([2.0, *[0.1] * 15]), "any", **GREY)
    for ending in ("png", "npz", "json"):
        file = found.save(tmp_path / f"one.{ending}")
        mark = read_mark(file)
        assert mark is not None and mark["identity"] == found.mark["identity"]
        assert mark["counterfactual"]["patches"] == list(found.patches)
    with np.load(tmp_path / "one.npz") as stored:
        assert stored["patches"].tolist() == list(found.patches)
        assert stored["changed"].sum() == len(found) and stored["path"].shape == (2, len(found) + 1)
    told = json.loads((tmp_path / "one.json").read_text())["counterfactual"]
    assert told["certified"] is found.certified and told["undo"] == list(found.undo)
    with pytest.raises(OptionError, match="cannot save"):
        found.save(tmp_path / "one.txt")
    assert found._repr_png_()[:4] == b"\x89PNG"


def test_the_image_after_the_change_is_pale_where_tokens_are_gone() -> None:
    found = counterfactual(decided(), zoo.images(VIT, 1), proof=0)
    shown = np.asarray(found.shown, np.float32)
    scale = shown.shape[0] // 64
    row, column = found.places[0]
    middle = shown[(16 * row + 8) * scale, (16 * column + 8) * scale]
    assert np.ptp(middle) <= 1 and middle.min() >= 0.8 * 255  # grey and pale


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(2):
        pixels = np.random.default_rng(number).integers(0, 256, (64, 64, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return folder


def command(*words: Any) -> Any:
    base = ["counterfactual", "--model", "vit_tiny_patch16_224", "--weights", "random", "--img-size", "64"]
    return CliRunner().invoke(app, [*base, *map(str, words)], catch_exceptions=False)


@pytest.mark.slow
def test_the_command_writes_a_figure_and_json(photos: Path, tmp_path: Path) -> None:
    done = command(photos / "0.png", "-o", tmp_path / "out", "--to", "any", "--json")
    told = json.loads(done.stdout)["images"][0]
    assert done.exit_code == (0 if told["certified"] else 1)
    assert {"figure", "numbers", "json"} <= set(told)
    assert json.loads(Path(told["json"]).read_text())["counterfactual"]["patches"] == told["patches"]
    several = command(photos, "-o", tmp_path / "two", "--to", "any", "--format", "none")
    assert len(several.stdout.splitlines()) == 3 and "certified" in several.stdout
    assert not (tmp_path / "two").exists()
    exchanged = command(photos / "0.png", "--with", photos / "1.png", "--format", "none", "--search", "map")
    assert "exchanged with" in exchanged.stdout


@pytest.mark.slow
def test_the_command_refuses_in_one_line(photos: Path) -> None:
    with pytest.raises(TargetError, match="unknown class"):
        command(photos / "0.png", "--to", "no such class")
    with pytest.raises(OptionError, match="search"):
        command(photos / "0.png", "--search", "luck")
