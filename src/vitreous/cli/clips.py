"""The videos that a command reads: files, folders of frames, and folders of these."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from vitreous.cli.results import Found, find_pictures, relative_names
from vitreous.cli.values import FILM
from vitreous.errors import InputError, OptionError
from vitreous.images import listing
from vitreous.images.videos import FILMS, frames_in
from vitreous.models.model import Model

ENDINGS = FILMS | {".gif"}


def find_sources(sources: Sequence[str], limit: int | None) -> Found:
    """What a command is to read, before its model is known: images, or videos where there are no images."""
    try:
        return find_pictures(sources, limit)
    except InputError:
        if not any(Path(source).is_dir() and videos_below(Path(source)) for source in sources):
            raise
        return find_videos(sources, limit)


def find_videos(sources: Sequence[str], limit: int | None) -> Found:
    """The videos that names stand for.

    A folder that holds images is one video, its images are the frames; any other is searched for videos, at any depth.
    """
    found: dict[str, Path] = {}
    for source in sources:
        if not source.strip():
            raise InputError("an empty name is not a video; give a file, a folder of frames or a pattern")
        for path in listing.stands_for(source):
            below = videos_below(path) if path.is_dir() else [path]
            if not below:
                raise InputError(
                    f"{path}: no video in this folder ({', '.join(sorted(ENDINGS))}, or folders of frames)"
                )
            found |= {os.path.abspath(one): one for one in below}
    files = [path for path in found.values() if not is_result(path)] or list(found.values())
    left = len(found) - len(files)
    notes = [f"skipped {left} file{'s' if left > 1 else ''} that vitreous wrote"] if left else []
    files = files[:limit]
    return Found(files, {os.path.abspath(source) for source in sources}, relative_names(files, sources), notes)


def is_result(path: Path) -> bool:
    return path.is_file() and bool(listing.told_apart([path]).results)


def videos_below(folder: Path) -> list[Path]:
    """The folder itself if it holds frames; else the videos in it, sorted."""
    if any(file.suffix.lower() not in ENDINGS for file in frames_in(folder)):
        return [folder]
    inner = sorted(folder.iterdir())
    films = [path for path in inner if path.is_file() and path.suffix.lower() in ENDINGS]
    return films + [one for path in inner if path.is_dir() for one in videos_below(path)]


def with_frames(model: Model, frames: int | None) -> Model:
    """The model with --frames in place of its usual number."""
    if frames is not None and model.frames is None:
        raise OptionError(f"--frames {frames}: {model.name} takes images, not videos")
    model.frames = frames or model.frames
    return model


def check_film(kinds: Sequence[str], model: Model) -> None:
    if FILM in kinds and model.frames is None:
        raise OptionError(f"--format {FILM}: is a film of a video, and {model.name} takes images; use png, svg or pdf")
