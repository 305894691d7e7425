"""Uploaded images: file size, format and pixel count are checked before decoding, and no file is written."""

from __future__ import annotations

import hashlib
import io
import re
import warnings
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from PIL import Image
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request

from vitreous.errors import InputError, one_line
from vitreous.images import pictures
from vitreous.images.bands import ARRAYS, Bands, check_size
from vitreous.images.pictures import Picture
from vitreous.web.ids import stamped
from vitreous.web.limits import FORMATS, Limits
from vitreous.web.problems import Problem


@dataclass(frozen=True)
class Part:
    """A file of a form."""

    name: str
    held: bytes


@dataclass(frozen=True)
class Form:
    files: list[Part]
    fields: dict[str, str]


async def read_form(request: Request, most_bytes: int, files: int, fields: int) -> Form:
    """Read a multipart form, held in memory only."""
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise Problem(415, "send the image as multipart/form-data")
    try:
        body = await request.body()  # the guard counts while it arrives
    except ClientDisconnect:
        raise Problem(400, "the body ended too early") from None

    async def stream() -> AsyncGenerator[bytes, None]:
        yield body

    parser = MultiPartParser(request.headers, stream(), max_files=files, max_fields=fields, max_part_size=2000)
    parser.spool_max_size = most_bytes + 1  # nothing goes to disk
    try:
        form = await parser.parse()
        found = [value for _, value in form.multi_items() if isinstance(value, UploadFile)]
        parts = [Part(clean(one.filename or ""), await one.read()) for one in found]
    except (MultiPartException, ValueError, KeyError, AssertionError, LookupError) as error:
        raise Problem(400, f"the form cannot be read ({one_line(error, 100)})") from None
    finally:
        for opened in parser._files_to_close_on_error:  # all files, also one whose part has no end
            opened.close()
    texts = {key: value for key, value in form.multi_items() if isinstance(value, str)}
    return Form(parts, texts)


def clean(name: str) -> str:
    """A file name without folders and odd characters, for display only."""
    last = re.split(r"[\\/]", name)[-1]
    kept = "".join(c for c in last if c.isprintable())
    return kept[:100].strip() or "picture"


def open_picture(part: Part, limits: Limits, channels: int = 3) -> Picture:
    """Decode an image to upright RGB or so many channels, after checking format and size in its header."""
    if not part.held:
        raise Problem(415, f"{part.name}: the file is empty")
    if Path(part.name).suffix.lower() in ARRAYS:
        return open_array(part, limits, channels)
    with warnings.catch_warnings(), decoding(part.name, "an image", FORMATS):
        warnings.simplefilter("ignore")
        with Image.open(io.BytesIO(part.held), formats=FORMATS) as image:
            wide, high = image.size
            if wide * high > limits.pixels:
                most = limits.pixels // 10**6
                raise Problem(413, f"{part.name}: {wide}×{high} is more than {most} megapixels; shrink it first")
            check_size(wide, high, part.name)
            if channels != 3:
                held = io.BytesIO(part.held)
                return Picture(*pictures.decode_bands(image, held, Path(part.name), part.name, channels))
            note = pictures.remark(image, Path(part.name))
            return Picture(pictures.upright(image, part.name), part.name, note)


@contextmanager
def decoding(name: str, what: str, kinds: Sequence[str]) -> Iterator[None]:
    """Turn the errors of a decoder, which raises all sorts, into problems with one sentence for the visitor."""
    try:
        yield
    except Problem:
        raise
    except InputError as error:
        raise Problem(415, one_line(error)) from None
    except Image.DecompressionBombError:
        raise Problem(413, f"{name}: is too large to open safely; shrink it first") from None
    except Exception as error:
        raise Problem(415, f"{name}: is not {what} this server reads ({', '.join(kinds)})") from error


def open_array(part: Part, limits: Limits, channels: int) -> Picture:
    """Decode an .npy or .npz file, never as code."""
    held, ending = io.BytesIO(part.held), Path(part.name).suffix.lower()
    try:
        return Picture(pictures.decode_array(held, ending, part.name, channels, limits.pixels // channels), part.name)
    except InputError as error:
        raise Problem(415, one_line(error)) from None


def identity(held: bytes) -> str:
    return stamped(hashlib.sha256(held).hexdigest()[:32])


def weight(picture: Picture) -> int:
    """Bytes that a decoded image takes."""
    held = picture.image
    return held.array.nbytes if isinstance(held, Bands) else 3 * held.width * held.height


def gone() -> Problem:
    return Problem(404, "this image is not here (any more); send it again")
