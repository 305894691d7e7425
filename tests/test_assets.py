"""What ships inside the package: the embedded model, its labels and the sample photographs; and the demo."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from conftest import Run
from PIL import Image
from safetensors.torch import load_file
from timm.data.transforms_factory import create_transform

import vitreous
from vitreous.images.preprocess import IMAGENET
from vitreous.models.labels import read_labels
from vitreous.models.libraries import Loaded, cropped, embedded

ROOT = Path(__file__).parents[1]
ASSETS = ROOT / "src" / "vitreous" / "assets"
PHOTOS = sorted((ASSETS / "photos").glob("*.jpg"))
EXAMPLES = sorted((ASSETS / "concepts" / "coffee").glob("*.jpg"))
BOTH = ASSETS / "photos" / "cat_and_coffee.jpg"
MADE = ROOT / "docs" / "_make" / "sample_photos.py"
ESPRESSO, TABBY = 967, 281
CATS = {281, 282, 283, 284, 285}  # the five of ImageNet


# ----------------------------------------------------------------------------------------------------------- the photos


def test_there_are_photos_and_the_default_one() -> None:
    assert 4 <= len(PHOTOS) <= 6
    assert PHOTOS[0] == ASSETS / "photos" / "cat.jpg", "the page begins with the first"
    assert BOTH in PHOTOS
    assert 4 <= len(EXAMPLES) <= 6
    assert not [path for path in (ASSETS / "photos").iterdir() if path.is_dir()], "folders are searched whole"


@pytest.mark.parametrize("path", PHOTOS + EXAMPLES, ids=lambda path: path.stem)
def test_photo_is_small_and_attributed(path: Path) -> None:
    with Image.open(path) as photo:
        photo.load()
        assert (photo.mode, photo.format) == ("RGB", "JPEG")
        assert min(photo.size) >= 224
        assert max(photo.size) <= 448
        assert not photo.getexif()
    assert path.stat().st_size < 60_000
    readme = ASSETS / path.relative_to(ASSETS).parts[0] / "README.md"
    assert f"`{path.name}`" in readme.read_text(encoding="utf-8")


def test_our_own_are_made_again_from_the_others(tmp_path: Path) -> None:
    made = runpy.run_path(str(MADE))["make"](tmp_path)
    assert {path.relative_to(tmp_path) for path in made} == {path.relative_to(ASSETS) for path in (BOTH, *EXAMPLES)}
    for path in made:
        again, packaged = (np.asarray(Image.open(p), float) for p in (path, ASSETS / path.relative_to(tmp_path)))
        assert np.abs(again - packaged).mean() < 2, path.name  # releases of the JPEG library round differently


# ------------------------------------------------------------------------------------------------- labels and the model


def test_labels_are_imagenets_in_the_usual_order() -> None:
    lines = (ASSETS / "imagenet1k.txt").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 1000
    assert all(line and line == line.strip() for line in lines)
    assert lines[0] == "tench, Tinca tinca"
    assert lines[281:283] == ["tabby, tabby cat", "tiger cat"]
    assert lines[134] == lines[517] == "crane"
    assert lines[638:640] == ["maillot", "maillot, tank suit"]


def test_weights_are_half_precision_fit_timm_and_see_a_cat() -> None:
    """As the model card shows it, without vitreous."""
    file = ASSETS / "vitreous_tiny.safetensors"
    assert file.stat().st_size <= 12_000_000
    weights = load_file(file)
    assert {value.dtype for value in weights.values()} == {torch.float16}
    assert all(value.isfinite().all() for value in weights.values())
    net = timm.create_model("deit_tiny_patch16_224", reg_tokens=4, no_embed_class=True).eval()
    net.load_state_dict(weights, strict=True)
    transform = create_transform(224, interpolation="bicubic", crop_pct=1.0)  # ImageNet mean and std
    with Image.open(ASSETS / "photos" / "cat.jpg") as photo, torch.inference_mode():
        assert net(transform(photo)[None]).argmax().item() in CATS


def test_the_embedded_model_has_registers_and_sees_a_cat(tiny: vitreous.Model, cat: Path) -> None:
    assert tiny.module.num_reg_tokens == 4
    assert vitreous.Trace(tiny, cat).output.argmax().item() in CATS


# ------------------------------------------------------------------------------------------ two classes, and a concept


@pytest.fixture(scope="module")
def trace(tiny: vitreous.Model) -> vitreous.Trace:
    """The image with two classes: coffee above, cat below."""
    return vitreous.Trace(tiny, BOTH)


def above(found: vitreous.Attribution) -> float:
    """The share of the positive evidence in the upper half, where the coffee is."""
    evidence = found.map[0].clamp(min=0)
    rows = evidence.shape[0] // 2
    return float(evidence[:rows].sum() / evidence.sum())


def test_the_model_names_both(trace: vitreous.Trace) -> None:
    assert {ESPRESSO, TABBY} <= set(trace.output[0].topk(5).indices.tolist())


@pytest.mark.parametrize("method", ["gae", "gradcam", "cdam"])
def test_maps_of_two_classes_lie_on_different_halves(method: str, tiny: vitreous.Model, trace: vitreous.Trace) -> None:
    """The first two are those of the demo. A map that does not depend on the class fails, wherever it lies."""
    coffee, cat = vitreous.explain_targets(tiny, trace, method, [ESPRESSO, TABBY])
    assert above(coffee) > 0.65
    assert above(cat) < 0.35


def test_the_concept_lies_on_its_half(tiny: vitreous.Model, trace: vitreous.Trace) -> None:
    coffee = vitreous.Concept.from_images(tiny, EXAMPLES, name="coffee")
    for method in ("cdam", "gradcam"):
        assert above(vitreous.explain(tiny, trace, method, target=coffee)) > 0.65


# ------------------------------------------------------------------------------------------------------------- the demo


def demo() -> tuple[list[str], list[str]]:
    """The commands that `make demo` runs, and those that it names at its end."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    values = dict(re.findall(r"^(\w+) *:= *(.*)$", text, re.MULTILINE))
    recipe = re.search(r"^demo:.*\n((?:\t.*\n)+)", text, re.MULTILINE)
    assert recipe
    lines = [re.sub(r"\$\((\w+)\)", lambda name: values[name[1]], line) for line in recipe[1].splitlines()]
    lines = [line.replace("$(VENV)", values["VENV"]).strip() for line in lines]  # in $(BIN)
    program = f"{values['VENV']}/bin/vitreous "
    ran = [line.removeprefix(program) for line in lines if line.startswith(program)]
    named = [found[1] for line in lines if (found := re.fullmatch(rf'@echo " *{re.escape(program)}(.*)"', line))]
    return ran, named


def small_embedded(name: str, weights: str | None, size: Any) -> Loaded:
    """Like the embedded model, but narrow, shallow and untrained; the same at every call."""
    small = {"embed_dim": 48, "depth": 2, "num_heads": 3}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = timm.create_model("deit_tiny_patch16_224", reg_tokens=4, no_embed_class=True, **small)
    steps = cropped((224, 224), *IMAGENET)
    return Loaded(net, steps, embedded.NAME, list(read_labels(ASSETS / "imagenet1k.txt").values()))


def test_the_demo_and_what_it_names_next_run(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitreous.plot.figure.DPI", 50)  # small figures
    monkeypatch.setattr(embedded, "load", small_embedded)
    (tmp_path / "src").symlink_to(ROOT / "src")
    ran, named = demo()
    assert (len(ran), len(named)) == (2, 3)
    for line in ran + named:
        done = run(*shlex.split(line))
        assert done.code == 0, f"{line}: {done.err}"
    assert (tmp_path / "vitreous-out" / "cat_and_coffee.png").exists()
    with np.load(tmp_path / "vitreous-out" / "cat_and_coffee.npz") as maps:  # what is named next leaves it alone
        assert {f"{method}@{one}" for method in ("gae", "gradcam") for one in (ESPRESSO, TABBY)} < set(maps)
