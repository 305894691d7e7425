"""`vitreous diff`: two models whose differences are known; what is said, written and refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as Tree

import numpy as np
import pytest
import torch
import zoo
from conftest import Run
from known import Known
from PIL import Image
from scipy import stats
from test_study import album, other_network
from torchvision.transforms import CenterCrop, Compose, Normalize, Resize, ToTensor

import vitreous
from vitreous import Model, open_study
from vitreous.errors import OptionError, TargetError, Unsupported
from vitreous.evaluation.diff import run as diffs
from vitreous.evaluation.diff.augment import augmented, shift
from vitreous.evaluation.diff.limits import Limits, mcnemar, median, paired_shares, rate
from vitreous.evaluation.diff.measures import correlation, distance, on_grid, overlap
from vitreous.evaluation.diff.run import as_side
from vitreous.evaluation.diff.sides import match_classes, match_views
from vitreous.images.preprocess import IMAGENET, Preprocess
from vitreous.models import load as sources
from vitreous.models.libraries import cropped
from vitreous.trace.trace import Trace

assert album
LABELS = ["cat", "dog, hound", *"abcde"]


def small(net: Any = None, labels: Any = LABELS, size: int = 64) -> Model:
    return Model(net or zoo.network("timm ViT"), cropped((size, size), *IMAGENET), labels, name="small")


def reads(place: str) -> Model:
    """A model that reads the middle of the image or its sides, and says `seen` of a bright one."""
    weights = torch.full((8, 8), 0.02)
    weights[:, [2, 3, 4, 5] if place == "middle" else [0, 1, 6, 7]] = 1.0
    return Model(Known(weights, 8, 4.0).eval(), cropped((64, 64), *IMAGENET), ["seen", "nothing"], name=place)


@pytest.fixture(scope="module")
def bright(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve bright images."""
    root = tmp_path_factory.mktemp("bright")
    for i in range(12):
        noise = np.random.default_rng(i).integers(150, 255, (64, 64, 3), np.uint8)
        Image.fromarray(noise).save(root / f"{i:02d}.png")
    return root


# ------------------------------------------------------------------------------------------------------------ measures


def test_the_distance_is_the_share_of_relevance_that_lies_elsewhere() -> None:
    one = np.array([[[4.0, 0.0], [0.0, -4.0]]])
    other = np.array([[[0.0, 1.0], [0.0, -1.0]]])
    assert distance(one, 7 * one)[0] == 0
    np.testing.assert_allclose(distance(one, other), 0.5)  # one half moved from the upper left to the upper right
    np.testing.assert_allclose(distance(one, -one), 1.0)
    assert np.isnan(distance(one, np.zeros((1, 2, 2)))).all()


def test_correlation_and_overlap_have_their_known_values() -> None:
    chance = np.random.default_rng(0)
    one, other = chance.normal(size=(2, 5, 6, 5))
    expected = [stats.spearmanr(a.ravel(), b.ravel()).statistic for a, b in zip(one, other)]
    np.testing.assert_allclose(correlation(one, other), expected)
    np.testing.assert_allclose(overlap(one, np.exp(one)), 1)
    tops = [({*np.argsort(-a.ravel())[:3]}, {*np.argsort(-b.ravel())[:3]}) for a, b in zip(one, other)]
    np.testing.assert_allclose(overlap(one, other), [len(a & b) / len(a | b) for a, b in tops])


def test_maps_of_other_grids_and_views_are_put_on_one() -> None:
    fine = np.kron(np.arange(4.0).reshape(2, 2), np.ones((2, 2)))[None]
    np.testing.assert_allclose(on_grid(fine, (2, 2)), np.arange(4.0).reshape(1, 2, 2))
    inner = on_grid(np.arange(16.0).reshape(1, 4, 4), (2, 2), (0.25, 0.25, 0.75, 0.75))
    np.testing.assert_allclose(inner, [[[5, 6], [9, 10]]])


def test_every_augmentation_is_undone_on_the_map() -> None:
    trace = Trace(zoo.model("timm ViT"), zoo.images("timm ViT"))
    h, w = trace.layout.grid
    place = torch.arange(h * w, dtype=torch.float32).reshape(1, h, w)
    seen = []
    for name, images, undo in augmented(trace, 0):
        y, x = (size // count for size, count in zip(trace.size, (h, w)))
        put = place if name.startswith(("contrast", "noise")) else None
        if name == "mirrored":
            put = place.flip(-1)
        elif name.startswith("shifted"):
            down, right = (int(step) for step in name.split()[1].split(","))
            put = shift(place, down, right)
            assert torch.equal(images, shift(trace.images, y * down, x * right))
        assert put is not None and (undo(put) == place)[:, 1:-1, 1:-1].all() and images.shape == trace.images.shape
        assert not torch.equal(images, trace.images)
        seen.append(name)
    assert len(seen) == 9


def test_noise_does_not_depend_on_the_batch() -> None:
    model, images = zoo.model("timm ViT"), zoo.images("timm ViT")
    together = [found for _, found, _ in augmented(Trace(model, images), 0)][-1]
    alone = [found for _, found, _ in augmented(Trace(model, images[1:2]), 0)][-1]
    torch.testing.assert_close(alone[0], together[1])


# ---------------------------------------------------------------------------------------------------------- statistics


def test_rates_and_medians_have_exact_intervals() -> None:
    found = rate([True] * 3 + [False] * 17)
    assert (found.value, found.count) == (0.15, 20)
    assert stats.binom.sf(2, 20, found.low) == pytest.approx(0.025)
    assert stats.binom.cdf(3, 20, found.high) == pytest.approx(0.025)
    assert rate([False] * 20).low == 0 and rate([False] * 20).high == pytest.approx(1 - 0.025 ** (1 / 20))
    middle = median(range(1, 22))
    assert (middle.value, middle.low, middle.high) == (11, 6, 16)  # the ranks that tables give for n = 21
    assert np.isnan(median([1.0, 2.0, 3.0]).low) and np.isnan(rate([]).value)


@pytest.mark.parametrize("counts", [(50, 12, 2, 36), (26, 7, 15, 37), (90, 0, 0, 10), (0, 0, 10, 0), (43, 0, 1, 0)])
def test_the_interval_of_a_paired_difference_is_tangos(counts: tuple[int, ...]) -> None:
    both, lost, won, none = counts
    one = [True] * (both + lost) + [False] * (won + none)
    other = [True] * both + [False] * lost + [True] * won + [False] * none
    found, n = paired_shares(one, other)[2], sum(counts)
    assert found.value == (won - lost) / n

    def score(d: float) -> float:
        """With the most likely q found by trying all."""
        q = np.linspace(max(0, -d), (1 - d) / 2, 200_001)[1:-1]
        likely = lost * np.log(q) + won * np.log(q + d) + (both + none) * np.log(1 - 2 * q - d)
        best = q[likely.argmax()]
        return float((won - lost - n * d) / np.sqrt(n * (2 * best + d * (1 - d))))

    for end in (found.low, found.high):
        if abs(end) < 1:
            assert abs(score(end)) == pytest.approx(stats.norm.ppf(0.975), abs=0.01)


def test_mcnemar_is_the_sign_test_of_what_changed() -> None:
    assert mcnemar(0, 0) == 1 and mcnemar(5, 0) == pytest.approx(2 * 0.5**5) and mcnemar(3, 3) == 1


# ---------------------------------------------------------------------------------------------------------- two models


@pytest.mark.parametrize("batch", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 7, 16))])
def test_a_model_against_itself_has_no_flip_and_no_moved_reason(album: Path, tmp_path: Path, batch: int) -> None:
    made = vitreous.diff(small(), small(copy.deepcopy(zoo.network("timm ViT"))), album, tmp_path, batch=batch)
    assert made.passed and len(made.gathered.pairs) == 9 and list(made.gathered.failed) == ["cat/3.png"]
    found = made.to_pandas()
    assert found["same"].all() and not found["moved"].any()
    assert found["distance"].max() < 1e-5 and found["correlation"].min() > 0.999
    np.testing.assert_allclose(found["faithfulness_a"], found["faithfulness_b"], atol=1e-5)
    assert made.numbers["augmentations"] == 9 and made.counted.lost == made.counted.won == 0


def test_the_same_answer_for_another_reason_is_caught(bright: Path, tmp_path: Path) -> None:
    made = vitreous.diff(reads("middle"), reads("sides"), bright, tmp_path, metric=None)
    assert not made.passed and [one.name for one in made.checks if one.verdict == "failed"] == ["max_moved"]
    found = made.to_pandas()
    assert found["same"].all() and found["moved"].all() and found["distance"].min() > 0.5
    assert found["target"].eq("seen").all() and found["faithfulness_a"].isna().all()
    went = next(said for said in made.findings().told if "went in the 12 images of the same answer and another" in said)
    assert "left: +" in went or "right: +" in went, went
    assert "centre: −" in went
    again = vitreous.diff(reads("middle"), reads("middle"), bright, tmp_path, metric=None)
    assert again.passed and again.counted.moved.value == 0


@pytest.mark.slow
def test_the_second_model_explains_the_answers_of_the_first(tmp_path: Path, bright: Path) -> None:
    made = vitreous.diff(small(), small(other_network()), bright, tmp_path, metric=None, limit=6)
    rows = made.study.to_pandas()
    one, other = (rows[rows["model"] == name] for name in made.study.models)
    assert one["target"].tolist() == one["prediction"].astype(str).tolist() == other["target"].tolist()
    maps = {(row["model"], row["image"]): row["map"] for row in made.study.iter_maps()}
    model = small(other_network())
    image, target = other["image"].iloc[2], int(other["target"].iloc[2])
    expected = vitreous.explain(model, bright / image, made.study.kind.method, target).map[0]
    np.testing.assert_allclose(maps[made.study.models[1], image], expected, rtol=1e-3, atol=1e-5)


def test_classes_are_matched_by_name() -> None:
    order = [3, 0, 1, 2, 4, 5, 6]
    shuffled = small(labels=[LABELS[i] for i in order])
    assert match_classes(small(), shuffled) == ([1, 2, 3, 0, 4, 5, 6], [])
    assert match_classes(small(), small(labels=["cat", "hound", "a", "b", "c", "x", "y"])) == (
        None,
        [],
    )  # spelled otherwise
    found, notes = match_classes(small(), small(labels=[f"x{i}" if i > 3 else LABELS[i] for i in order]))
    assert found == [1, 2, 3, 0, -1, -1, -1] and "3 of 7 classes" in notes[0]
    one = small(labels=["cat", "hound", "a", "b", "c", "e", "d"])  # the last two have changed places
    assert match_classes(small(), one) == ([0, 1, 2, 3, 4, 6, 5], [])


def test_what_has_no_class_in_common_is_refused() -> None:
    one, other = small(), small(labels=[f"x{i}" for i in range(7)])
    with pytest.raises(TargetError, match=r"no class in common .*--labels"):
        match_classes(one, other)
    nameless = Model(zoo.network("hand-written"), cropped((32, 32), *IMAGENET), name="nameless")
    _ = nameless.layout
    nameless.outputs = 3
    with pytest.raises(TargetError, match="not all have names"):
        match_classes(one, nameless)


def test_views_that_differ_are_compared_where_both_see() -> None:
    whole, inner, squashed = small(), seeing(Resize(128), CenterCrop(64)), seeing(Resize((64, 64)))
    assert match_views(whole, small()) == (None, [])
    found, notes = match_views(whole, inner)
    assert found is not None and "compared where both see" in notes[0]
    np.testing.assert_allclose(found, [(0.25, 0.25, 0.75, 0.75), (0, 0, 1, 1)], atol=0.03)
    found, notes = match_views(whole, squashed)
    assert found is None and "as if both saw the same part" in notes[0]


def seeing(*steps: Any) -> Model:
    prepare = Compose([*steps, ToTensor(), Normalize(*IMAGENET)])
    return Model(zoo.network("timm ViT"), Preprocess(prepare, *IMAGENET), LABELS, name="small")


@pytest.mark.slow
def test_grids_that_differ_are_compared_on_the_coarser(bright: Path, tmp_path: Path) -> None:
    coarse = Model(Known(torch.ones(4, 4), 16, 4.0).eval(), cropped((64, 64), *IMAGENET), ["seen", "nothing"], name="c")
    made = vitreous.diff(reads("middle"), coarse, bright, tmp_path, metric=None, limit=4)
    assert made.gathered.pairs[0].gained.shape == (4, 4) and len(made.gathered.pairs) == 4


@pytest.mark.slow
def test_a_stopped_comparison_goes_on(album: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {"batch": 4, "shard": 4, "metric": None}
    pair = small(), small(other_network())
    whole = vitreous.diff(*pair, album, tmp_path / "whole", **given)

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(diffs.Diff, "aimed", stop)  # after the first model
        with pytest.raises(KeyboardInterrupt):
            vitreous.diff(*pair, album, tmp_path / "parts", **given)
    stored = open_study(tmp_path / "parts")
    assert len(stored.numbers) == 3 and not stored.finished
    assert "No image could be compared." in next(iter(stored.findings().values())).lead
    first = [stored.store.file(number).stat().st_mtime_ns for number in stored.numbers]
    made = vitreous.diff(*pair, album, tmp_path / "parts", **given)
    assert [stored.store.file(number).stat().st_mtime_ns for number in range(3)] == first
    assert made.to_pandas().equals(whole.to_pandas())


# ---------------------------------------------------------------------------------------------------------- the command


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """`middle` and `sides` in place of real names."""

    def load(spec: str | None = None, weights: str | None = None, *_: Any, **more: Any) -> Model:
        return reads(str(spec))

    monkeypatch.setattr(sources, "load", load)


def test_the_command_fails_with_code_1_and_leaves_a_report(run: Run, bright: Path, loaded: None) -> None:
    ran = run("diff", "middle", "sides", bright, "--metric", "none", "--junit", "checks.xml", "--workers", 0)
    assert ran.code == 1 and "FAILED (max_moved): 0 % [0 %, 26 %] of 12 images have another answer" in ran.out
    study = open_study("vitreous-out")
    there = {file.name for file in study.folder.iterdir()}
    assert {"report.html", "findings.json", "images.parquet", "limits.json"} <= there
    page = (study.folder / "report.html").read_text()
    assert page.count("<img") == 36 and "Same answer, other reason" in page  # photo and two maps of each image
    told = json.loads((study.folder / "findings.json").read_text())["models"]["middle → sides"]["numbers"]
    assert told["passed"] is False and told["moved"]["value"] == 1 and told["moved"]["images"] == 12
    suite = Tree.parse("checks.xml").getroot()[0]
    assert suite.attrib["tests"] == "3" and suite.attrib["failures"] == "1" and suite.attrib["skipped"] == "1"
    failure = suite.find("testcase/failure")
    assert failure is not None and "00.png: seen " in (failure.text or "") and "limit 10 %" in failure.attrib["message"]
    again = run("report", "vitreous-out")
    assert again.code == 0 and "FAILED (max_moved)" in again.out


@pytest.mark.slow
def test_limits_are_no_part_of_the_study(run: Run, bright: Path, loaded: None) -> None:
    given = ("diff", "middle", "sides", bright, "--metric", "none", "--workers", 0, "--limit", 4)
    assert run(*given, "--max-moved", 0.2).code == 1
    ran = run(*given, "--max-moved", 1, "--json")
    told = json.loads(ran.out)
    assert ran.code == 0 and told["passed"] and len(list(Path("vitreous-out").glob("diff-*"))) == 1
    assert run(*given, "--max-moved", 1, "--min-correlation", 0.99).code in (0, 1)
    assert run(*given, "--max-moved", 1, "--limit", 4, "--junit", "ok.xml").code == 0
    assert "failure" not in Path("ok.xml").read_text().replace("failures", "")
    assert "PASSED" in run("report", "vitreous-out").out  # by the limits of the last run


def test_images_that_all_fail_are_an_error(run: Run, tmp_path: Path, loaded: None) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "0.png").write_bytes(b"no")
    ran = run("diff", "middle", "sides", tmp_path / "bad", "--metric", "none")
    assert ran.code == 2 and "is not an image" in ran.err and "No image could be compared" in ran.out


def test_the_sides_of_a_comparison(tmp_path: Path) -> None:
    file = tmp_path / "w.safetensors"
    file.write_bytes(b"")
    assert as_side("vit_tiny:bfloat16").dtype == "bfloat16" and as_side("vit_tiny:bfloat16").spec == "vit_tiny"
    assert as_side("openclip/ViT-B-32:openai").spec == "openclip/ViT-B-32:openai"
    weights = as_side(f"{file}#ema:float16", "vit_tiny")
    assert (weights.spec, weights.weights, weights.dtype) == ("vit_tiny", f"{file}#ema", "float16")
    assert as_side(file).spec == str(file) and as_side(file).weights is None


def test_what_cannot_be_compared_is_refused(bright: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="attention does not depend on a class"):
        vitreous.diff(reads("middle"), reads("sides"), bright, tmp_path, method="attention")
    with pytest.raises(OptionError, match="sparsity does not measure faithfulness"):
        vitreous.diff(reads("middle"), reads("sides"), bright, tmp_path, metric="sparsity")
    with pytest.raises(OptionError, match="options for gae"):
        vitreous.diff(reads("middle"), reads("sides"), bright, tmp_path, options={"gae": {}})
    with pytest.raises(OptionError, match="max_moved=2: give a number from 0 to 1"):
        Limits(max_moved=2)
    value = Model(zoo.network("timm ViT"), cropped((64, 64), *IMAGENET), output="value", name="value")
    with pytest.raises(Unsupported, match="value returns values; compare its maps"):
        vitreous.diff(value, value, bright, tmp_path)


@pytest.mark.slow
def test_a_damaged_file_of_limits_is_named(run: Run, bright: Path, loaded: None) -> None:
    run("diff", "middle", "middle", bright, "--metric", "none", "--limit", 2, "--workers", 0)
    (open_study("vitreous-out").folder / "limits.json").write_text("[]")
    ran = run("report", "vitreous-out")
    assert ran.code == 2 and "does not hold limits" in ran.err


# ----------------------------------------------------------------------------------------------------------- real ones


@pytest.mark.slow
def test_bfloat16_passes_on_the_embedded_model(tmp_path: Path) -> None:
    photos = Path(vitreous.__file__).parent / "assets" / "photos"
    made = vitreous.diff("vitreous_tiny", "vitreous_tiny:bfloat16", photos, tmp_path, device="cpu")
    assert made.passed and made.counted.flips.value == made.counted.moved.value == 0
    assert 0 < made.counted.distance.value < 0.05 and made.counted.correlation.value > 0.99


@pytest.mark.slow
def test_outputs_that_are_no_answer_are_refused(bright: Path, tmp_path: Path) -> None:
    """Segmentation, detection and video models."""
    import detectors
    import test_video
    from test_dense import Segmenter

    dense = Model(Segmenter(), cropped((32, 32), *IMAGENET), name="segmenter")
    detector = Model(detectors.detr(), cropped(detectors.LARGE, *IMAGENET), name="detector")
    for model in (dense, detector):
        with pytest.raises(Unsupported, match=r"compares the answers of image classifiers; .* study maps"):
            vitreous.diff(model, model, bright, tmp_path)
    video = test_video.model(next(iter(test_video.SHOWN)))
    with pytest.raises(Unsupported, match="takes videos"):
        vitreous.diff(video, video, bright, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", zoo.REPRESENTATIVE)
def test_models_of_every_kind_are_like_themselves(name: str, bright: Path, tmp_path: Path) -> None:
    size = zoo.ZOO[name].size
    model = Model(zoo.network(name), cropped(size, *IMAGENET), classifier=True, name="any")
    made = vitreous.diff(model, model, bright, tmp_path, limit=3)
    assert made.passed and made.counted.flips.value == made.counted.moved.value == 0
    assert made.counted.distance.value < 1e-5


@pytest.mark.slow
def test_ray_gives_the_same_comparison(bright: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    given: dict[str, Any] = {"metric": None, "limit": 4, "shard": 2, "batch": 2}
    pair = small(), small(other_network())
    near = vitreous.diff(*pair, bright, tmp_path / "near", **given).to_pandas()
    far = vitreous.diff(*pair, bright, tmp_path / "far", engine="ray", workers=1, **given).to_pandas()
    for name in ("distance", "noisy", "answer_probability_b"):
        np.testing.assert_allclose(near[name], far[name], atol=1e-5)
