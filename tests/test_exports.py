"""Maps as masks, COCO annotations and heat maps of FiftyOne: in the pixels of the original images."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from PIL import Image
from torchvision import transforms

import vitreous
from vitreous import Attribution, Model
from vitreous._support.marks import is_ours, read_mark
from vitreous._support.statistics import otsu
from vitreous.bridges.coco import run_lengths
from vitreous.bridges.placed import placed
from vitreous.errors import InputError, ModelError, OptionError

SIDE = 64
NORMAL = transforms.Normalize((0.5,) * 3, (0.5,) * 3)
CROPPED = transforms.Compose([transforms.Resize(SIDE), transforms.CenterCrop(SIDE), transforms.ToTensor(), NORMAL])
SQUEEZED = transforms.Compose([transforms.Resize((SIDE, SIDE)), transforms.ToTensor(), NORMAL])
MIRRORED = transforms.Compose([CROPPED, transforms.RandomHorizontalFlip(1.0)])


class Padded:
    """The whole image on a black square."""

    def __call__(self, image: Image.Image) -> torch.Tensor:
        side = max(image.size)
        square = Image.new("RGB", (side, side))
        square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
        return SQUEEZED(square)


class Alone:
    """Normalises each image by its own values."""

    def __call__(self, image: Image.Image) -> torch.Tensor:
        x = CROPPED(image)
        return (x - x.mean()) / (x.std() + 1e-3)


def explained(tmp_path: Path, preprocess: Any = CROPPED, size: tuple[int, int] = (160, 80), **more: Any) -> Attribution:
    """Maps of two images of this width and height; their values can be chosen with `at`."""
    files = []
    for number in range(2):
        values = np.random.default_rng(number).integers(0, 255, (*size[::-1], 3), dtype=np.uint8)
        files.append(tmp_path / f"image {number}.png")
        Image.fromarray(values).save(files[-1])
    labels = [f"class {number}" for number in range(zoo.CLASSES)]
    model = Model(zoo.network("timm ViT"), preprocess, labels, name="vit")
    return vitreous.explain(model, files, "gae", [3, 1], **more)


def at(found: Attribution, rows: slice, columns: slice, value: float = 1.0) -> Attribution:
    """The same with maps that are zero but for one region."""
    map = torch.zeros_like(found.map)
    map[:, rows, columns] = value
    return replace(found, map=map)


def decoded(told: dict[str, Any]) -> np.ndarray:
    """A plain decoder of COCO's compressed run lengths."""
    counts: list[int] = []
    letters = iter(told["counts"])
    for letter in letters:
        number, shift, code = 0, 0, ord(letter) - 48
        number |= (code & 31) << shift
        while code & 32:
            shift += 5
            code = ord(next(letters)) - 48
            number |= (code & 31) << shift
        if code & 16:
            number -= 1 << (shift + 5)
        counts.append(number + (counts[-2] if len(counts) > 2 else 0))
    flat = np.concatenate([np.full(count, i % 2, bool) for i, count in enumerate(counts)])
    return flat.reshape(told["size"], order="F")


# ------------------------------------------------------------------------------------------------------ where it is put


@pytest.mark.parametrize(
    ("preprocess", "size", "expected"),
    [
        (CROPPED, (160, 80), (40, 0, 80, 40)),  # the middle square; the upper left quarter of it
        (CROPPED, (80, 160), (0, 40, 40, 80)),
        (SQUEEZED, (160, 80), (0, 0, 80, 40)),
        (Padded(), (160, 80), (0, 0, 80, 40)),  # bars of 40 above and below: of the upper half, half is bar
    ],
    ids=["crop of a wide image", "crop of a high image", "squeezed", "padded"],
)
def test_masks_lie_where_the_model_looked(
    preprocess: Any, size: tuple[int, int], expected: tuple[int, int, int, int], tmp_path: Path
) -> None:
    found = at(explained(tmp_path, preprocess, size), slice(0, 2), slice(0, 2))
    map = placed(found, 0)
    assert map.size == size and map.original
    left, top, right, bottom = expected
    inside = map.map > 0.5
    rows, columns = np.flatnonzero(inside.any(1)), np.flatnonzero(inside.any(0))
    edges = (columns[0], rows[0], columns[-1] + 1, rows[-1] + 1)
    assert np.abs(np.subtract(edges, (left, top, right, bottom))).max() <= 2, edges
    assert (map.map[~map.seen] == 0).all()


def test_a_smaller_map_for_a_database(tmp_path: Path) -> None:
    found = at(explained(tmp_path), slice(0, 2), slice(0, 2))
    map = placed(found, 0, 40)
    assert map.size == (40, 20) and map.seen.sum() == 20 * 20 and map.map[5, 15] == 1 and map.map[5, 5] == 0
    assert placed(found, 0, 4000).size == (160, 80), "never larger than the image"


def test_patches_that_cover_a_part_of_the_input(tmp_path: Path) -> None:
    found = replace(at(explained(tmp_path, SQUEEZED), slice(None), slice(None)), box=(0.0, 0.0, 0.5, 0.5))
    map = placed(found, 1)
    assert map.map[:40, :80].min() > 0.99 and map.map[41:].max() == map.map[:, 81:].max() == 0


@pytest.mark.parametrize("preprocess", [MIRRORED, Alone()], ids=["mirrored", "normalised by itself"])
def test_what_cannot_be_found_in_the_image_is_exported_as_seen_and_said(preprocess: Any, tmp_path: Path) -> None:
    found = explained(tmp_path, preprocess)
    with pytest.warns(UserWarning, match=r"image 0.png: the mask has the pixels of what the model saw, .*, not of the"):
        document = vitreous.to_coco(found[0])
    (image,) = document["images"]
    assert image["cropped"] and [image["height"], image["width"]] == document["annotations"][0]["segmentation"]["size"]
    assert "cropped" not in vitreous.to_coco(explained(tmp_path))["images"][0]


def test_tensors_are_their_own_images() -> None:
    model = Model(zoo.network("timm ViT"))
    document = vitreous.to_coco(vitreous.explain(model, zoo.images("timm ViT"), "gae"))
    assert [(i["id"], i["file_name"], i["width"]) for i in document["images"]] == [
        (n + 1, f"image {n}", SIDE) for n in range(3)
    ]


def test_maps_from_a_file_have_no_image(tmp_path: Path) -> None:
    loaded = Attribution.load(explained(tmp_path).save(tmp_path / "maps.npz"))
    for export in (lambda: vitreous.to_coco(loaded), lambda: vitreous.to_masks(loaded, tmp_path / "masks")):
        with pytest.raises(InputError, match="loaded from a file without its images; explain them again"):
            export()
    with pytest.raises(InputError, match=r"a Tensor is not an attribution; give what vitreous\.explain returns"):
        vitreous.to_coco([loaded.map])  # type: ignore[list-item]


# ------------------------------------------------------------------------------------------------------------- the cut


def mask(found: Attribution, **cut: Any) -> np.ndarray:
    return decoded(vitreous.to_coco(found[0], **cut)["annotations"][0]["segmentation"])


def test_the_top_is_a_share_of_what_was_seen(tmp_path: Path) -> None:
    found = replace(explained(tmp_path), map=torch.arange(32.0).reshape(2, 4, 4) + 1)
    for top in (0.1, 0.25, 1.0):
        assert mask(found, top=top).sum() == pytest.approx(top * 80 * 80, rel=0.02)
    assert not mask(found, top=1.0)[:, :40].any(), "what was cropped away is never in it"


def test_the_mass_is_a_share_of_the_sum(tmp_path: Path) -> None:
    found = replace(explained(tmp_path), map=torch.arange(32.0).reshape(2, 4, 4) + 1)
    values = placed(found, 0).map
    for share in (0.3, 0.6):
        inside = mask(found, mass=share)
        held = values[inside].sum() / values.sum()
        assert share - 1e-6 <= held < share + 0.01
        assert values[inside].min() >= values[~inside].max()


def test_otsu_parts_two_regions(tmp_path: Path) -> None:
    found = explained(tmp_path)
    map = torch.full_like(found.map, 0.1)
    map[:, 2:, 2:] = 5.0
    inside = mask(replace(found, map=map))
    assert inside[60:, 100:120].all() and not inside[:20].any() and not inside[:, :60].any()


def test_otsu_is_the_best_of_all_cuts() -> None:
    chance = np.random.default_rng(0)
    values = np.concatenate([chance.normal(0, 1, (3, 60)), chance.normal(6, 1, (3, 30))], 1)
    share, cut = otsu(values)
    for row, found, best in zip(values, share, cut):
        tried = []
        for edge in np.unique(row)[1:]:
            low, high = row[row < edge], row[row >= edge]
            between = len(low) * len(high) / len(row) ** 2 * (low.mean() - high.mean()) ** 2
            tried.append(between / row.var())
        assert found == pytest.approx(max(tried)) and 1 < best < 5
    assert otsu(np.ones((1, 4)))[0] == 0 and otsu(np.full((1, 1), 3.0))[1] == 3


def test_a_signed_map_gives_its_evidence_only(tmp_path: Path) -> None:
    found = replace(explained(tmp_path), signed=True)
    map = torch.full_like(found.map, -1.0)
    map[:, 0, 0] = 1.0
    inside = mask(replace(found, map=map), top=0.5)
    assert inside.sum() < 0.1 * 80 * 80 and inside[5, 45]
    against = replace(found, map=torch.full_like(found.map, -1.0))
    document = vitreous.to_coco(against, mass=0.5)
    assert document["annotations"] == [] and len(document["images"]) == 2
    level = replace(against, method="rise")
    assert mask(replace(level, map=map - 5), top=0.05)[5, 45], "of a level, only differences count"
    with pytest.raises(OptionError, match="only differences within a map of rise mean something, so it has no mass"):
        vitreous.to_coco(level, mass=0.5)


def test_wrong_cuts(tmp_path: Path) -> None:
    found = explained(tmp_path)
    for wrong in ({"top": 0}, {"top": 1.5}, {"mass": -1}):
        with pytest.raises(OptionError, match="takes a share between 0 and 1, not"):
            vitreous.to_coco(found, **wrong)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="give top or mass, not both"):
        vitreous.to_masks(found, tmp_path, top=0.1, mass=0.1)


# ------------------------------------------------------------------------------------------------------------ the files


def test_run_lengths_are_those_of_coco() -> None:
    chance = np.random.default_rng(0)
    try:
        from pycocotools import mask as theirs
    except ImportError:
        theirs = None
    for number in range(60):
        made = chance.random(chance.integers(1, 50, 2)) < chance.random()
        if number % 3 == 0:
            made[: len(made) // 2] = True
            made[len(made) // 2 :] = False
        told = run_lengths(made)
        assert np.array_equal(decoded(told), made)
        if theirs is not None:
            reference = theirs.encode(np.asfortranarray(made.astype(np.uint8)))
            assert reference["counts"].decode() == told["counts"] and reference["size"] == told["size"]
    assert run_lengths(np.ones((30, 50), bool))["counts"] == "0l^1", "as pycocotools writes it"


def test_coco_holds_images_categories_and_scores(tmp_path: Path) -> None:
    found = explained(tmp_path)
    document = vitreous.to_coco(found, tmp_path / "maps.json", top=0.2)
    assert json.loads((tmp_path / "maps.json").read_text()) == document
    assert [image["file_name"] for image in document["images"]] == ["image 0.png", "image 1.png"]
    assert [(image["width"], image["height"]) for image in document["images"]] == [(160, 80)] * 2
    assert [one["name"] for one in document["categories"]] == ["class 3", "class 1"]
    for one, share in zip(document["annotations"], found.probabilities):
        inside = decoded(one["segmentation"])
        left, top, wide, high = one["bbox"]
        assert inside.sum() == one["area"] == inside[top : top + high, left : left + wide].sum()
        assert one["score"] == pytest.approx(share) and one["method"] == "gae" and one["iscrowd"] == 0
    mark = read_mark(tmp_path / "maps.json")
    assert mark is not None and mark["maps"]["0"]["method"] == "gae"


def test_several_attributions_share_their_images(tmp_path: Path) -> None:
    one = explained(tmp_path)
    other = vitreous.explain(Model(zoo.network("timm ViT"), CROPPED), one.views.sources, "rollout")  # type: ignore[union-attr]
    document = vitreous.to_coco([one, other])
    assert len(document["images"]) == 2 and [a["image_id"] for a in document["annotations"]] == [1, 2, 1, 2]
    assert [c["name"] for c in document["categories"]] == ["class 3", "class 1", "rollout"]
    assert "score" not in document["annotations"][2]
    files = vitreous.to_masks([one, other], tmp_path / "masks")
    assert [f.name for f in files] == [
        *("image_0-gae-class_3.png", "image_1-gae-class_1.png"),
        *("image_0-rollout-rollout.png", "image_1-rollout-rollout.png"),
    ]


@pytest.mark.filterwarnings("ignore")
def test_pycocotools_reads_it(tmp_path: Path) -> None:
    coco = pytest.importorskip("pycocotools.coco")
    found = explained(tmp_path)
    vitreous.to_coco(found, tmp_path / "maps.json")
    read = coco.COCO(tmp_path / "maps.json")
    for one, file in zip(read.loadAnns(read.getAnnIds()), vitreous.to_masks(found, tmp_path / "masks")):
        assert np.array_equal(read.annToMask(one) * 255, np.asarray(Image.open(file)))


def test_masks_are_files_that_are_known_and_kept(tmp_path: Path) -> None:
    found = explained(tmp_path)
    files = vitreous.to_masks(found, tmp_path / "masks", top=0.2)
    assert [file.name for file in files] == ["image_0.png", "image_1.png"] and all(map(is_ours, files))
    with Image.open(files[0]) as image:
        assert image.size == (160, 80) and image.mode == "L" and set(np.unique(np.asarray(image))) == {0, 255}
    assert vitreous.to_masks(found, tmp_path / "masks", top=0.2) == files, "the same again"
    with pytest.raises(OptionError, match=r"image_0.png is there already, with other content; .* overwrite=True"):
        vitreous.to_masks(found, tmp_path / "masks", top=0.5)
    before = files[0].read_bytes()
    vitreous.to_masks(found, tmp_path / "masks", top=0.5, overwrite=True)
    assert files[0].read_bytes() != before
    vitreous.to_coco(found, tmp_path / "maps.json")
    with pytest.raises(OptionError, match=r"maps\.json is there already"):
        vitreous.to_coco(found, tmp_path / "maps.json", top=0.5)


# ------------------------------------------------------------------------------------------------------------- FiftyOne


class Sample(dict):  # type: ignore[type-arg]
    """As fo.Sample."""

    def __init__(self, filepath: str, in_dataset: bool = False) -> None:
        super().__init__()
        self.filepath, self.in_dataset, self.saved = filepath, in_dataset, 0

    def save(self) -> None:
        self.saved += 1


class Dataset(list):  # type: ignore[type-arg]
    """As fo.Dataset."""

    def add_samples(self, samples: list[Sample]) -> None:
        self += samples


@pytest.fixture
def fiftyone(monkeypatch: pytest.MonkeyPatch) -> None:
    made = SimpleNamespace(
        Sample=Sample, Heatmap=lambda **kw: ("Heatmap", kw), Classification=lambda **kw: ("Classification", kw)
    )
    monkeypatch.setitem(sys.modules, "fiftyone", made)


def test_samples_get_heat_maps_and_numbers(fiftyone: None, tmp_path: Path) -> None:
    found = at(explained(tmp_path), slice(0, 2), slice(0, 2), 3.0)
    path = str(tmp_path / "image 1.png")
    dataset = Dataset([Sample(str(tmp_path / "other.png"), True), Sample(path, True)])
    score = vitreous.evaluate(Model(zoo.network("timm ViT"), CROPPED), found.views.sources, found, "sparsity")  # type: ignore[union-attr]
    changed = vitreous.to_fiftyone(dataset, found, scores={"sparsity": score})
    assert [s.filepath for s in dataset][1:] == [path, str(tmp_path / "image 0.png")]
    assert dataset[0] == {} and dataset[0].saved == 0 and dataset[1].saved == 1
    assert [s.filepath for s in changed] == [str(tmp_path / "image 0.png"), path]
    for i, sample in enumerate(changed):
        kind, heat = sample["gae"]
        assert kind == "Heatmap" and heat["map"].shape == (80, 160) and heat["map"].dtype == np.float32
        assert heat["range"] == [0.0, 3.0] and heat["map"][10, 60] == 3 and heat["map"][10, 10] == 0
        told = sample["gae_target"][1]
        assert told == {"label": ("class 3", "class 1")[i], "confidence": found.probabilities[i]}
        assert isinstance(sample["gae_gini"], float) and sample["gae_sparsity"] == float(score.value[i])
    assert vitreous.to_fiftyone(None, found, "mine", side=40)[0]["mine"][1]["map"].shape == (20, 40)
    plain: list[Any] = []
    assert vitreous.to_fiftyone(plain, found) == plain and len(plain) == 2


def test_signed_heat_maps_have_zero_in_the_middle(fiftyone: None, tmp_path: Path) -> None:
    found = replace(at(explained(tmp_path), slice(0, 2), slice(0, 2), -2.0), signed=True)
    assert vitreous.to_fiftyone(None, found)[0]["gae"][1]["range"] == [-2.0, 2.0]


def test_what_fiftyone_cannot_hold(fiftyone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = explained(tmp_path)
    with pytest.raises(OptionError, match="field='two words' is not a name that a field can have"):
        vitreous.to_fiftyone(None, found, "two words")
    with pytest.raises(OptionError, match="3 values of srg for 2 images; give one for each image"):
        vitreous.to_fiftyone(None, found, scores={"srg": [1, 2, 3]})
    with pytest.raises(InputError, match="what the model saw cannot be found in the image"):
        vitreous.to_fiftyone(None, explained(tmp_path, MIRRORED))
    model = Model(zoo.network("timm ViT"))
    with pytest.raises(InputError, match="image 0 has no file, and a sample of FiftyOne is a file"):
        vitreous.to_fiftyone(None, vitreous.explain(model, zoo.images("timm ViT"), "gae"))
    monkeypatch.setitem(sys.modules, "fiftyone", None)
    with pytest.raises(ModelError, match=r"this needs fiftyone: pip install 'vitreous\[fiftyone\]'"):
        vitreous.to_fiftyone(None, found)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_real_fiftyone_takes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIFTYONE_DO_NOT_TRACK", "1")
    fo = pytest.importorskip("fiftyone")
    found = explained(tmp_path)
    sample = fo.Sample(filepath=str(tmp_path / "image 0.png"))
    samples = [sample]
    vitreous.to_fiftyone(samples, found)
    assert sample["gae"].map.shape == (80, 160) and sample["gae"].range[0] == 0
    assert isinstance(sample["gae"], fo.Heatmap) and sample["gae_target"].label == "class 3"
    assert len(samples) == 2 and 0 <= sample["gae_gini"] <= 1
