"""Detectors: targets by query and box, the read-out of a query, and attention through a decoder."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import detectors
import numpy as np
import pytest
import torch
from detectors import CLASSES, LARGE, NAMES, QUERIES, WIDE, with_attentions
from PIL import Image
from torch import Tensor
from typer.testing import CliRunner

import vitreous
from vitreous import Detection, Model, Trace
from vitreous.cli.main import app
from vitreous.errors import ModelWarning, OptionError, TargetError, Unsupported
from vitreous.images.preprocess import Preprocess
from vitreous.models.output import Form, Meaning
from vitreous.trace.apply import read_target

QUERY, CLS = 3, 2
TARGET = f"{CLS}@query:{QUERY}"


def images(size: tuple[int, int], count: int = 2, seed: int = 5) -> Tensor:
    return torch.randn(count, 3, *size, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def detr() -> Any:
    return detectors.detr()


@pytest.fixture(scope="module")
def seer(detr: Any) -> Model:
    return Model(detr)


@pytest.fixture(scope="module")
def yolos() -> Any:
    return detectors.yolos()


@pytest.fixture(scope="module")
def looker(yolos: Any) -> Model:
    return Model(yolos)


def explained(model: Any, x: Any, method: str, target: Any = TARGET, **options: Any) -> Tensor:
    return vitreous.explain(model, x, method, target, **options).map


def close(one: Tensor, other: Tensor, tolerance: float = 1e-5) -> bool:
    return bool((one - other).abs().max() <= tolerance * other.abs().max())


# ------------------------------------------------------------------------------------------------------------ targets


def test_an_output_of_scores_and_boxes_is_one_of_detections(seer: Model) -> None:
    model = seer
    output = model.run(images(LARGE))
    assert output.shape == (2, QUERIES, CLASSES + 1 + 4) and model.form is Form.DETECTIONS
    assert model.outputs == CLASSES and model.meaning is Meaning.LOGITS and model.label(0) == "cat"


@pytest.mark.parametrize(
    ("given", "strings"),
    [
        (TARGET, [TARGET] * 2),
        ("cup@query:3", [TARGET] * 2),
        (Detection("cup", query=3), [TARGET] * 2),
        (["cup@query:3", "dog@query:1"], [TARGET, "1@query:1"]),
        ("cup@query:3;dog@query:1", [TARGET, "1@query:1"]),
        ("cup-dog@query:3", [f"{TARGET}-1@query:3"] * 2),
    ],
)
def test_targets_are_parsed_and_parse_back(seer: Model, given: Any, strings: list[str]) -> None:
    model, x = seer, images(LARGE)
    found = vitreous.explain(model, x, "centre", given), vitreous.explain(model, x, "gradient", given)
    assert list(found[1].targets) == strings
    trace = Trace(model, x)
    again = read_target(trace, list(found[1].targets)).fix(trace.output)
    assert [str(again.of_image(i)) for i in range(2)] == strings
    assert close(explained(model, x, "gradient", list(found[1].targets)), found[1].map, 0)


def test_top_is_the_best_detection_without_no_object(detr: Any, seer: Model) -> None:
    model, x = seer, images(LARGE)
    with torch.no_grad():
        shares = detr(pixel_values=x).logits.softmax(-1)[..., :-1]  # [B Q C]
    best = shares.max(-1)
    for rank in (1, 2):
        queries = best.values.topk(rank, -1).indices[:, -1]
        wanted = [f"{best.indices[i, q]}@query:{q}" for i, q in enumerate(queries.tolist())]
        assert list(vitreous.explain(model, x, "gradient", f"top-{rank}").targets) == wanted
    found = vitreous.explain(model, x, "gradient")
    assert found.targets == vitreous.explain(model, x, "gradient", "top-1").targets
    assert np.allclose(found.probabilities, best.values.amax(1), atol=1e-6)
    alone = vitreous.explain(model, x, "gradient", "cup")
    assert list(alone.targets) == [f"2@query:{q}" for q in shares[..., 2].argmax(1).tolist()]
    trace = Trace(model, x)
    title = read_target(trace, "cup@query:3").title(model, trace.output, 1)
    assert title == f"cup {float(shares[1, 3, 2]):.0%} (query 3)"


class Given(torch.nn.Module):
    """A detector whose scores and boxes are given."""

    def __init__(self, scores: Tensor, boxes: Tensor) -> None:
        super().__init__()
        self.scores, self.boxes = torch.nn.Parameter(scores), torch.nn.Parameter(boxes)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        bright = 1 + 0.01 * x.mean((1, 2, 3))[:, None, None]
        return {"logits": self.scores * bright, "pred_boxes": self.boxes + 0 * bright}


BOXES = torch.tensor([[0.25, 0.5, 0.5, 1.0], [0.75, 0.5, 0.5, 1.0], [0.75, 0.5, 0.5, 1.0], [0.5, 0.5, 0.1, 0.1]])
SCORES = torch.tensor([[9.0, 0.0], [1.0, 2.0], [3.0, 0.0], [9.0, 9.0]])


def test_a_box_is_that_of_the_query_it_overlaps_most_and_ties_go_by_score() -> None:
    model = Model(Given(SCORES, BOXES), labels=["cat", "dog"])
    x = images((20, 40))
    assert model.run(x).shape == (2, 4, 6) and model.meaning is Meaning.SIGMOID
    for cls, query in (("cat", 2), ("dog", 1)):  # queries 1 and 2 have the same box
        assert vitreous.explain(model, x, "gradient", f"{cls}@box:21,0,40,20").targets[0].endswith(f"query:{query}")
    assert vitreous.explain(model, x, "gradient", "top-1@box:0,0,19,20").targets[0] == "0@query:0"
    assert vitreous.explain(model, x, "gradient", Detection(0, box=(18, 9, 22, 11))).targets[0] == "0@query:3"


def test_a_box_is_in_pixels_of_the_image_that_was_given() -> None:
    def crop(image: Image.Image) -> Tensor:  # the middle half of the width, at 20 × 40
        wide, high = image.size
        part = image.crop((wide // 4, 0, wide - wide // 4, high)).resize((40, 20))
        return torch.from_numpy(np.asarray(part, np.float32) / 255).permute(2, 0, 1)

    model = Model(Given(SCORES, BOXES), Preprocess(crop, (0.0,) * 3, (1.0,) * 3), labels=["cat", "dog"])
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 255, (100, 400, 3), np.uint8))
    assert vitreous.explain(model, photo, "gradient", "cat@box:100,0,200,100").targets[0] == "0@query:0"
    assert vitreous.explain(model, photo, "gradient", "cat@box:200,0,300,100").targets[0] == "0@query:2"


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("cup@query:9", "query 9 is out of range: DetrForObjectDetection has queries 0 to 6"),
        ("cup@query:x", "is not the number of a query"),
        ("cup@box:1,2,3", "a box is four numbers"),
        ("cup@box:9,9,3,3", "is not (left, top, right, bottom)"),
        ("cup@box:900,900,901,901", "no box of DetrForObjectDetection overlaps it"),
        ("cup@10,20", "give CLASS@query:17, CLASS@box:x0,y0,x1,y1"),
        ("neuron:3", "has one vector and one box per query"),
        ("9", "class 9 is out of range: the model has class 0 to 3"),
        ("top-8", "is out of range: DetrForObjectDetection has 7 queries"),
        ("top-5@query:1", "is out of range: DetrForObjectDetection has 4 classes"),
    ],
)
def test_what_is_no_detection_is_refused(seer: Model, target: str, said: str) -> None:
    with pytest.raises(TargetError) as error:
        vitreous.explain(seer, images(LARGE, 1), "gradient", target)
    assert said in str(error.value)


def test_a_detection_is_at_one_query_of_a_detector() -> None:
    for wrong in ({}, {"query": 1, "box": (0, 0, 1, 1)}, {"box": (0, 0, 1)}):
        with pytest.raises(TargetError):
            Detection(0, **wrong)  # type: ignore[arg-type]
    plain = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 16, 3))
    with pytest.raises(TargetError, match="queries and their boxes are those of detectors"):
        vitreous.explain(Model(plain, classifier=True), images((4, 4)), "gradient", Detection(0, query=1))


def test_scores_mean_what_the_network_says_or_its_user() -> None:
    own = detectors.own()
    model = Model(own)
    with pytest.warns(ModelWarning, match="the last is taken for “no object”"):
        model.run(images(WIDE))
    assert model.outputs == CLASSES and model.meaning is Meaning.LOGITS
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        named = Model(own, labels=list(NAMES.values()))
        named.run(images(WIDE))
        single = Model(own, output="sigmoid")
        single.run(images(WIDE))
        last = Model(own, labels=[*NAMES.values(), "no object"])
        last.run(images(WIDE))
    assert named.outputs == last.outputs == CLASSES and single.outputs == CLASSES + 1
    assert single.meaning is Meaning.SIGMOID and named.meaning is last.meaning is Meaning.LOGITS


# --------------------------------------------------------------------------------------------- the query of a plain ViT


def test_yolos_attention_is_that_of_the_querys_own_token(yolos: Any, looker: Model) -> None:
    x = images(WIDE)
    theirs = with_attentions(yolos, x).attentions  # [B H N N] each
    tokens = [1 + 24 + QUERY, slice(1, 25)]
    for layer, a in enumerate(theirs):
        found = explained(looker, x, "attention", layer=layer)
        assert close(found.flatten(1), a[:, :, tokens[0], tokens[1]].mean(1))
    other = explained(looker, x, "attention", "2@query:4")
    assert not close(other.flatten(1), theirs[-1][:, :, tokens[0], tokens[1]].mean(1), 1e-2)


def test_yolos_relevance_is_that_of_the_querys_own_token(yolos: Any, looker: Model) -> None:
    x = images(WIDE)
    theirs = with_attentions(yolos, x)
    grads = torch.autograd.grad(theirs.logits[:, QUERY, CLS].sum(), theirs.attentions)
    for i in range(2):
        gae, rolled = torch.eye(32), torch.eye(32)
        for a, g in zip(theirs.attentions, grads):
            gae = gae + (a[i] * g[i]).clamp_min(0).mean(0) @ gae
            rolled = (0.5 * torch.eye(32) + 0.5 * a[i].mean(0)) @ rolled
        row = 1 + 24 + QUERY
        for name, matrix in (("gae", gae), ("rollout", rolled)):
            wanted = matrix[row, 1:25].reshape(4, 6)
            assert close(explained(looker, x, name)[i], wanted), name
    assert vitreous.explain(looker, x, "rollout", ["2@query:3", "2@query:1"]).targets == (TARGET, "2@query:1")


# ------------------------------------------------------------------------------------------------- through a decoder


def test_the_decoder_is_found_by_what_depends_on_what(detr: Any) -> None:
    for net in (detr, detectors.own()):
        layout = Model(net, labels=list(NAMES.values())).layout_at(LARGE if net is detr else WIDE)
        assert layout.obstacle is None and layout.grid == (4, 6) and layout.numbers == (0, 1)
        assert layout.decoder is not None
        assert (layout.decoder.own, layout.decoder.cross) == ((2, 4), (3, 5))
        assert layout.decoder.readers == tuple((query,) for query in range(QUERIES))


def test_detr_attention_is_its_own_cross_attention(detr: Any, seer: Model) -> None:
    x = images(LARGE)
    theirs = with_attentions(detr, x).cross_attentions
    for layer in (0, 1, -1):
        found = explained(seer, x, "attention", layer=layer)
        assert close(found.flatten(1), theirs[layer][:, :, QUERY].mean(1))
    head = explained(seer, x, "attention", heads=1)
    assert close(head.flatten(1), theirs[-1][:, 1, QUERY])
    mean = explained(seer, x, "attention", across="mean")
    assert close(mean.flatten(1), torch.stack(theirs)[:, :, :, QUERY].mean((0, 2)))
    with pytest.raises(OptionError, match="the decoder of DetrForObjectDetection has layers 0 to 1"):
        explained(seer, x, "attention", layer=2)


def test_detr_layers_are_its_own_attentions(detr: Any, seer: Model) -> None:
    x = images(LARGE)
    theirs, trace = with_attentions(detr, x), Trace(seer, x)
    run = trace.whole()
    pairs = [*zip(run.layers, theirs.encoder_attentions)]
    pairs += [*zip(run.decoded[0::2], theirs.decoder_attentions), *zip(run.decoded[1::2], theirs.cross_attentions)]
    assert len(pairs) == 6 and all(close(mine.weights, other) for mine, other in pairs)


def two_modalities(net: Any, x: Tensor, *, normalised: bool = True, transposed: bool = True) -> Tensor:
    """Chefer et al. 2021, equations 5 to 10, written out with full matrices; 0/0 = 0."""
    out = with_attentions(net, x)
    calls = [*out.encoder_attentions, *out.decoder_attentions, *out.cross_attentions]
    grads = torch.autograd.grad(out.logits[:, QUERY, CLS].sum(), calls)
    maps = []
    for i in range(len(x)):
        cams = [(a[i] * g[i]).clamp_min(0).mean(0).detach() for a, g in zip(calls, grads)]
        tokens, queries = torch.eye(cams[0].shape[0]).to(x), torch.eye(QUERIES).to(x)
        reads = torch.zeros(QUERIES, len(tokens)).to(x)

        def bar(r: Tensor) -> Tensor:
            own = r - torch.eye(len(r)).to(r)
            return torch.eye(len(r)).to(r) + (own / own.sum(-1, keepdim=True)).nan_to_num(0) if normalised else r

        for cam in cams[:2]:
            tokens = tokens + cam @ tokens
        for between, across in zip(cams[2:4], cams[4:6]):
            queries, reads = queries + between @ queries, reads + between @ reads
            asked = bar(queries).T if transposed else bar(queries)
            reads = reads + asked @ across @ bar(tokens)
        maps.append(reads[QUERY].reshape(4, 6))
    return torch.stack(maps)


def test_detr_gae_is_the_authors_rule_for_two_modalities() -> None:
    net, x = detectors.detr().double(), images(LARGE).double()
    found = explained(Model(net), x, "gae").double()  # maps are float32
    assert close(found, two_modalities(net, x), 1e-6)
    assert not close(found, two_modalities(net, x, normalised=False), 0.05)
    assert not close(found, two_modalities(net, x, transposed=False), 1e-3)
    with pytest.raises(Unsupported, match="plain gradients only"):
        explained(Model(net), x, "gae", rules="libra")


@pytest.mark.parametrize("method", ["rollout", "grad_rollout"])
def test_detr_rollout_passes_through_the_decoder(detr: Any, seer: Model, method: str) -> None:
    x = images(LARGE)
    out = with_attentions(detr, x)
    calls = [*out.encoder_attentions, *out.decoder_attentions, *out.cross_attentions]
    grads = torch.autograd.grad(out.logits[:, QUERY, CLS].sum(), calls)
    every, count = QUERIES + 24, 24
    for i in range(2):
        products = [a[i] * g[i] for a, g in zip(calls, grads)]
        steps = [a[i].mean(0) if method == "rollout" else p.mean(0).clamp_min(0) for a, p in zip(calls, products)]
        whole = torch.eye(every)  # of tokens and queries together
        for number, rows, columns in (
            *((n, slice(0, count), slice(0, count)) for n in (0, 1)),
            (2, slice(count, every), slice(count, every)),
            (4, slice(count, every), slice(0, count)),
            (3, slice(count, every), slice(count, every)),
            (5, slice(count, every), slice(0, count)),
        ):
            a = torch.zeros(every, every)
            a[rows, columns] = steps[number].detach()
            moves = torch.zeros(every, 1)
            moves[rows] = 1
            a = torch.where(moves > 0, 0.5 * torch.eye(every) + 0.5 * a, torch.eye(every))
            whole = (a / a.sum(-1, keepdim=True)) @ whole
        assert close(explained(seer, x, method)[i], whole[count + QUERY, :count].reshape(4, 6), 1e-4)


def test_a_decoders_maps_lie_where_its_tokens_come_from(seer: Model) -> None:
    """A change of one patch changes the token of its cell most, or that of a neighbour, as a token sees both."""
    model, x = seer, images(LARGE, 1)
    layout = model.layout_at(LARGE)
    for row, column in ((0, 5), (3, 1)):
        changed = x.clone()
        changed[:, :, *layout.rectangle(row, column)] += 3
        one, other = (Trace(model, each).whole().layers[0].v for each in (x, changed))
        moved = int(layout.to_map((one - other).norm(dim=(1, 3)))[0].argmax())
        assert abs(moved // 6 - row) <= 1 and abs(moved % 6 - column) <= 1


def test_only_tokens_that_come_from_patches_are_drawn(detr: Any, seer: Model) -> None:
    """Of one query's scores as the output, which is one vector per image."""
    model = Model(detr, forward=lambda z: detr(pixel_values=z).logits[:, QUERY], classifier=True)
    x = images(LARGE)
    for method in ("gradcam", "cdam", "attention", "gae", "rollout"):
        found = explained(model, x, method, CLS)
        assert found.shape == (2, 4, 6) and bool(found.flatten(1).any(1).all())
        assert close(found, explained(seer, x, method))
    with pytest.raises(Unsupported, match="no visible tokens before its attention"):
        explained(model, x, "gradcam", CLS, layer=0)  # positions are added to its queries and keys only


def test_methods_of_one_stack_of_layers_are_refused(seer: Model) -> None:
    with pytest.raises(Unsupported, match="legrad follows one stack of layers; the queries of DetrForObject"):
        explained(seer, images(LARGE), "legrad")


# --------------------------------------------------------------------------------------- gradients and perturbations


def test_gradients_are_autograds_and_occlusion_is_brute_force_at_the_fixed_query(detr: Any, seer: Model) -> None:
    model, x = seer, images(LARGE, 1)
    leaf = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(detr(pixel_values=leaf).logits[:, QUERY, CLS].sum(), leaf)
    assert close(explained(model, x, "gradient"), grad.abs().mean(1))
    found, layout = vitreous.explain(model, x, "occlusion", "top-1"), model.layout_at(LARGE)
    cls, _, query = found.targets[0].partition("@query:")  # type: ignore[union-attr]
    mean = x.mean((-2, -1), keepdim=True)
    with torch.no_grad():
        for row, column in ((0, 0), (2, 4)):
            hidden, (down, across) = x.clone(), layout.rectangle(row, column)
            hidden[:, :, down, across] = mean.expand_as(hidden)[:, :, down, across]
            shares = [detr(pixel_values=z).logits[0, int(query)].softmax(-1)[int(cls)] for z in (x, hidden)]
            logits = [detr(pixel_values=z).logits[0, int(query), int(cls)] for z in (x, hidden)]
            wanted = [float(one - other) for one, other in (shares, logits)]
            assert min(abs(float(found.map[0, row, column]) - one) for one in wanted) <= 1e-5


def test_figures_draw_the_box(yolos: Any, looker: Model, tmp_path: Path) -> None:
    found = vitreous.explain(looker, images(WIDE, 1), "gradient", TARGET)
    (top, left, bottom, right), drawn = found.boxes[0], np.asarray(found.overlay()).astype(int)  # type: ignore[misc]
    with torch.no_grad():
        box = yolos(pixel_values=images(WIDE, 1)).pred_boxes[0, QUERY]
    assert np.allclose([(left + right) / 2, (top + bottom) / 2, right - left, bottom - top], box, atol=1e-6)
    plain = np.asarray(replace(found, boxes=()).overlay()).astype(int)
    rows, columns = np.nonzero(np.abs(drawn - plain).sum(-1))
    high, wide = plain.shape[:2]
    for found_at, ends, side in ((rows, (top, bottom), high), (columns, (left, right), wide)):
        wanted = [min(max(end, 0.0), 1.0) * side for end in ends]  # a box may reach beyond the image
        assert np.allclose([found_at.min(), found_at.max()], wanted, atol=2)
    assert found[0].boxes == found.boxes
    found.save(tmp_path / "map.npz")
    assert vitreous.Attribution.load(tmp_path / "map.npz").boxes == found.boxes
    found.save(tmp_path / "map.png")


# ------------------------------------------------------------------------------------------------------ other detectors


@pytest.mark.slow
@pytest.mark.parametrize("make", [detectors.conditional_detr, detectors.table_transformer])
def test_other_encoder_decoders_are_followed(make: Callable[[], Any]) -> None:
    net, x = make(), images(LARGE)
    theirs = with_attentions(net, x).cross_attentions
    assert close(explained(Model(net), x, "attention").flatten(1), theirs[-1][:, :, QUERY].mean(1))
    assert Model(net).layout_at(LARGE).decoder is not None
    for method in ("gae", "rollout", "gradcam", "occlusion"):
        assert explained(Model(net), x, method).shape == (2, 4, 6)


@pytest.mark.slow
def test_an_own_detector_of_multi_head_attention_is_followed() -> None:
    net, x = detectors.own(), images(WIDE)
    model = Model(net, labels=list(NAMES.values()))
    layer = net.decoder.layers[-1].multihead_attn
    seen: list[Tensor] = []

    def asked(module: Any, args: Any, kwargs: Any) -> None:
        with torch.no_grad():
            seen.append(torch.nn.functional.multi_head_attention_forward(*own_arguments(module, args))[1])  # type: ignore[arg-type]

    handle = layer.register_forward_pre_hook(asked, with_kwargs=True)
    with torch.no_grad():
        net.train()(x)  # the fast path of evaluation calls no module
    handle.remove()
    net.eval()
    assert close(explained(model, x, "attention").flatten(1), seen[0][:, QUERY], 1e-4)


def own_arguments(module: Any, args: tuple[Tensor, ...]) -> tuple[Any, ...]:
    q, k, v = args[:3]
    rest = module.in_proj_weight, module.in_proj_bias, None, None, False, 0.0
    return q, k, v, module.embed_dim, module.num_heads, *rest, module.out_proj.weight, module.out_proj.bias, False


@pytest.mark.slow
def test_deformable_attention_is_refused_with_the_reason() -> None:
    net, x = detectors.rt_detr(), images(LARGE)
    model = Model(net)
    for method in ("attention", "gae", "rollout", "gradcam"):
        with pytest.raises(Unsupported, match="deformable attention"):
            explained(model, x, method)
    assert model.meaning is Meaning.SIGMOID and model.outputs == CLASSES
    leaf = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(net(pixel_values=leaf).logits[:, QUERY, CLS].sum(), leaf)
    assert close(explained(model, x, "gradient"), grad.abs().mean(1), 1e-4)
    for method in ("occlusion", "rise"):
        assert bool(explained(model, x, method).any())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["OwlViT", "Owlv2"])
def test_owl_queries_are_patches(kind: str) -> None:
    net, forward = detectors.owl_vit(kind)
    model, x = Model(net, forward=forward, labels=["a cat", "a dog"]), images((64, 64))
    layout = model.layout_at((64, 64))
    assert layout.readers == tuple((0, query + 1) for query in range(16)) and model.meaning is Meaning.SIGMOID
    theirs = with_attentions(net.owlvit.vision_model if kind == "OwlViT" else net.owlv2.vision_model, x).attentions
    found = explained(model, x, "attention", "a dog@query:5")
    assert close(found.flatten(1), theirs[-1][:, :, [0, 6], 1:].mean((1, 2)))
    for method in ("gae", "rollout", "gradcam", "gradient", "occlusion"):
        assert bool(explained(model, x, method, "a dog").any())


FOLLOWED = ("attention", "rollout", "gae", "grad_rollout")
STACK, OUTSIDE = "follows one stack of layers", "does not pass its tokens from block to block"
REFUSED: dict[str, dict[str, str]] = {  # by the kind of detector
    "detr": {name: STACK for name, one in vitreous.METHODS.items() if one.attention and name not in FOLLOWED},
    "yolos": dict.fromkeys(("beyond_intuition", "legrad", "tis", "clip_surgery", "maskclip"), OUTSIDE),
    "plain yolos": {},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(vitreous.METHODS))
@pytest.mark.parametrize("kind", ["detr", "yolos", "plain yolos"])
def test_every_method_gives_a_map_or_a_reason_and_keeps_images_apart(name: str, kind: str) -> None:
    make = {"detr": detectors.detr, "yolos": detectors.yolos}
    net = make[kind]() if kind in make else detectors.yolos(use_mid_position_embeddings=False)
    x, model = images(LARGE if kind == "detr" else WIDE), Model(net)
    options = vitreous.METHODS[name].cheap
    if name in REFUSED[kind]:
        with pytest.raises(Unsupported, match=REFUSED[kind][name]):
            explained(model, x, name, **options)
        return
    both = explained(model, x, name, ["2@query:3", "1@query:5"], **options)
    for i, target in enumerate(("2@query:3", "1@query:5")):
        alone = explained(model, x[i : i + 1], name, target, **options)
        assert close(both[i : i + 1], alone, 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("metric", ["deletion", "insertion"])
def test_metrics_follow_the_fixed_query(seer: Model, metric: str) -> None:
    model, x = seer, images(LARGE, 1)
    found = vitreous.explain(model, x, "gae", "cup")
    one, other = (vitreous.evaluate(model, x, "gae", metric, target) for target in ("cup", found.targets[0]))
    assert torch.equal(one.value, other.value)


@pytest.mark.slow
def test_the_command_explains_a_box(detr: Any, tmp_path: Path) -> None:
    import transformers

    detr.save_pretrained(tmp_path / "detr")
    size = {"shortest_edge": 128, "longest_edge": 256}
    transformers.DetrImageProcessor(size=size).save_pretrained(tmp_path / "detr")
    random = np.random.default_rng(0)
    for name, shape in (("wide", (128, 192, 3)), ("high", (192, 128, 3))):
        Image.fromarray(random.integers(0, 255, shape, np.uint8)).save(tmp_path / f"{name}.png")
    asked = [str(tmp_path / "wide.png"), str(tmp_path / "high.png"), "--model", f"hf/{tmp_path / 'detr'}"]
    asked += ["--method", "attention,gae", "--target", "cat@box:10,20,100,120", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, ["explain", *asked, "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)["images"]
    assert len(told) == 2 and {"query", "box", "label"} <= set(told[0]["top"][0])
    assert vitreous.Attribution.load(tmp_path / "out" / "wide.npz", "gae@0@query:2").boxes
