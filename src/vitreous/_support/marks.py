"""The mark in every file that vitreous writes: what made it, as JSON, so that a result is never taken for an image.

PNG: a text chunk · GIF: a comment · JPEG, WebP: the EXIF description · SVG, PDF: their description or subject
.npz: the member "provenance" · .json: the key "vitreous"
"""

from __future__ import annotations

import hashlib
import html
import io
import json
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from vitreous.errors import InputError, one_line

KEY = "vitreous"
MEMBER = "provenance"  # of an .npz file
FORMAT = 2  # of the mark; files of version 0.1 have no number
DESCRIPTION = 0x010E  # of EXIF
MOST_EXIF = 60_000  # bytes: a JPEG file has room for 64 KiB
HEAD = 2048  # bytes from the start of a file in which its mark begins
PNG, GIF, JPEG, RIFF = b"\x89PNG", b"GIF8", b"\xff\xd8\xff", b"RIFF"
CHUNKS = tuple(kind + KEY.encode() + b"\0" for kind in (b"iTXt", b"tEXt", b"zTXt"))
OPENING = f'{{"{KEY}":'.encode()  # of the JSON in comments and descriptions
LEFT_OUT = ("notes", "labels", "probabilities", "spec", "said", "start", "final", "border_ratio")
Told = Mapping[str, Any]


def marked(told: Told | None = None) -> dict[str, Any]:
    """The mark: the format of the file, and what is told of its content."""
    return {KEY: FORMAT, **{key: value for key, value in (told or {}).items() if key != KEY}}


def identity_of(told: Any) -> str:
    """A short hash of what made a result: equal for equal results, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()[:16]


def identity_of_result(provenance: Told) -> str:
    """A short hash of what a result follows from: not of where files lie, nor of what was found."""
    told = {key: value for key, value in provenance.items() if key not in LEFT_OUT}
    told["sources"] = [{k: v for k, v in one.items() if k != "path"} for one in provenance.get("sources", ())]
    told["weights"] = (provenance.get("weights") or {}).get("digest")
    return identity_of(told)


# ------------------------------------------------------------------------------------------------------------ writing


def pixels(kind: str, told: Told | None = None) -> dict[str, Any]:
    """The arguments with which Pillow's `save` puts the mark into a file of this kind: png, gif, jpg, jpeg or webp."""
    text = json.dumps(marked(told))
    if kind == "png":
        chunks = PngInfo()
        chunks.add_itxt(KEY, text, zip=len(text) > HEAD)
        return {"pnginfo": chunks}
    if kind == "gif":
        return {"comment": text.encode()}
    if kind in ("jpg", "jpeg") and len(text) > MOST_EXIF:  # no room for more than what identifies it
        text = json.dumps(marked({key: (told or {})[key] for key in ("identity",) if key in (told or {})}))
    exif = Image.Exif()
    exif[DESCRIPTION] = text
    return {"exif": exif.tobytes()}


def vectors(kind: str, told: Told | None = None) -> dict[str, Any]:
    """The metadata with which matplotlib's `savefig` puts the mark into a file of this kind: svg or pdf."""
    return {"Description" if kind == "svg" else "Subject": json.dumps(marked(told))}


# ------------------------------------------------------------------------------------------------------------ reading


def is_ours(path: Path) -> bool:
    """Whether vitreous wrote this image or .npz file; cheap, as nothing is decoded. False if it cannot be read."""
    try:
        with open(path, "rb", buffering=0) as file:
            start = file.read(HEAD)
            if start.startswith(PNG):
                return any(chunk in start for chunk in CHUNKS)
            if start.startswith((GIF, JPEG)):
                return OPENING in start
            if start.startswith(RIFF):
                return OPENING in (start if len(start) < HEAD else b"".join(riff_tail(file)))
            if start.startswith(b"PK") and path.suffix.lower() == ".npz":
                with zipfile.ZipFile(file) as archive:
                    return f"{MEMBER}.npy" in archive.namelist()
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        pass
    return False


def riff_tail(file: io.FileIO) -> list[bytes]:
    """The starts of the EXIF chunks of a WebP file, which follow its pixels."""
    found, place = [], 12
    for _ in range(16):  # chunks; a longer list is none of ours
        file.seek(place)
        head = file.read(8)
        if len(head) < 8:
            break
        if head[:4] == b"EXIF":
            found.append(file.read(HEAD))
        length = int.from_bytes(head[4:], "little")
        place += 8 + length + length % 2
    return found


def read_mark(path: str | Path) -> dict[str, Any] | None:
    """What a file says of what made it; None if vitreous did not write it, or wrote it before there were marks."""
    path = Path(path)
    try:
        text = READERS[path.suffix.lower()](path) if path.suffix.lower() in READERS else None
        mark = None if text is None else json.loads(text)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except Exception as error:  # of Pillow, numpy, zipfile: anything may be wrong with a file
        raise InputError(f"{path}: cannot be read ({one_line(error, 80)})") from None
    if not isinstance(mark, dict):
        return None
    return upgraded(mark, path)


def upgraded(mark: dict[str, Any], path: Path) -> dict[str, Any] | None:
    """A mark in the present format; the provenance of version 0.1 has no number, and stood alone or by map."""
    form = mark.get(KEY)
    if isinstance(form, int):
        if form > FORMAT:
            raise InputError(
                f"{path}: was written by a newer version of vitreous (format {form}); update: pip install -U vitreous"
            )
        return mark
    if "method" in mark:
        return {KEY: 1, "maps": {"map": mark}}
    by_map = {key: told for key, told in mark.items() if isinstance(told, dict) and "method" in told}
    if by_map:
        return {KEY: 1, "maps": by_map}
    return {KEY: 1, **mark} if KEY in mark else None


def read_raster(path: Path) -> str | None:
    with Image.open(path) as image:
        if image.format == "PNG":
            return image.info.get(KEY)
        if image.format == "GIF":
            told = image.info.get("comment")
            return told.decode(errors="replace") if isinstance(told, bytes) and told.startswith(OPENING) else None
        told = image.getexif().get(DESCRIPTION)
        return told if isinstance(told, str) and told.startswith(OPENING.decode()) else None


def read_npz(path: Path) -> str | None:
    with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
        return str(stored[MEMBER]) if MEMBER in stored else None


def read_svg(path: Path) -> str | None:
    found = re.search(r"<dc:description>(.*?)</dc:description>", path.read_text("utf-8"), re.DOTALL)
    told = html.unescape(found[1]).strip() if found else ""
    return told if told.startswith(OPENING.decode()) else None


def read_pdf(path: Path) -> str | None:
    """The subject in the file's information, a string in parentheses with escapes."""
    found = re.search(rb"/Subject \(((?:[^\\()]|\\.|\([^()]*\))*)\)", path.read_bytes(), re.DOTALL)
    told = re.sub(rb"\\(.)", rb"\1", found[1], flags=re.DOTALL).decode("latin-1") if found else ""
    return told if told.startswith(OPENING.decode()) else None


def read_json(path: Path) -> str | None:
    text = path.read_text("utf-8")
    held = json.loads(text)
    return text if isinstance(held, dict) and KEY in held else None


READERS = {
    **dict.fromkeys((".png", ".gif", ".jpg", ".jpeg", ".webp"), read_raster),
    **{".npz": read_npz, ".svg": read_svg, ".pdf": read_pdf, ".json": read_json},
}
