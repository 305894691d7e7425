"""Latents: fitted, stored, explained as targets, ranked, shown; what cannot be is refused."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import zoo
from conftest import Run
from PIL import Image
from scipy.optimize import nnls
from torch import Tensor

import vitreous
from vitreous import Latents, Trace
from vitreous.errors import InputError, OptionError, TargetError, Unsupported
from vitreous.evaluation.discover.fit import Size, fit, matched, quality, random_directions, stability
from vitreous.evaluation.discover.names import name_latents, read_words
from vitreous.evaluation.discover.rank import Spread, ablate, first_order, measured_by, remove
from vitreous.evaluation.discover.shards import Shards
from vitreous.models.fingerprint import fingerprint
from vitreous.trace.features import patch_features
from vitreous.trace.latent import LatentModel, latent_model
from vitreous.trace.latents import keep_largest, nonnegative
from vitreous.trace.perturb.drop_tokens import scores_keeping
from vitreous.trace.perturb.dropped_runs import kept

NAME = "timm ViT"
LAYER = 1


def latents_of(model: vitreous.Model, images: Tensor, layer: int = LAYER, kind: str = "sae", k: int = 6) -> Latents:
    """Random latents that fit the tokens of a layer."""
    tokens = patch_features(Trace(model, images), [layer])[layer].flatten(0, -2)
    chance = torch.Generator().manual_seed(1)
    decoder = F.normalize(torch.randn(24, tokens.shape[1], generator=chance), dim=1).to(tokens)
    mean = tokens.mean(0)
    more = {"encoder": decoder.clone(), "bias": -(decoder @ mean), "k": k} if kind == "sae" else {}
    return Latents("noise", layer, kind, mean, decoder, model=fingerprint(model), **more)  # type: ignore[arg-type]


@pytest.fixture
def album(tmp_path: Path) -> Path:
    """Twenty-two images of two kinds in class folders, and one that is broken."""
    chance = np.random.default_rng(0)
    for i in range(22):
        place = tmp_path / "album" / str(i % 2) / f"{i:02}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        pixels = chance.integers(0, 255, (32, 32, 3), dtype=np.uint8)
        pixels[:, 16:, i % 2] = 250
        Image.fromarray(pixels).save(place)
    (tmp_path / "album" / "1" / "broken.png").write_bytes(b"no image")
    return tmp_path / "album"


QUICK: dict[str, Any] = {"latents": 16, "k": 4, "seeds": 2, "steps": 20, "candidates": 2, "removals": 1, "per_class": 3}


def found_in(album: Path, **more: Any) -> vitreous.Discovered:
    return vitreous.discover(zoo.model(NAME), album, LAYER, **{**QUICK, **more})


# ---------------------------------------------------------------------------------------------------------- the numbers


def test_k_of_a_token_are_active_and_reconstruct() -> None:
    values = torch.rand(5, 7, 12) + 0.1
    found = keep_largest(values, 4)
    assert ((found > 0).sum(-1) == 4).all()
    assert torch.equal(found[found > 0], values[found > 0])
    assert found[0, 0].min() == 0 and found[0, 0].max() == values[0, 0].max()
    model, x = zoo.model(NAME), zoo.images(NAME, 2)
    latents = latents_of(model, x)
    tokens = torch.randn(9, latents.decoder.shape[1])
    a = latents.encode(tokens)
    assert ((a > 0).sum(-1) <= 6).all() and (a >= 0).all()
    by_hand = sum(a[:, j, None] * latents.decoder[j] for j in range(len(latents))) + latents.mean
    assert torch.allclose(latents.decode(a), by_hand, atol=1e-5)
    assert latents.decoder.norm(dim=1).sub(1).abs().max() < 1e-5


def test_nonnegative_least_squares_against_scipy() -> None:
    decoder = F.normalize(torch.randn(6, 20), dim=1).double()
    x = torch.randn(8, 20).double()
    found = nonnegative(x, decoder, steps=3000)
    for row, own in zip(x, found):
        assert np.allclose(nnls(decoder.numpy().T, row.numpy())[0], own, atol=1e-6)


def planted(count: int = 24, width: int = 32, each: int = 3, tokens: int = 6000) -> tuple[Tensor, Tensor]:
    """Tokens that are each the sum of a few of some atoms, and the atoms."""
    chance = torch.Generator().manual_seed(3)
    atoms = F.normalize(torch.randn(count, width, generator=chance), dim=1)
    active = torch.rand(tokens, count, generator=chance).topk(each, 1).indices
    a = torch.zeros(tokens, count).scatter(1, active, 1 + torch.rand(tokens, each, generator=chance))
    return a @ atoms + 0.01 * torch.randn(tokens, width, generator=chance), atoms


@pytest.mark.slow
@pytest.mark.parametrize(("by", "count"), [("sae", 24), ("nmf", 6)])
def test_planted_atoms_are_recovered(by: str, count: int) -> None:
    tokens, atoms = planted(count, each=3 if by == "sae" else 2)
    size = Size(2 * count, 3) if by == "sae" else Size(count, 0)
    found, _ = fit(tokens, by, size, seed=0, steps=1000 if by == "sae" else 60)
    assert np.quantile(matched(atoms, found.decoder), 0.05) > 0.9
    assert matched(atoms, random_directions(tokens - tokens.mean(0), size.latents)).mean() < 0.75
    assert quality(found, [tokens]).explained[0] > 0.9


def test_semi_nmf_never_gets_worse() -> None:
    tokens, _ = planted(8, 16, 2, 400)
    found, losses = fit(tokens, "nmf", Size(8, 0), steps=25)
    assert all(after <= before * (1 + 1e-5) for before, after in pairwise(losses))
    assert losses[-1] < losses[0]
    assert (found.encode(tokens) >= 0).all()


def test_the_same_seed_gives_the_same_and_dead_latents_revive() -> None:
    tokens, _ = planted(12, 16, 2, 800)
    one, again, other = (fit(tokens, "sae", Size(16, 2), seed, 80)[0] for seed in (0, 0, 1))
    assert torch.equal(one.decoder, again.decoder) and torch.equal(one.bias, again.bias)  # type: ignore[arg-type]
    assert not torch.equal(one.decoder, other.decoder)
    assert one.decoder.norm(dim=1).sub(1).abs().max() < 1e-5
    assert quality(one, [tokens]).dead <= 4
    agreed = stability(one, [again, other], tokens)
    assert agreed is not None and agreed.best.min() > 0.999  # of the same dictionary
    assert stability(one, [], tokens) is None


def test_a_random_dictionary_is_not_stable() -> None:
    tokens, _ = planted(60, 64, 2, 800)
    one = fit(tokens, "sae", Size(16, 2), 0, 20)[0]
    other = Latents("", 0, "nmf", one.mean, random_directions(tokens - one.mean, 16, 5))
    agreed = stability(one, [other], tokens)
    assert agreed is not None and not agreed.stable.any() and agreed.control.mean() < 0.5


def test_sizes_by_the_amount_of_data() -> None:
    assert Size.of("sae", 37632, 192) == Size(256, 8)
    assert Size.of("nmf", 37632, 192) == Size(32, 0)
    assert Size.of("sae", 10**9, 192).latents == 8 * 192
    assert Size.of("sae", 1000, 192, 100, 7) == Size(100, 7)
    with pytest.raises(InputError, match="too few for 600 latents"):
        Size.of("sae", 1000, 192, 600)
    with pytest.raises(OptionError, match="more latents than there are"):
        Size.of("sae", 1000, 192, 10, 11)
    with pytest.raises(OptionError, match="must be one of sae, nmf"):
        Size.of("pca", 1000, 192)


# ----------------------------------------------------------------------------------------------------------- the target


@pytest.mark.parametrize("kind", ["sae", "nmf"])
def test_the_target_is_the_mean_activation_of_the_patches(kind: str) -> None:
    model, x = zoo.model(NAME), zoo.images(NAME)
    latents = latents_of(model, x, kind=kind)
    tokens = patch_features(Trace(model, x), [LAYER])[LAYER].flatten(1, 2)
    own = Trace(latent_model(model, latents), x)
    assert torch.allclose(own.output, latents.encode(tokens).mean(1), atol=1e-6)
    assert own.layout.layers == LAYER + 1
    assert own.layout.readout == tuple(sorted(model.layout.patch_tokens))
    alone = Trace(own.model, x[1:2]).output
    assert torch.allclose(alone, own.output[1:2], atol=1e-6)


def test_it_does_not_depend_on_later_layers() -> None:
    net = zoo.ZOO[NAME].make().eval()
    model, x = vitreous.Model(net, name="own"), zoo.images(NAME, 2)
    latents = latents_of(model, x)
    before = Trace(LatentModel(model, latents), x).output
    with torch.no_grad():
        for parameter in net.blocks[LAYER + 1].parameters():
            parameter.add_(1)
    assert torch.equal(Trace(LatentModel(model, latents), x).output, before)
    with torch.no_grad():
        for parameter in net.blocks[LAYER].parameters():
            parameter.add_(0.1)
    assert not torch.allclose(Trace(LatentModel(model, latents), x).output, before)


def by_hand(model: vitreous.Model, latents: Latents, x: Tensor, index: int) -> Tensor:
    """The target, plainly: blocks up to the layer, the encoder, the mean of the patches."""
    net: Any = model.module
    tokens = net._pos_embed(net.patch_embed(x))
    for block in net.blocks[: latents.layer + 1]:
        tokens = block(net.norm_pre(tokens) if block is net.blocks[0] else tokens)
    return latents.encode(tokens[:, model.layout.prefix :]).mean(1)[:, index]


def active(model: vitreous.Model, latents: Latents, x: Tensor) -> int:
    """A latent that all images have."""
    return int(Trace(latent_model(model, latents), x).output.amin(0).argmax())


def test_maps_against_autograd_and_occlusion_by_hand() -> None:
    model, x = zoo.model(NAME), zoo.images(NAME, 2)
    latents = latents_of(model, x)
    j = active(model, latents, x)
    leaf = x.clone().requires_grad_()
    y = by_hand(model, latents, leaf, j)
    (grad,) = torch.autograd.grad(y.sum(), leaf)
    side = model.layout.patch
    assert side is not None
    made = vitreous.explain(model, x, "input_x_gradient", target=latents[j])
    pixels = (grad * x).sum(1)
    if made.map.shape[1:] != pixels.shape[1:]:
        pixels = F.avg_pool2d(pixels[:, None], side)[:, 0] * side[0] * side[1]
    assert torch.allclose(made.map, pixels, atol=1e-5 * float(pixels.abs().max()) + 1e-8)
    assert made.targets == (f"latent:noise#{j}",) * 2 and made.model == "timm-vit+noise"
    assert "latent noise" in str(made.labels)
    hidden = vitreous.explain(model, x, "occlusion", target=latents[j])
    black = x.clone()
    rows, columns = model.layout.rectangle(0, 0)
    black[:, :, rows, columns] = x.mean((2, 3))[..., None, None]
    drop = by_hand(model, latents, x, j) - by_hand(model, latents, black, j)
    found = hidden.map.flatten(1)[:, 0]
    assert torch.allclose(found, drop.detach(), atol=1e-5)


def test_token_ablation_removes_patches_before_the_layer() -> None:
    model, x = zoo.model(NAME), zoo.images(NAME, 2)
    latents = latents_of(model, x)
    j = active(model, latents, x)
    found = vitreous.explain(model, x, "token_ablation", target=latents[j]).map
    own = Trace(latent_model(model, latents), x)
    target = vitreous.Neuron(j)
    patches = torch.tensor([[p for p in range(own.layout.patches) if p != 3]])
    without = scores_keeping(own, target, [1], kept(own, patches))
    assert torch.allclose(found[1].flatten()[3], own.output[1, j] - without[0], atol=1e-5)


@pytest.mark.parametrize("method", ["gae", "cdam", "attn_lrp", "gradcam", "attention"])
def test_maps_do_not_depend_on_the_batch(method: str) -> None:
    model, x = zoo.model(NAME), zoo.images(NAME)
    latents = latents_of(model, x)
    j = active(model, latents, x)
    whole = vitreous.explain(model, x, method, target=latents[j]).map
    alone = vitreous.explain(model, x[2:], method, target=latents[j]).map
    assert torch.allclose(whole[2:], alone, atol=1e-5 * float(whole.abs().max()))
    assert not torch.allclose(whole[0], whole[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["timm ViT no CLS", "timm DINOv2 registers", "timm Swin", "sequence first", "hand-written", "HF CLIP vision sdpa"],
)
def test_models_of_other_kinds(name: str) -> None:
    model, x = zoo.model(name), zoo.images(name, 2)
    layer = model.layout.layers - 2
    latents = latents_of(model, x, layer)
    tokens = patch_features(Trace(model, x), [layer])[layer].flatten(1, -2)
    own = Trace(latent_model(model, latents), x)
    assert torch.allclose(own.output, latents.encode(tokens).mean(1), atol=1e-5)
    j = active(model, latents, x)
    for method in ("gradient", "gae", "cdam", "occlusion"):
        assert vitreous.explain(model, x, method, target=latents[j]).map.isfinite().all()


def test_half_precision() -> None:
    net = zoo.ZOO[NAME].make().eval().to(torch.bfloat16)
    model, x = vitreous.Model(net, name="half"), zoo.images(NAME, 2)
    latents = latents_of(model, x).to(torch.zeros(0))
    own = Trace(latent_model(model, latents), x)
    assert own.output.dtype == torch.float32
    assert vitreous.explain(model, x, "gae", target=latents[active(model, latents, x)]).map.isfinite().all()


def test_metrics_and_leaderboards_take_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model, x = zoo.model(NAME), zoo.images(NAME, 2)
    latents = latents_of(model, x)
    latents.save()
    target = f"latent:noise#{active(model, latents, x)}"
    made = vitreous.explain(model, x, "gae", target=target)
    score = vitreous.evaluate(model, x, made, "deletion", of="logit")
    own = latent_model(model, latents)
    plain = vitreous.evaluate(
        own, x, made.map, "deletion", target=target.replace("latent:noise#", "neuron:"), of="logit"
    )
    assert torch.allclose(score.value, plain.value, atol=1e-5)
    trace = Trace(model, x)
    assert torch.allclose(
        vitreous.evaluate(model, trace, "gae", "deletion", target, of="logit").value, plain.value, atol=1e-5
    )


def test_several_targets_contrasts_and_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model, x = zoo.model(NAME), zoo.images(NAME, 2)
    latents = latents_of(model, x)
    latents.save()
    two, three, both = vitreous.explain_targets(
        model, x, "gradient", ["latent:noise#2", "latent:noise#3", "latent:noise#2-latent:noise#3"]
    )
    assert both.target == "latent:noise#2-latent:noise#3"
    first = vitreous.explain(model, x, "gradient", target=vitreous.Contrast(latents[2], latents[3]))
    assert torch.allclose(both.map, first.map)
    each = vitreous.explain(model, x, "gradient", target=["latent:noise#2", "latent:noise#3"])
    assert torch.allclose(each.map[0], two.map[0]) and torch.allclose(each.map[1], three.map[1])
    classes = vitreous.explain_targets(model, x, "gradient", ["top-1", "latent:noise#2"])
    assert torch.allclose(classes[1].map, two.map) and classes[0].target != classes[1].target


def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model, x = zoo.model(NAME), zoo.images(NAME, 2)
    latents = latents_of(model, x)
    file = latents.save()
    assert file == Path("vitreous-concepts/noise.latents.safetensors")
    again = Latents.load(file)
    assert again.digest == latents.digest and (again.layer, again.k, again.model) == (LAYER, 6, latents.model)
    assert Latents.find("Noise", model).digest == latents.digest
    assert Latents.find(str(file), model).digest == latents.digest
    with pytest.raises(TargetError, match="there are no latents"):
        Latents.find(str(file), model, files=False)
    with pytest.raises(TargetError, match="there are no latents"):
        Latents.find("nois", model)
    with pytest.raises(TargetError, match="found in another model"):
        Latents.find("noise", zoo.model("timm ViT no CLS"))
    vitreous.Concept(torch.zeros(4)).save("vitreous-concepts/other.latents.safetensors")
    with pytest.raises(TargetError, match="not a file of latents"):
        Latents.find("other", model)
    own = Latents.load(latents_of(model, x, kind="nmf").save("own.safetensors"))
    assert own.kind == "nmf" and own.encoder is None


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model, x = zoo.model(NAME), zoo.images(NAME, 1)
    latents = latents_of(model, x)
    latents.save()
    for text in ("latent:noise", "latent:noise#", "latent:#3", "latent:noise#-1"):
        with pytest.raises(TargetError, match="latent:NAME#NUMBER"):
            vitreous.explain(model, x, "gradient", target=text)
    with pytest.raises(TargetError, match="latents 0 to 23"):
        vitreous.explain(model, x, "gradient", target="latent:noise#24")
    with pytest.raises(TargetError, match="not from the output"):
        latents[3](torch.zeros(1, 24), torch.zeros(1, 24))
    other = latents_of(model, x, 0)
    with pytest.raises(TargetError, match="same latents"):
        vitreous.explain(model, x, "gradient", target=vitreous.Contrast(latents[2], other[3]))
    with pytest.raises(TargetError, match="another model"):
        vitreous.explain(zoo.model("timm ViT no CLS"), x, "gradient", target=latents[3])
    with pytest.raises(TargetError, match="kind sae"):
        Latents("a", 0, "sae", latents.mean, latents.decoder)
    with pytest.raises(TargetError, match=r"\[K, D\]"):
        Latents("a", 0, "nmf", latents.mean[1:], latents.decoder)
    with pytest.raises(OptionError, match="layer 9 is out of range"):
        vitreous.discover(model, Path(vitreous.__file__).parent / "assets" / "photos", 9)


@pytest.mark.slow
def test_models_without_patch_tokens_are_refused() -> None:
    import detectors

    model = zoo.model("timm CaiT")
    with pytest.raises(Unsupported, match="cannot be matched with patches"):
        latents_of(model, zoo.images("timm CaiT", 1), model.layout.layers - 1)
    detr = vitreous.Model(detectors.detr(), name="detr")
    with pytest.raises(Unsupported, match="decoder"):
        vitreous.discover(detr, [], 0)


# ------------------------------------------------------------------------------------------------------------- effects


def test_ablations_by_hand() -> None:
    model, x = zoo.model(NAME), zoo.images(NAME, 2)
    latents = latents_of(model, x)
    trace, net = Trace(model, x), zoo.network(NAME)
    by = measured_by(trace, [1, 0])
    j = active(model, latents, x)
    found = ablate(trace, latents, j, by, seed=0)
    tokens = net._pos_embed(net.patch_embed(x))
    for block in net.blocks[: LAYER + 1]:
        tokens = block(tokens)
    changed = tokens.clone()
    patches = tokens[:, model.layout.prefix :]
    changed[:, model.layout.prefix :] = patches - latents.encode(patches)[..., j, None] * latents.decoder[j]

    def on(tokens: Tensor) -> Tensor:
        for block in net.blocks[LAYER + 1 :]:
            tokens = block(tokens)
        return net.forward_head(net.norm(tokens))

    with torch.no_grad():
        before, after = on(tokens), on(changed)
    rows, classes = torch.arange(2), torch.tensor([1, 0])
    assert torch.allclose(found[0], (before - after)[rows, classes], atol=1e-5)
    shares = (before.softmax(1) - after.softmax(1))[rows, classes]
    assert torch.allclose(found[1], shares, atol=1e-5)
    assert not torch.allclose(found[0], found[2], atol=1e-6)  # the control is another direction


def test_the_prediction_is_the_derivative() -> None:
    model, x = zoo.model(NAME), zoo.images(NAME, 2)
    latents = latents_of(model, x)
    trace = Trace(model, x)
    by = measured_by(trace, [1, 0])
    patches = patch_features(trace, [LAYER])[LAYER].flatten(1, 2)
    predicted = first_order(trace, latents, patches, by)
    j, small = active(model, latents, x), 1e-2
    from vitreous.evaluation.discover.tokens import run_changed

    a = latents.encode(patches)[..., j, None]
    run = run_changed(trace, LAYER, lambda tokens: tokens - small * a * latents.decoder[j])
    true = (trace.score(by[0]) - trace.score(by[0], run)) / small
    assert torch.allclose(predicted[:, j], true.detach(), rtol=0.05, atol=2e-3)
    assert (predicted[(latents.encode(patches) > 0).sum(1) == 0] == 0).all()


def test_removed_patches_are_those_that_have_the_latent() -> None:
    model, x = zoo.model(NAME), zoo.images(NAME, 2)
    trace = Trace(model, x)
    by = measured_by(trace, [1, 0])
    a = torch.zeros(2, model.layout.patches)
    a[0, [2, 5]] = torch.tensor([1.0, 2.0])
    found = remove(trace, by, a, [0, 1], seed=0)
    keep = torch.tensor([[p for p in range(model.layout.patches) if p not in (2, 5)]])
    lost = trace.score(by[0])[0] - scores_keeping(trace, by[0].of_rows([0]), [0], kept(trace, keep))[0]
    assert torch.allclose(found[0, 0], lost.double(), atol=1e-5)
    assert found[4, 0] == 2 and found[:, 1].isnan().all()  # the second image has nothing of it
    assert str(Spread.of(np.array([np.nan]))) == "—"


# ------------------------------------------------------------------------------------------------------ the whole thing


def test_discover(album: Path, tmp_path: Path) -> None:
    found = found_in(album)
    assert len(found.latents) == 16 and found.latents.layer == LAYER and found.latents.name == "album"
    assert list(found.failed) == ["1/broken.png"]
    assert len(found.seen["number"]) == 22
    assert found.quality.active.max() <= 4 and found.explained.low <= found.explained.mean <= found.explained.high
    assert {one.number for one in found.effects} == {0, 1}
    by_class = [one.logit.mean for one in found.effects if one.number == 0]
    assert by_class == sorted(by_class, reverse=True)
    assert sum(one.removed is not None for one in found.effects) == 2  # the first of each class
    assert found.effects[0].images == 3
    j = found.order[0]
    number, patch, value = found.top[j][0]
    map = found.maps({number: [j]})[number, j]
    assert map.shape == found.grid and np.isclose(map.max(), value) and map.argmax() == patch
    again = found_in(album)
    assert again.latents.digest == found.latents.digest
    assert [one.logit for one in again.effects] == [one.logit for one in found.effects]


@pytest.mark.slow
def test_report_and_command(album: Path, run: Run) -> None:
    args = ["concept", "discover", album, "--layer", "1", "--name", "noise", "--latents", "16", "--k", "4"]
    args += ["--seeds", "2", "--steps", "20", "--candidates", "2", "--per-class", "2", "--limit", "22"]
    said = run(*args)
    assert said.code == 0, said.err
    assert "latent:noise#" in said.out and "explained variance" in said.out
    folder = Path("vitreous-out/noise")
    names = {file.name for file in folder.iterdir()}
    assert {"latents.parquet", "effects.parquet", "findings.json", "report.html", "sheet-1.png"} <= names
    assert ".shards" not in names
    told = json.loads((folder / "findings.json").read_text())
    assert told["latents"] == 16 and told["explained_variance"]["low"] <= told["explained_variance"]["high"]
    page = (folder / "report.html").read_text()
    assert "random direction" in page and "latent:noise#" in page
    assert run(*args).code == 0  # the same again replaces nothing else
    other = run(*args[:-2], "--limit", "20")
    assert "holds other latents of this name" in other.error
    assert run(*args[:-2], "--limit", "20", "--overwrite").code == 0
    image = next(album.glob("0/*.png"))
    shown = run("explain", image, "--method", "gradient,occlusion", "--target", "latent:noise#1,latent:noise#2")
    assert shown.code == 0 or "zero everywhere" in shown.err
    assert "plain name" in run("concept", "discover", album, "--layer", "1", "--name", "a/b").error
    assert "must be one of" in run("concept", "discover", album, "--layer", "1", "--by", "pca").error
    assert "no latents 'none'" in run("explain", image, "--method", "gradient", "--target", "latent:none#1").error
    listed = run("concept", "list")
    assert listed.code == 0 and "16 latents" in listed.out


@pytest.mark.parametrize(
    "what", [pytest.param(name, marks=pytest.mark.slow) for name in ("tokens", "seed1", "images")] + ["classes"]
)
def test_an_interrupted_run_goes_on(album: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    whole = found_in(album)
    write, out = Shards.write, tmp_path / "out"
    stored: list[str] = []

    def stop(self: Shards, name: str, *args: Any) -> None:
        write(self, name, *args)
        stored.append(name)
        if name == what:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Shards, "write", stop)
        with pytest.raises(KeyboardInterrupt):
            found_in(album, out=out)
    assert any((out / ".shards").iterdir())
    begun = len(stored)
    with monkeypatch.context() as patch:
        patch.setattr(Shards, "write", lambda *args: (stored.append(args[1]), write(*args))[1])
        again = found_in(album, out=out)
    assert "tokens" not in stored[begun:] or what == "tokens"
    assert again.latents.digest == whole.latents.digest
    assert [one.logit for one in again.effects] == [one.logit for one in whole.effects]
    assert again.failed == whole.failed
    other = found_in(album, out=out, seed=5)  # another plan takes nothing of it
    assert other.latents.digest != whole.latents.digest


def test_backbones_are_not_ranked(album: Path) -> None:
    net = zoo.ZOO[NAME].make().eval()
    net.reset_classifier(0)
    found = vitreous.discover(vitreous.Model(net, name="backbone"), album, LAYER, **{**QUICK, "seeds": 1})
    assert found.effects == [] and found.stability is None
    assert any("no classes" in note for note in found.notes)
    with pytest.raises(OptionError, match="seeds=0"):
        found_in(album, seeds=0)
    with pytest.raises(InputError, match="no image can be read"):
        found_in(album / "1" / "broken.png")


def test_the_last_layer_of_a_cls_model_has_no_effect(album: Path) -> None:
    found = vitreous.discover(zoo.model(NAME), album, -1, **{**QUICK, "seeds": 1})
    assert all(one.logit.mean == 0 for one in found.effects)
    assert any("take an earlier layer" in note for note in found.notes)


def test_names_are_words_that_fit_a_latent_better_than_others(monkeypatch: pytest.MonkeyPatch) -> None:
    from vitreous.evaluation.discover import names

    texts = {"a photo of red": [1.0, 0.0], "a photo of blue": [0.0, 1.0]}
    monkeypatch.setattr(names, "embed_text", lambda model, text: torch.tensor(texts[text]))
    shades = {"one": [[0.9, 0.8]], "two": [[0.5, 0.8]]}
    monkeypatch.setattr(names, "embeddings", lambda model, crops: iter([torch.tensor(shades[c]) for c in crops]))
    found = name_latents(zoo.model(NAME), ["red", "blue"], [["one"], ["two"], []])  # type: ignore[list-item]
    assert [one and one[0] for one in found] == ["red", "blue", None]


def test_only_models_with_a_text_tower_name_latents(album: Path, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r"cannot be named.*no text tower"):
        found_in(album, words=["red", "blue"])
    with pytest.raises(InputError, match="too few to choose"):
        read_words(["red"])
    (tmp_path / "words.txt").write_text("red\n\nblue\nred\n")
    assert read_words(tmp_path / "words.txt") == ["red", "blue"]
    with pytest.raises(InputError, match="cannot be read as a list of words"):
        read_words(tmp_path)


def test_the_page_takes_latents_by_name_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from unittest.mock import Mock

    from vitreous.web.engine import Engine, Served
    from vitreous.web.targets import read

    monkeypatch.chdir(tmp_path)
    model, x = zoo.model(NAME), zoo.images(NAME, 1)
    latents = latents_of(model, x)
    file = latents.save()
    engine, served = Mock(spec=Engine, concepts={}, latents=[latents]), Mock(spec=Served, model=model)
    served.name = model.name
    assert str(read(engine, served, "latent:noise#3", 10)) == "latent:noise#3"
    with pytest.raises(TargetError, match="there are no latents"):
        read(engine, served, f"latent:{file}#3", 10)
    pair = read(engine, served, "latent:noise#3-latent:noise#4", 10)
    assert str(pair) == "latent:noise#3-latent:noise#4"
