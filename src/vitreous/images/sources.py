"""Where an image comes from, and a hash of its content, so that a result names the very image that it explains."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vitreous._support.files import sha256, stamp_file
from vitreous.images.bands import Bands
from vitreous.images.pictures import Picture, Stored, as_array
from vitreous.images.videos import Video, frames_in

CHANGED = "the file has changed since it was read"


def stamp_of(source: Any) -> str | None:
    """Cheap to compute; changes when the file behind an image may have changed. None for an image in memory."""
    if isinstance(source, Picture | Video):
        return source.stamp
    if isinstance(source, str | Path):
        return stamp_file(Path(source))
    return source.stamp if isinstance(source, Stored) else None


def told_of(source: Any, stamp: str | None) -> dict[str, Any]:
    """The full path of an image and the SHA-256 of its file, or of its pixels if it was given in memory.

    `stamp`: of the file when it was read. A file that has changed since has no hash.
    """
    held = source.source if isinstance(source, Picture | Video) and source.source is not None else source
    if isinstance(held, str | Path):
        path = os.path.abspath(held)
        if os.path.isdir(path):
            return {"path": path, "sha256": frames_hash(Path(path))}
        return {"path": path, **file_hash(lambda: sha256(path), stamp_file(Path(path)) == stamp)}
    if isinstance(held, Stored):
        content = held.read_bytes
        return {"path": str(held), **file_hash(lambda: hashlib.sha256(content()).hexdigest(), held.stamp == stamp)}
    path = getattr(held, "filename", "")
    return {"path": os.path.abspath(path) if path else None, "pixels_sha256": pixels_hash(held)}


def file_hash(read: Callable[[], str], same: bool) -> dict[str, Any]:
    """The hash of a file that is still the same, or why there is none."""
    try:
        return {"sha256": read()} if same else {"sha256": None, "note": CHANGED}
    except OSError:
        return {"sha256": None, "note": "the file cannot be read any more"}


def frames_hash(folder: Path) -> str | None:
    """A hash of the frames of a video in a folder: of the hashes of its images, in their order."""
    try:
        return hashlib.sha256("".join(sha256(file) for file in frames_in(folder)).encode()).hexdigest()
    except OSError:
        return None


def pixels_hash(source: Any) -> str | None:
    """A hash of the pixels of an image in memory, with their type and shape; of a video, of all its frames."""
    if isinstance(source, Video | list | tuple):
        frames = source.frames if isinstance(source, Video) else source
        return hashlib.sha256("".join(str(pixels_hash(one)) for one in frames).encode()).hexdigest()
    image = source.image if isinstance(source, Picture) else source
    array = np.asarray(image) if isinstance(image, Image.Image) else image.array if isinstance(image, Bands) else None
    array = as_array(image) if array is None else array
    if array is None:
        return None
    told = hashlib.sha256(f"{array.dtype}{array.shape}".encode())
    told.update(np.ascontiguousarray(array).tobytes())
    return told.hexdigest()
