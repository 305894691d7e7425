"""The mark in files: written into every kind of file, read back, recognised cheaply, never seen in a photo."""

import json

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from vitreous._support import marks
from vitreous.errors import InputError

TOLD = {"identity": "abc", "maps": {"gae@(1) é \\ (": {"method": "gae", "label": "a)\nb"}}}
LONG = {**TOLD, "more": "y" * 5000}
RASTER = ("png", "gif", "jpg", "webp")
PHOTO = Image.effect_noise((120, 90), 50).convert("RGB")


@pytest.mark.parametrize("told", [TOLD, LONG, None], ids=["short", "long", "bare"])
@pytest.mark.parametrize("kind", RASTER)
def test_an_image_file_carries_its_mark(kind, told, tmp_path):
    file = tmp_path / f"a.{kind}"
    PHOTO.save(file, **marks.pixels(kind, told))
    assert marks.is_ours(file)
    assert marks.read_mark(file) == {"vitreous": 2, **(told or {})}


@pytest.mark.parametrize("kind", RASTER)
def test_a_photo_has_no_mark(kind, tmp_path):
    file = tmp_path / f"a.{kind}"
    PHOTO.save(file)
    assert not marks.is_ours(file) and marks.read_mark(file) is None


def test_a_mark_that_a_jpeg_has_no_room_for_keeps_what_identifies_it(tmp_path):
    PHOTO.save(tmp_path / "a.jpg", **marks.pixels("jpg", {"identity": "abc", "more": "y" * 100_000}))
    assert marks.read_mark(tmp_path / "a.jpg") == {"vitreous": 2, "identity": "abc"}


def test_a_film_carries_its_mark(tmp_path):
    first, *rest = [PHOTO.quantize(256)] * 3
    file = tmp_path / "a.gif"
    first.save(file, save_all=True, append_images=rest, duration=[1, 2, 3], loop=0, **marks.pixels("gif", TOLD))
    assert marks.is_ours(file) and marks.read_mark(file) == {"vitreous": 2, **TOLD}


@pytest.mark.parametrize("kind", ["svg", "pdf"])
def test_a_drawing_carries_its_mark(kind, tmp_path):
    Figure().savefig(tmp_path / f"a.{kind}", metadata=marks.vectors(kind, TOLD))
    assert marks.read_mark(tmp_path / f"a.{kind}") == {"vitreous": 2, **TOLD}
    Figure().savefig(tmp_path / f"b.{kind}")
    assert marks.read_mark(tmp_path / f"b.{kind}") is None


def test_arrays_are_recognised_by_their_provenance(tmp_path):
    np.savez(tmp_path / "ours.npz", map=np.zeros(3), provenance=json.dumps({"vitreous": 2, **TOLD}))
    np.savez(tmp_path / "theirs.npz", image=np.zeros(3))
    assert marks.is_ours(tmp_path / "ours.npz") and not marks.is_ours(tmp_path / "theirs.npz")
    assert marks.read_mark(tmp_path / "ours.npz") == {"vitreous": 2, **TOLD}
    assert marks.read_mark(tmp_path / "theirs.npz") is None


def test_marks_of_version_0_1_are_read(tmp_path):
    one = {"method": "gae", "vitreous": "0.1.0"}
    np.savez(tmp_path / "one.npz", map=np.zeros(3), provenance=json.dumps(one))
    np.savez(tmp_path / "two.npz", gae=np.zeros(3), provenance=json.dumps({"gae": one}))
    assert marks.read_mark(tmp_path / "one.npz") == {"vitreous": 1, "maps": {"map": one}}
    assert marks.read_mark(tmp_path / "two.npz") == {"vitreous": 1, "maps": {"gae": one}}


def test_a_newer_format_is_refused_with_the_remedy(tmp_path):
    np.savez(tmp_path / "a.npz", provenance=json.dumps({"vitreous": 3}))
    with pytest.raises(InputError, match=r"newer version of vitreous \(format 3\); update"):
        marks.read_mark(tmp_path / "a.npz")


@pytest.mark.parametrize(
    "content", [b"", b"\x89PNG\r\n\x1a\nrubbish", b"GIF89a", b"RIFF....WEBP", b"PK\3\4", b"\xff\xd8\xff"]
)
@pytest.mark.parametrize("ending", ["png", "gif", "webp", "npz", "jpg"])
def test_a_broken_file_is_not_ours(content, ending, tmp_path):
    file = tmp_path / f"a.{ending}"
    file.write_bytes(content)
    assert not marks.is_ours(file)
    with pytest.raises(InputError, match="cannot be read"):
        marks.read_mark(file)


def test_what_is_no_file_is_not_ours(tmp_path):
    assert not marks.is_ours(tmp_path) and not marks.is_ours(tmp_path / "none.png")
    with pytest.raises(InputError, match="no such file"):
        marks.read_mark(tmp_path / "none.png")


def test_identities_are_equal_for_equal_content():
    assert marks.identity_of({"a": 1, "b": [1, 2]}) == marks.identity_of({"b": [1, 2], "a": 1})
    assert marks.identity_of({"a": 1}) != marks.identity_of({"a": 2})
