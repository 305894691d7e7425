"""JPEG files that a GPU can decode as they are: whole, and one baseline scan of 8-bit YCbCr.

All others, damaged ones included, are left to Pillow, which decodes more and says what is wrong.
"""

from __future__ import annotations

import io
import re
import struct
import warnings
from dataclasses import dataclass
from functools import lru_cache

from PIL import Image

from vitreous.errors import InputError
from vitreous.images.bands import check_size

START, END = b"\xff\xd8", b"\xff\xd9"
QUANTA, HUFFMAN, FRAME, SCAN, INTERVAL, COMMENT = 0xDB, 0xC4, 0xC0, 0xDA, 0xDD, 0xFE  # markers of segments
APP0, APP1, APP2, ADOBE, APP15 = 0xE0, 0xE1, 0xE2, 0xEE, 0xEF
KNOWN = {QUANTA, HUFFMAN, FRAME, SCAN, INTERVAL, COMMENT, *range(APP0, APP15 + 1)}
NEXT_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7]")  # within a scan, 0xff is followed by zero or restarts it
COMPONENTS = (1, 2, 3)  # the numbers of Y, Cb and Cr
SAMPLING = (0x11, 0x21, 0x12, 0x22)  # of Y: 4:4:4, 4:2:2, 4:4:0 and 4:2:0
MOST_PIXELS = 1 << 22
TALLEST = 2  # times as high as wide; some versions of Pillow resize taller images in another order
ORIENTATION = 0x0112  # the tag in EXIF


@dataclass(frozen=True)
class Header:
    """Height and width as stored, and how EXIF says that the image is to be turned (1 to 8)."""

    size: tuple[int, int]
    orientation: int = 1

    @property
    def turned(self) -> bool:
        """Whether rows and columns are exchanged."""
        return self.orientation > 4

    @property
    def upright(self) -> tuple[int, int]:
        """Height and width after turning."""
        return self.size[::-1] if self.turned else self.size

    def steps(self) -> tuple[int, tuple[int, int, int]]:
        """Of pixels [3 Y X] as stored: where the upper left one is, upright, and how far the next of each axis."""
        high, wide = self.size
        mirrored, flipped = self.orientation in (2, 3, 7, 8), self.orientation in (3, 4, 6, 7)
        first = (high - 1) * wide * flipped + (wide - 1) * mirrored
        down, right = -wide if flipped else wide, -1 if mirrored else 1
        return first, (high * wide, right, down) if self.turned else (high * wide, down, right)


def read_header(held: bytes) -> Header | None:
    """The header of a file that a GPU can decode; None if it is left to Pillow."""
    try:
        return checked(held)
    except (struct.error, IndexError, InputError):
        return None


def checked(held: bytes) -> Header | None:
    size, used, at = None, frozenset[str](), 2
    tables: set[str] = set()
    tagged, code = False, 0
    while code != SCAN:
        mark, code, length = struct.unpack_from(">BBH", held, at)
        content = held[at + 4 : at + 2 + length]
        if mark != 0xFF or code not in KNOWN or len(content) != length - 2 or refused(code, content):
            return None
        if code in (QUANTA, HUFFMAN):
            tables |= defined(code, content)
        elif code == FRAME:
            size, used = frame(content) if size is None else (None, used)
        tagged |= code == APP1
        at += 2 + length
    if size is None or not used | scanned(content) <= tables or not (held.startswith(START) and ends(held, at)):
        return None
    found = Header(size, orientation(held)) if tagged else Header(size)
    return found if found.upright[0] <= TALLEST * found.upright[1] else None


def refused(code: int, content: bytes) -> bool:
    """Whether a segment says that the file is of another kind: colours are not YCbCr, or there is a second image."""
    if code == ADOBE and content.startswith(b"Adobe"):
        return content[11] != 1
    return code == APP2 and content.startswith(b"MPF")


def frame(content: bytes) -> tuple[tuple[int, int], frozenset[str]]:
    """The height and width that a frame header tells, and the tables that it uses."""
    depth, high, wide, count = struct.unpack_from(">BHHB", content)
    check_size(wide, high, "")
    numbers, sampling, quanta = content[6::3], content[7::3], content[8::3]
    if depth != 8 or count != 3 or len(content) != 15 or tuple(numbers) != COMPONENTS or high * wide > MOST_PIXELS:
        raise InputError("not 8-bit YCbCr, or too large")
    if sampling[0] not in SAMPLING or sampling[1:] != b"\x11\x11":
        raise InputError("colours are sampled in an unusual way")
    return (high, wide), frozenset(f"quanta {number}" for number in quanta)


def scanned(content: bytes) -> frozenset[str]:
    """The tables that a scan of all components uses."""
    if len(content) != 10 or (content[0], *content[1:7:2]) != (3, *COMPONENTS) or content[7:] != b"\x00\x3f\x00":
        raise InputError("not one baseline scan")
    return frozenset(
        f"{kind} {number}" for each in content[2:7:2] for kind, number in zip(("dc", "ac"), divmod(each, 16))
    )


@lru_cache(1024)
def defined(code: int, content: bytes) -> frozenset[str]:
    """The tables that a segment defines."""
    found, at = set(), 0
    while at < len(content):
        kind, number = divmod(content[at], 16)
        if code == QUANTA:
            good, name, length = kind == 0, f"quanta {number}", 65
        else:
            length = 17 + sum(content[at + 1 : at + 17])
            symbols = content[at + 17 : at + length]
            good = kind < 2 and is_code(content[at + 1 : at + 17]) and (kind == 1 or max(symbols, default=16) < 16)
            name = f"{('dc', 'ac')[kind % 2]} {number}"
        if not good or number > 3 or at + length > len(content):
            raise InputError("a damaged table")
        found.add(name)
        at += length
    return frozenset(found)


def is_code(counts: bytes) -> bool:
    """Whether so many codes of 1 to 16 bits are possible, none of them all ones."""
    taken = 0
    for length, count in enumerate(counts, 1):
        taken = 2 * taken + count
        if count and taken >= 1 << length:
            return False
    return True


def ends(held: bytes, at: int) -> bool:
    """Whether the scan that begins here ends the file: one that is truncated, damaged or longer is left to Pillow."""
    found = NEXT_MARKER.search(held, at)
    return found is not None and found.start() == len(held) - 2 and held.endswith(END)


def orientation(held: bytes) -> int:
    """What EXIF or XMP says, as Pillow reads it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with Image.open(io.BytesIO(held)) as image:
                found = image.getexif().get(ORIENTATION, 1)
        except Exception as error:  # Pillow says later what is wrong
            raise InputError(str(error)) from None
    return found if found in range(1, 9) else 1
