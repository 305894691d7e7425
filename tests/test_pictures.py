"""Every kind of picture that people have, and every way in which a file can be bad."""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vitreous.errors import InputError
from vitreous.images import pictures

RED, BLUE, WHITE = (255, 0, 0), (0, 0, 255), (255, 255, 255)


def photo(wide: int = 64, high: int = 48) -> Image.Image:
    """Smooth colours that no turn or flip leaves as they are."""
    y, x = np.mgrid[:high, :wide]
    return Image.fromarray(np.stack([x * 255 // wide, y * 255 // high, (x + y) % 256], -1).astype(np.uint8))


def saved(image: Image.Image, path: Path, **options: Any) -> Path:
    image.save(path, **options)
    return path


def pixels(path: Any) -> np.ndarray:
    picture = pictures.read(path)
    assert picture.image.mode == "RGB"
    return np.asarray(picture.image).astype(int)


def refusal(source: Any) -> str:
    """The one line that says why this is not used."""
    with pytest.raises(InputError) as caught:
        pictures.read(source)
    assert "\n" not in str(caught.value)
    if isinstance(source, Path):
        assert str(caught.value).startswith(f"{source}: "), "the file is named first"
    return str(caught.value)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_claiming(path: Path, wide: int, high: int) -> Path:
    """A small PNG whose header speaks of many pixels."""
    header = struct.pack(">IIBBBBB", wide, high, 8, 2, 0, 0, 0)
    data = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + data)
    return path


# ------------------------------------------------------------------------------------------------ bad files


def test_missing(tmp_path: Path) -> None:
    assert refusal(tmp_path / "gone.jpg").endswith("no such file")
    (tmp_path / "link.jpg").symlink_to(tmp_path / "gone.jpg")
    assert refusal(tmp_path / "link.jpg").endswith("no such file")
    assert "a" * 300 in refusal(tmp_path / ("a" * 300 + ".jpg"))


def test_empty(tmp_path: Path) -> None:
    (tmp_path / "empty.jpg").touch()
    assert refusal(tmp_path / "empty.jpg").endswith("the file is empty")


def test_folder_and_pipe_instead_of_a_file(tmp_path: Path) -> None:
    assert "is a folder" in refusal(tmp_path)
    os.mkfifo(tmp_path / "pipe.png")
    assert refusal(tmp_path / "pipe.png").endswith("is not a file"), "opening it would wait for ever"


def test_not_a_picture(tmp_path: Path) -> None:
    text = tmp_path / "text.jpg"
    text.write_text("not a picture at all")
    assert "not an image" in refusal(text)


@pytest.mark.parametrize("ending", ["jpg", "png", "gif", "tif", "webp", "bmp"])
def test_truncated(tmp_path: Path, ending: str) -> None:
    whole = saved(Image.effect_noise((64, 64), 80).convert("RGB"), tmp_path / f"whole.{ending}").read_bytes()
    half = tmp_path / f"half.{ending}"
    half.write_bytes(whole[: len(whole) // 2])
    assert "truncated or corrupt" in refusal(half) or "not an image" in refusal(half)


@pytest.mark.parametrize("ending", ["jpg", "png"])
def test_truncated_says_so(tmp_path: Path, ending: str) -> None:
    whole = saved(Image.effect_noise((64, 64), 80).convert("RGB"), tmp_path / f"whole.{ending}").read_bytes()
    half = tmp_path / f"half.{ending}"
    half.write_bytes(whole[: len(whole) // 2])
    assert "truncated" in refusal(half)


def test_corrupt_in_the_middle(tmp_path: Path) -> None:
    path = saved(photo(), tmp_path / "a.png")
    data = bytearray(path.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 40] = b"\xff" * 40
    path.write_bytes(data)
    assert "truncated or corrupt" in refusal(path)


@pytest.mark.slow
def test_no_corruption_ends_in_another_error(tmp_path: Path) -> None:
    """Bytes changed at random: a picture or an InputError, never anything else."""
    random, said = np.random.default_rng(0), []
    for ending, options in [("jpg", {"exif": turned(6)}), ("png", {}), ("gif", {}), ("tif", {}), ("webp", {})]:
        whole = np.frombuffer(saved(photo(), tmp_path / f"a.{ending}", **options).read_bytes(), np.uint8)
        bad = tmp_path / f"bad.{ending}"
        for _ in range(40):
            data = whole.copy()
            data[random.integers(0, min(400, len(data)), 12)] = random.integers(0, 256, 12)
            bad.write_bytes(data.tobytes())
            try:
                pictures.read(bad)
            except InputError as error:
                said.append(str(error))
    assert 50 < len(said) < 200
    assert not any("\n" in line for line in said)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_unreadable(tmp_path: Path) -> None:
    path = saved(photo(), tmp_path / "secret.png")
    path.chmod(0)
    assert "permission denied" in refusal(path)


def test_unreadable_as_the_system_says_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*args: Any, **options: Any) -> None:
        raise PermissionError(13, "Permission denied")

    path = saved(photo(), tmp_path / "secret.png")
    monkeypatch.setattr(Image, "open", denied)
    assert refusal(path).endswith("cannot be read (permission denied)")


# --------------------------------------------------------------------------------------------------- sizes


def test_decompression_bomb(tmp_path: Path) -> None:
    bomb = png_claiming(tmp_path / "bomb.png", 30000, 30000)
    assert bomb.stat().st_size < 1000
    assert "too large to open safely" in refusal(bomb)
    assert "shrink it first" in refusal(bomb)


def test_large_but_not_for_pillow(tmp_path: Path) -> None:
    """Pillow itself would only warn."""
    assert "12000×9000 is more than 100 megapixels" in refusal(png_claiming(tmp_path / "large.png", 12000, 9000))


@pytest.mark.parametrize("size", [(1, 1), (7, 200), (200, 7)])
def test_too_small(tmp_path: Path, size: tuple[int, int]) -> None:
    path = saved(Image.new("RGB", size), tmp_path / "small.png")
    assert f"{size[0]}×{size[1]} pixels are too few" in refusal(path)
    assert "too few" in refusal(Image.new("RGB", size))


def test_smallest_that_is_taken() -> None:
    assert pixels(Image.new("RGB", (8, 8), RED)).shape == (8, 8, 3)


def test_a_thread_of_a_picture_is_refused() -> None:
    """Its short side becomes 224 pixels, so its long side would become millions."""
    assert "more than 50 times as long" in refusal(Image.new("RGB", (8, 5000)))
    assert pixels(Image.new("RGB", (8, 400))).shape == (400, 8, 3)


# --------------------------------------------------------------------------------------------- kinds of files


@pytest.mark.parametrize("ending", ["png", "bmp", "tif", "ppm", "webp"])
def test_lossless_files_are_read_exactly(tmp_path: Path, ending: str) -> None:
    options = {"lossless": True} if ending == "webp" else {}
    path = saved(photo(), tmp_path / f"a.{ending}", **options)
    assert np.array_equal(pixels(path), np.asarray(photo()))
    assert pictures.read(path).name == f"a.{ending}"
    assert pictures.read(path).note is None
    assert np.array_equal(pixels(str(path)), pixels(path))


def test_animated_gif_gives_the_first_frame_and_a_note(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (32, 32), colour) for colour in (RED, BLUE, WHITE)]
    path = saved(frames[0], tmp_path / "film.gif", save_all=True, append_images=frames[1:])
    picture = pictures.read(path)
    assert (np.asarray(picture.image) == RED).all()
    assert picture.note == f"{path}: has 3 frames, the first is explained"


def test_sixteen_bit_grey_is_scaled(tmp_path: Path) -> None:
    ramp = np.linspace(0, 65535, 64).astype(np.uint16)[None].repeat(16, 0)
    for ending in ("png", "tif"):
        path = saved(Image.fromarray(ramp), tmp_path / f"deep.{ending}")
        assert np.abs(pixels(path)[0, :, 0] - ramp[0] / 257).max() <= 0.5
        assert np.array_equal(pixels(path)[..., 0], pixels(path)[..., 2])


def test_dark_sixteen_bit_grey_stays_dark(tmp_path: Path) -> None:
    path = saved(Image.fromarray(np.full((16, 16), 200, np.uint16)), tmp_path / "night.png")
    assert (pixels(path) == 1).all()


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 1, (0, 255)), (0, 255, (0, 255)), (0, 100, (0, 100)), (-3, 5, (0, 255)), (0, 1e6, (0, 255))],
)
def test_float_tiff(tmp_path: Path, low: float, high: float, expected: tuple[int, int]) -> None:
    ramp = np.linspace(low, high, 64, dtype=np.float32)[None].repeat(16, 0)
    path = saved(Image.fromarray(ramp), tmp_path / "float.tif")
    seen = pixels(path)[0, :, 0]
    assert (seen[0], seen[-1]) == expected
    assert (np.diff(seen) > 0).all(), "nothing is clipped"
    assert "32-bit" in str(pictures.read(path).note)


def test_float_tiff_with_holes(tmp_path: Path) -> None:
    values = np.full((16, 16), 0.5, np.float32)
    values[0, 0], values[0, 1] = np.nan, np.inf
    seen = pixels(saved(Image.fromarray(values), tmp_path / "holes.tif"))
    assert (seen[0, 0] == 0).all()
    assert (seen[1] == 128).all()
    constant = saved(Image.fromarray(np.full((16, 16), -4, np.float32)), tmp_path / "constant.tif")
    assert (pixels(constant) == 0).all()


def test_cmyk_jpeg(tmp_path: Path) -> None:
    path = saved(Image.new("RGB", (32, 32), (200, 60, 20)).convert("CMYK"), tmp_path / "print.jpg", quality=95)
    with Image.open(path) as raw:
        assert raw.mode == "CMYK"
    assert np.abs(pixels(path) - (200, 60, 20)).max() <= 6


def half_clear(mode: str) -> Image.Image:
    """Left half clear, right half opaque."""
    image = Image.new("RGBA", (32, 16), (*BLUE, 0))
    image.paste((*BLUE, 255), (16, 0, 32, 16))
    if mode == "P":
        image = Image.new("P", (32, 16), 0)
        image.putpalette([*RED, *BLUE])
        image.paste(1, (16, 0, 32, 16))
        image.info["transparency"] = 0
        return image
    return image.convert(mode)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_parts_are_white(tmp_path: Path, mode: str) -> None:
    path = saved(half_clear(mode), tmp_path / "clear.png")
    seen = pixels(path)
    assert (seen[:, :16] == 255).all()
    opaque = np.asarray(Image.new("RGB", (1, 1), BLUE).convert("L" if mode == "LA" else "RGB").convert("RGB"))[0, 0]
    assert (seen[:, 16:] == opaque).all()
    assert np.array_equal(pixels(half_clear(mode)), seen), "the same from memory"


def test_half_transparent_is_mixed_with_white() -> None:
    assert np.abs(pixels(Image.new("RGBA", (16, 16), (0, 0, 0, 128))) - 127).max() <= 1


def test_a_transparent_colour_is_white(tmp_path: Path) -> None:
    for mode, colour in [("RGB", RED), ("L", 9)]:
        path = saved(Image.new(mode, (16, 16), colour), tmp_path / "key.png", transparency=colour)
        assert (pixels(path) == 255).all()


@pytest.mark.parametrize(("mode", "value"), [("L", 77), ("1", 1), ("P", 0)])
def test_grey_and_palette(tmp_path: Path, mode: str, value: int) -> None:
    image = Image.new(mode, (16, 16), value)
    assert np.array_equal(pixels(saved(image, tmp_path / "grey.png")), np.asarray(image.convert("RGB")))


def turned(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif.tobytes()


STORED = {  # how a camera stores an upright picture that it marks with this orientation
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


@pytest.mark.parametrize("orientation", STORED)
def test_exif_orientation(tmp_path: Path, orientation: int) -> None:
    turn = STORED[orientation]
    stored = photo() if turn is None else photo().transpose(turn)
    path = saved(stored, tmp_path / "phone.png", exif=turned(orientation))
    assert np.array_equal(pixels(path), np.asarray(photo()))
    with Image.open(path) as opened:
        assert np.array_equal(pixels(opened), np.asarray(photo())), "also when the user has opened it"


def test_a_truncated_picture_opened_by_the_user(tmp_path: Path) -> None:
    path = saved(Image.effect_noise((64, 64), 80), tmp_path / "half.png")
    path.write_bytes(path.read_bytes()[:900])
    with Image.open(path) as opened:
        assert refusal(opened).startswith("half.png: ")


def test_the_users_picture_is_not_changed() -> None:
    given = half_clear("RGBA")
    before = given.tobytes()
    pictures.read(given)
    assert given.mode == "RGBA"
    assert given.tobytes() == before


# -------------------------------------------------------------------------------------------------- arrays


def test_arrays_of_every_accepted_shape() -> None:
    rgb = np.asarray(photo())
    grey = np.asarray(photo().convert("L"))
    alpha = np.concatenate([rgb, np.full((*grey.shape, 1), 255, np.uint8)], -1)
    three = np.repeat(grey[..., None], 3, -1)
    for array, expected in [
        (rgb, rgb),
        (rgb.transpose(2, 0, 1), rgb),
        (alpha, rgb),
        (grey, three),
        (grey[..., None], three),
        (torch.from_numpy(rgb.copy()), rgb),
        (torch.from_numpy(rgb.copy()).permute(2, 0, 1), rgb),
        (rgb[::-1], rgb[::-1]),
    ]:
        assert np.array_equal(pixels(array), expected)
    assert pictures.read(rgb, 4).name == "image 4"


@pytest.mark.parametrize("kind", ["float32", "float64", "int64", "uint16", "bool"])
def test_other_numbers_are_refused_with_the_remedy(kind: str) -> None:
    assert refusal(np.zeros((16, 16, 3), kind)) == (
        f"image 0: an array of {kind} is not an image; "
        "give uint8 0…255, or a float tensor [B,3,H,W] that is already preprocessed"
    )


@pytest.mark.parametrize("shape", [(16,), (16, 16, 2), (16, 16, 5), (2, 16, 16, 3), (5, 16, 16)])
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    assert f"shape {list(shape)} is not an image" in refusal(np.zeros(shape, np.uint8))


@pytest.mark.parametrize("thing", [None, 3, object(), b"bytes", {"a": 1}])
def test_other_things_are_refused(thing: Any) -> None:
    assert "is not an image" in refusal(thing)


def test_one_or_several() -> None:
    rgb, image = np.asarray(photo()), photo()
    for one in ("a.jpg", Path("a.jpg"), image, rgb, rgb.transpose(2, 0, 1), rgb[..., 0], pictures.read(image)):
        assert len(pictures.as_list(one)) == 1
    stack = np.stack([rgb, rgb])
    for two in (
        ["a.jpg", "b.jpg"],
        (image, rgb),
        stack,
        stack.transpose(0, 3, 1, 2),
        torch.from_numpy(stack),
        stack[..., 0],
    ):
        assert len(pictures.as_list(two)) == 2
    assert len(pictures.as_list(torch.from_numpy(rgb.copy()))) == 1
    assert len(pictures.as_list(Path(name) for name in ("a", "b", "c"))) == 3
    for nothing in (None, 3, b"abc", np.zeros(4, np.uint8)):
        with pytest.raises(InputError, match="is not an image"):
            pictures.as_list(nothing)


# ------------------------------------------------------------------------------------------------ finding them


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Pictures in two levels, with what lies beside pictures."""
    for name in ("b.JPG", "a.png", "süß ist's.webp", "deep/er/c.jpeg", "notes.txt", ".hidden.jpg", ".cache/d.jpg"):
        path = tmp_path / "album" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".txt":
            path.write_text("notes")
        else:
            photo().save(path)
    (tmp_path / "album" / "folder.jpg").mkdir()
    return tmp_path / "album"


def test_find_searches_a_folder_whole_and_sorted(folder: Path) -> None:
    found = [str(path.relative_to(folder)) for path in pictures.find(folder)]
    assert found == ["a.png", "b.JPG", "deep/er/c.jpeg", "süß ist's.webp"]
    assert pixels(folder / "süß ist's.webp").shape == (48, 64, 3)


def test_find_refuses_a_folder_without_pictures(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    with pytest.raises(InputError, match="no images in this folder") as caught:
        pictures.find(tmp_path)
    assert str(caught.value).startswith(str(tmp_path))


def test_find_globs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pictures.find(str(folder / "*.png")) == [folder / "a.png"]
    assert pictures.find(folder / "**" / "*.jpeg") == [folder / "deep" / "er" / "c.jpeg"]
    assert pictures.find(str(folder / "[ab].*")) == [folder / "a.png", folder / "b.JPG"]
    monkeypatch.chdir(folder)
    assert pictures.find("?.png", "deep/*/*") == [Path("a.png"), Path("deep/er/c.jpeg")]


@pytest.mark.parametrize("pattern", ["*.tiff", "nowhere/*.jpg", "a**b"])
def test_find_refuses_a_glob_that_matches_nothing(folder: Path, pattern: str) -> None:
    with pytest.raises(InputError, match="pattern") as caught:
        pictures.find(str(folder / pattern))
    assert str(caught.value).startswith(str(folder / pattern))


def test_find_takes_a_name_with_brackets_as_it_is(tmp_path: Path) -> None:
    odd = saved(photo(), tmp_path / "a [1].png")
    assert pictures.find(odd) == [odd]


def test_find_has_no_repeats(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    found = pictures.find("b.JPG", folder, "*.png", folder / "a.png", "./b.JPG")
    assert len(found) == 4
    assert found[0] == Path("b.JPG"), "as the user wrote it first"


def test_find_keeps_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert pictures.find(tmp_path / "gone.jpg") == [tmp_path / "gone.jpg"], "opening it says so"
