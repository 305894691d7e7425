"""Files that strangers might upload: images, arrays, clips and forms, broken in every way."""

from __future__ import annotations

import io
import pickle
import random
import struct
import zipfile
import zlib
from functools import cache

import numpy as np
from PIL import Image

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
ENDINGS = (*(f".{kind.lower()}" for kind in FORMATS), ".npy", ".npz", ".zip", ".mp4", ".svg", ".exe", "", ".py")
PATHS = (  # that must reach no file and no server
    "../../../../etc/passwd",
    "/etc/passwd",
    "..\\..\\windows\\win.ini",
    "\\\\10.255.255.1\\share\\x.png",
    "C:\\secret.png",
    "file:///etc/passwd",
    "http://10.255.255.1/x.png",
    "https://localhost:1/x",
    "hf/google/vit-base-patch16-224",
    "%2e%2e%2fetc%2fpasswd",
    "....//....//etc/passwd",
    "/proc/self/environ",
    "/dev/zero",
    "~/.ssh/id_rsa",
    "$HOME",
    "|ls",
    "`id`",
    "x\0y",
    "x\r\nSet-Cookie: a=b",
    "con.png",
    "‮gpj.x",
    "a" * 300,
    "concept:/etc/passwd",
    "concept:CANARY",
    "like:CANARY",
    "1@CANARY",
    "latent:CANARY:3",
    "text:CANARY",
    "CANARY",
)


class Harmful:
    """Opens a file if someone unpickles it."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return open, ("/etc/hostname",)


@cache
def images() -> dict[str, bytes]:
    noise = np.random.default_rng(0).integers(0, 256, (24, 32, 3), dtype=np.uint8)
    return {kind: encoded(Image.fromarray(noise), kind) for kind in FORMATS} | {"ANIMATED": animated(noise)}


def encoded(image: Image.Image, kind: str) -> bytes:
    held = io.BytesIO()
    image.save(held, kind)
    return held.getvalue()


def animated(noise: np.ndarray) -> bytes:
    held = io.BytesIO()
    frames = [Image.fromarray(np.roll(noise, shift, 0)) for shift in range(3)]
    frames[0].save(held, "GIF", save_all=True, append_images=frames[1:])
    return held.getvalue()


def arrays(chance: random.Random) -> bytes:
    """An .npy or .npz file, honest or not."""
    kind = chance.randrange(8)
    if kind == 0:
        return saved(np.array([Harmful()], dtype=object))
    if kind == 1:
        return pickle.dumps(Harmful())
    if kind == 2:  # a header that promises more than there is
        shape = chance.choice(["(9000000000,)", "(60000, 60000, 3)", "(-1, 3)", "__import__('os').system('id')", "()"])
        head = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".ljust(117).encode() + b"\n"
        return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head
    if kind == 3:
        return zipped({"../../evil.npy": saved(np.zeros((4, 4, 3), np.uint8)), "/etc/x.npy": b""})
    if kind == 4:
        return zipped({"a.npz": zipped({"b.zip": zipped({"c.npy": saved(np.zeros(3))})})})
    if kind == 5:
        return zipped({"a.npy": saved(np.zeros(6_000_000, np.uint8)), "b.npy": saved(np.array([Harmful()], object))})
    if kind == 6:
        return saved(
            chance.choice([np.full((8, 8, 3), np.nan), np.zeros((0, 3)), np.array("x"), np.zeros((8, 8, 3), "M8[s]")])
        )
    return saved(np.random.default_rng(1).integers(0, 256, (16, 16, 3), dtype=np.uint8))


def saved(array: np.ndarray) -> bytes:
    held = io.BytesIO()
    np.save(held, array, allow_pickle=True)
    return held.getvalue()


def zipped(parts: dict[str, bytes]) -> bytes:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED) as opened:
        for name, part in parts.items():
            opened.writestr(name, part)
    return held.getvalue()


def huge(chance: random.Random) -> bytes:
    """An image that says it has billions of pixels, or a bomb of zeros."""
    wide, high = chance.choice([(60_000, 60_000), (2**31 - 1, 2**31 - 1), (100_000, 1), (0, 0), (7000, 7000)])
    head = struct.pack(">IIBBBBB", wide, high, 8, 2, 0, 0, 0)
    png = (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(10**6))) + chunk(b"IEND", b"")
    )
    gif = b"GIF89a" + struct.pack("<HH", min(wide, 65535), min(high, 65535)) + images()["GIF"][10:]
    bmp = images()["BMP"][:18] + struct.pack("<ii", min(wide, 2**31 - 1), -min(high, 2**31 - 1)) + images()["BMP"][26:]
    text = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 8, 8, 8, 2, 0, 0, 0))
    text += chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(10**7))) + chunk(
        b"iCCP", b"a\0\0" + zlib.compress(bytes(10**7))
    )
    return chance.choice([png, gif, bmp, text + images()["PNG"][33:]])


def chunk(kind: bytes, held: bytes) -> bytes:
    return struct.pack(">I", len(held)) + kind + held + struct.pack(">I", zlib.crc32(kind + held))


def mutated(chance: random.Random) -> tuple[str, bytes]:
    """A file's name and what it holds."""
    kind = chance.random()
    if kind < 0.2:
        held = arrays(chance)
    elif kind < 0.3:
        held = huge(chance)
    else:
        held = spoilt(chance.choice([*images().values()]), chance)
    ending = chance.choice(ENDINGS) if kind > 0.2 else chance.choice([".npy", ".npz"])
    return chance.choice(["x", "photo", chance.choice(PATHS)]) + ending, held


def spoilt(whole: bytes, chance: random.Random) -> bytes:
    """Bytes flipped, cut, doubled, or left as they are."""
    held = bytearray(whole)
    for _ in range(chance.choice([0, 1, 3, 20])):
        held[chance.randrange(min(len(held), chance.choice([60, len(held)])))] ^= 1 << chance.randrange(8)
    cut = chance.choice([len(held), len(held), chance.randrange(len(held))])
    return bytes(held[:cut]) * chance.choice([1, 1, 1, 2])


def broken_form(name: str, held: bytes, chance: random.Random) -> tuple[bytes, str]:
    """A multipart body and its content type, one of them wrong."""
    line = b"--edge\r\n"
    disposition = f'Content-Disposition: form-data; name="file"; filename="{name}"\r\n'.encode("utf-8", "replace")
    body = line + disposition + b"Content-Type: image/png\r\n\r\n" + held + b"\r\n--edge--\r\n"
    kind = chance.randrange(6)
    if kind == 0:
        return body[: chance.randrange(len(body))], "multipart/form-data; boundary=edge"
    if kind == 1:
        return body, chance.choice(
            ["multipart/form-data", "multipart/form-data; boundary=", "multipart/mixed; boundary=edge"]
        )
    if kind == 2:
        return body, "multipart/form-data; boundary=" + "x" * chance.choice([1, 70, 5000])
    if kind == 3:
        return body.replace(b"\r\n", b"\n"), "multipart/form-data; boundary=edge"
    if kind == 4:
        return line + b"a: b\r\n" * 200 + b"\r\n" + body, "multipart/form-data; boundary=edge; charset=no-such"
    return body * 3, "multipart/form-data; boundary=edge"
