"""Image files of every kind, small and made from the packaged photos, and ways to damage them; a seed decides all."""

from __future__ import annotations

import io
import random
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

import vitreous

PHOTOS = Path(vitreous.__file__).parent / "assets" / "photos"
SIZE = (48, 40)
HUGE = (0x7FFFFFFF, 0xFFFFFFFF, 0x80000000, 0x00FFFFFF, 0xFFFFFFF0, 0)
MANY = 8 * 10**6  # bytes that a bomb unpacks to
PNG = b"\x89PNG\r\n\x1a\n"


class Damaged(NamedTuple):
    """A file and what was done to it."""

    name: str
    held: bytes
    what: str


# --------------------------------------------------------------------------------------------------------- whole files


@cache
def whole_files() -> dict[str, bytes]:
    """One small file of each kind, by name."""
    names = ("cat.jpg", "coffee.jpg", "rocket.jpg")
    photo, *more = (Image.open(PHOTOS / name).convert("RGB").resize(SIZE) for name in names)
    made = jpegs(photo) | pngs(photo, more) | tiffs(photo) | arrays(photo)
    made["bmp.bmp"], made["palette.bmp"] = saved(photo, "BMP"), saved(photo.convert("P"), "BMP")
    made["ppm.ppm"], made["grey.ppm"] = saved(photo, "PPM"), saved(photo.convert("L"), "PPM")
    made["plain.ppm"] = b"P3\n9 8\n255\n" + b" ".join(b"%d" % (i % 256) for i in range(9 * 8 * 3)) + b"\n"
    made["gif.gif"] = saved(photo.convert("P"), "GIF")
    made["frames.gif"] = saved(photo, "GIF", save_all=True, append_images=more)
    made["webp.webp"], made["lossless.webp"] = saved(photo, "WEBP"), saved(photo, "WEBP", lossless=True)
    made["frames.webp"] = saved(photo, "WEBP", save_all=True, append_images=more)
    return made


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def jpegs(photo: Image.Image) -> dict[str, bytes]:
    exif = Image.Exif()
    exif[0x0112], exif[0x010F] = 6, "a camera"
    return {
        "baseline.jpg": saved(photo, "JPEG"),
        "progressive.jpg": saved(photo, "JPEG", progressive=True),
        "cmyk.jpg": saved(photo.convert("CMYK"), "JPEG"),
        "exif.jpg": saved(photo, "JPEG", exif=exif),
        "mask.jpg": saved(photo.convert("L").point(lambda v: 255 * (v > 99)), "JPEG"),
    }


def pngs(photo: Image.Image, more: list[Image.Image]) -> dict[str, bytes]:
    grey = photo.convert("L")
    deep = Image.fromarray(np.asarray(grey).astype(np.uint16) * 257)
    return {
        "rgb.png": saved(photo, "PNG"),
        "palette.png": saved(photo.convert("P"), "PNG", transparency=3),
        "alpha.png": saved(photo.convert("RGBA"), "PNG"),
        "deep.png": saved(deep, "PNG"),
        "interlaced.png": interlaced(np.asarray(photo)),
        "frames.png": saved(photo, "PNG", save_all=True, append_images=more),
        "mask.png": saved(grey.point(lambda v: 255 * (v > 99)), "PNG"),
        "bilevel.png": saved(grey.convert("1"), "PNG"),
    }


def chunk(kind: bytes, held: bytes) -> bytes:
    return struct.pack(">I", len(held)) + kind + held + struct.pack(">I", zlib.crc32(kind + held))


def png(wide: int, high: int, *chunks: bytes, interlace: int = 0) -> bytes:
    """A PNG file of 8-bit RGB with these chunks."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", wide, high, 8, 2, 0, 0, interlace))
    return PNG + head + b"".join(chunks) + chunk(b"IEND", b"")


def interlaced(array: np.ndarray) -> bytes:
    """Adam7, which Pillow reads and does not write."""
    passes = ((0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1))
    rows = b"".join(b"\0" + row.tobytes() for y, x, down, right in passes for row in array[y::down, x::right])
    return png(array.shape[1], array.shape[0], chunk(b"IDAT", zlib.compress(rows)), interlace=1)


def tiffs(photo: Image.Image) -> dict[str, bytes]:
    array = np.asarray(photo)
    made = {"plain.tif": saved(photo, "TIFF"), "lzw.tiff": saved(photo, "TIFF", compression="tiff_lzw")}
    made["deflate.tif"] = saved(photo, "TIFF", compression="tiff_adobe_deflate")
    made["float.tif"] = saved(Image.fromarray(array[:, :, 0].astype(np.float32) / 255), "TIFF")
    made["deep.tif"] = saved(Image.fromarray(array[:, :, 0].astype(np.uint16) * 257), "TIFF")
    try:
        import tifffile
    except ImportError:
        return made
    four = np.concatenate([array, array[:, :, :1]], 2).astype(np.uint16) * 257
    for name, held, options in (
        ("bands.tif", four, {"planarconfig": "contig"}),
        ("planes.tif", four.transpose(2, 0, 1), {"planarconfig": "separate"}),
        ("floats.tif", (array / 255).astype(np.float32), {}),
        ("tiled.tif", four, {"tile": (16, 16), "planarconfig": "contig"}),
        ("packed.tif", four, {"compression": "zlib", "planarconfig": "contig"}),
    ):
        buffer = io.BytesIO()
        tifffile.imwrite(buffer, held, photometric="rgb" if held.shape[-1] == 3 else "minisblack", **options)
        made[name] = buffer.getvalue()
    return made


def arrays(photo: Image.Image) -> dict[str, bytes]:
    array = np.asarray(photo)
    four = np.concatenate([array, array[:, :, :1]], 2)
    made = {"rgb.npy": npy(array), "deep.npy": npy(four.astype(np.uint16) * 257), "mask.npy": npy(array[:, :, 0] > 99)}
    made["floats.npy"] = npy((four / 255).astype(np.float32))
    made["grey.npy"] = npy(np.asfortranarray(array[:, :, 0]))
    for name, save in (("rgb.npz", np.savez), ("packed.npz", np.savez_compressed)):
        buffer = io.BytesIO()
        save(buffer, image=array if name == "rgb.npz" else four, other=np.arange(3))  # type: ignore[operator]
        made[name] = buffer.getvalue()
    return made


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


# -------------------------------------------------------------------------------------------------------------- damage


def flip(chance: random.Random, held: bytes) -> bytes:
    """Some bytes are others."""
    made = bytearray(held)
    for _ in range(chance.randint(1, 20)):
        made[chance.randrange(len(made))] = chance.randrange(256)
    return bytes(made)


def flip_head(chance: random.Random, held: bytes) -> bytes:
    """The same among the first bytes, where sizes and offsets are."""
    return flip(chance, held[:120]) + held[120:]


def flip_bit(chance: random.Random, held: bytes) -> bytes:
    place = chance.randrange(len(held))
    return held[:place] + bytes([held[place] ^ 1 << chance.randrange(8)]) + held[place + 1 :]


def truncate(chance: random.Random, held: bytes) -> bytes:
    return held[: chance.randrange(len(held))]


def double(chance: random.Random, held: bytes) -> bytes:
    """A part comes twice."""
    start, end = sorted(chance.randrange(len(held) + 1) for _ in range(2))
    return held[:end] + held[start:]


def leave_out(chance: random.Random, held: bytes) -> bytes:
    start = chance.randrange(len(held))
    return held[:start] + held[start + chance.randint(1, 40) :]


def grow(chance: random.Random, held: bytes) -> bytes:
    """A number of two or four bytes, such as a length, is enormous."""
    place = chance.randrange(max(1, min(len(held), chance.choice((64, 400, len(held)))) - 4))
    said = struct.pack(chance.choice(("<I", ">I")), chance.choice(HUGE))[: chance.choice((2, 4))]
    return held[:place] + said + held[place + len(said) :]


def swap(chance: random.Random, held: bytes) -> bytes:
    """Its halves change places; sometimes the first bytes, which tell its kind, stay."""
    kept, middle = chance.choice((0, 64)), len(held) // 2
    return held[:kept] + held[middle:] + held[kept:middle]


def blank(chance: random.Random, held: bytes) -> bytes:
    """A run of zeros, as after a power cut."""
    start, end = sorted(chance.randrange(len(held) + 1) for _ in range(2))
    return held[:start] + bytes(end - start) + held[end:]


def add_tail(chance: random.Random, held: bytes) -> bytes:
    """Random bytes at the end, or in the place of the end."""
    kept = chance.choice((len(held), chance.randrange(len(held))))
    return held[:kept] + chance.randbytes(chance.randint(1, 400))


WAYS: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    *(flip, flip_head, flip_bit, truncate, double, leave_out, grow, grow, swap, blank, add_tail),
)


def damaged_files(count: int, seed: int = 0) -> Iterator[Damaged]:
    """So many files, the bombs among them; some are damaged twice, some have another kind's ending."""
    chance, whole, made = random.Random(seed), whole_files(), bombs()[:count]
    yield from made
    names = sorted(whole)
    for number in range(count - len(made)):
        kind = names[number % len(names)]
        held, told = whole[kind], []
        for way in chance.sample(WAYS, chance.choice((1, 1, 1, 2))):
            held = way(chance, held) if held else held
            told.append(way.__name__)
        if chance.random() < 0.05:
            kind = Path(kind).stem + Path(chance.choice(names)).suffix
        yield Damaged(f"{number:04}-{kind}", held, " ".join(told))


# --------------------------------------------------------------------------------------------------------------- bombs


@cache
def bombs() -> list[Damaged]:
    """Small files that promise, or unpack to, far more than they are."""
    return [*image_bombs(), *array_bombs(), *tiff_bombs()]


def image_bombs() -> Iterator[Damaged]:
    zeros = zlib.compress(bytes(MANY), 9)
    text = chunk(b"iTXt", b"Comment\0\x01\0\0\0" + zeros)
    pixels = chunk(b"IDAT", zlib.compress(bytes((SIZE[0] * 3 + 1) * SIZE[1])))
    yield Damaged("text.png", png(*SIZE, text, pixels), "8 MB of text")
    yield Damaged("ztxt.png", png(*SIZE, chunk(b"zTXt", b"Comment\0\0" + zeros), pixels), "8 MB of text")
    yield Damaged("profile.png", png(*SIZE, chunk(b"iCCP", b"p\0\0" + zeros), pixels), "8 MB of colour profile")
    yield Damaged("more.png", png(*SIZE, chunk(b"IDAT", zeros)), "more pixels than its size")
    yield Damaged("wide.png", png(60000, 60000, pixels), "3,600 megapixels")
    yield Damaged("less.png", png(9990, 9990, pixels), "fewer pixels than its size")
    yield Damaged("none.png", png(2**31 - 1, 1, pixels), "an endless row")
    yield Damaged("wide.gif", b"GIF89a" + struct.pack("<HHBBB", 65535, 65535, 0, 0, 0) + b";", "an empty GIF")
    yield Damaged("wide.ppm", b"P6 99999 99999 255\n" + bytes(99), "an empty PPM")
    yield Damaged("none.ppm", b"P6 40 40 0\n" + bytes(4800), "no brightest value")
    yield Damaged("digits.ppm", b"P6 " + b"9" * 10**6 + b" 9 255\n", "a width of a million digits")
    head = struct.pack("<IiiHHIIiiII", 40, 65535, -65535, 1, 24, 0, 0, 0, 0, 0, 0)
    yield Damaged("wide.bmp", b"BM" + struct.pack("<IHHI", 54, 0, 0, 54) + head, "an empty BMP")


def header(shape: object, kind: str = "|u1", version: int = 1) -> bytes:
    said = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack("<H" if version == 1 else "<I", len(said)) + said


def array_bombs() -> Iterator[Damaged]:
    for i, shape in enumerate(((10**9, 10**9), (2**40, 2**40, 3), (-1, 40, 3), (9000, 9000, 4), (2**63, 1, 3))):
        yield Damaged(f"wide{i}.npy", header(shape) + bytes(99), f"an array of {shape}")
        yield Damaged(f"wide{i}.npz", zipped({"image.npy": header(shape, "<f8") + bytes(99)}), f"an array of {shape}")
    nested = "(" * 3000 + "1" + ")" * 3000
    yield Damaged("deep.npy", header(nested) + bytes(99), "a header nested 3,000 times")
    yield Damaged("long.npy", b"\x93NUMPY\x02\0\xff\xff\xff\xff" + bytes(99), "a header of 4 GiB")
    yield Damaged("code.npy", npy_of_objects(), "a pickle")
    yield Damaged("bomb.npz", zipped({"image.npy": header((48, 40, 3)) + bytes(MANY)}), "8 MB for 6 kB")
    yield Damaged("many.npz", zipped({f"{i}.npy": b"" for i in range(2000)}), "2,000 arrays")
    lie = bytearray(zipped({"image.npy": header((48, 40, 3)) + bytes(5760)}))
    place = lie.rindex(b"PK\x01\x02")
    lie[place + 20 : place + 28] = b"\xfe\xff\xff\xff" * 2  # its sizes in the directory
    yield Damaged("lie.npz", bytes(lie), "a directory that promises 4 GiB")
    lie[place + 8] |= 1
    yield Damaged("secret.npz", bytes(lie), "an encrypted array")


def npy_of_objects() -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.array([[object]], dtype=object), allow_pickle=True)
    return buffer.getvalue()


def zipped(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, held in files.items():
            archive.writestr(name, held)
    return buffer.getvalue()


def tiff(**tags: int) -> bytes:
    """A TIFF file of 8-bit samples with these tags, and a few bytes of image."""
    known = {"width": 256, "height": 257, "bits": 258, "compression": 259, "photometric": 262, "offset": 273}
    known |= {
        "samples": 277,
        "rows": 278,
        "size": 279,
        "tile_width": 322,
        "tile_height": 323,
        "tiles": 324,
        "sizes": 325,
    }
    given = {"width": 48, "height": 40, "bits": 8, "compression": 1, "photometric": 1, "samples": 1, **tags}
    given.pop("next", None)
    entries = b"".join(
        struct.pack("<HHII", known[name], 4, 1, given[name]) for name in sorted(given, key=lambda name: known[name])
    )
    return b"II*\0" + struct.pack("<IH", 8, len(given)) + entries + struct.pack("<I", tags.get("next", 0)) + bytes(2000)


def tiff_bombs() -> Iterator[Damaged]:
    strip, tile = {"offset": 150, "rows": 40, "size": 1920}, {"tiles": 150, "sizes": 1920}
    wide = 2**31 - 16
    yield Damaged("circle.tif", tiff(**strip, next=8), "a directory that follows itself")
    yield Damaged("wide.tif", tiff(**strip | {"width": 10**6, "height": 10**6}), "a million by a million")
    yield Damaged("tile.tif", tiff(**tile, tile_width=wide, tile_height=wide), "a tile of 2³¹ by 2³¹")
    yield Damaged("tile4.tif", tiff(**tile, samples=4, tile_width=2**16, tile_height=2**16), "a tile of 16 GB")
    yield Damaged("samples.tif", tiff(**strip, samples=65535), "65,535 channels")
    yield Damaged(
        "some.tif", tiff(**strip | {"width": 9000, "height": 9000}, samples=40), "40 channels that are not there"
    )
    yield Damaged("rows.tif", tiff(**strip | {"rows": 2**31}), "a strip of 2³¹ rows")
    yield Damaged("far.tif", tiff(**strip | {"offset": 2**32 - 2, "size": 2**32 - 2}), "a strip far behind the end")
    yield Damaged("deep.tif", tiff(**strip, bits=64), "numbers of 64 bits")
    yield Damaged(
        "sparse.tif", tiff(width=9990, height=9990, offset=0, rows=9990, size=0, samples=40), "no pixels at all"
    )
    whole, packed = tiffs(Image.new("RGB", SIZE)).get("packed.tif", b""), zlib.compress(bytes(MANY))
    if whole:  # one strip, whose length is at byte 126 and which begins at byte 288
        said = whole[:126] + struct.pack("<I", len(packed)) + whole[130:288] + packed
        yield Damaged("packed.tif", said, "a strip of 8 kB that unpacks to 8 MB")
