"""An upload becomes what the models take: an image of some channels, a clip of some frames."""

from __future__ import annotations

import hashlib

from vitreous.web import schema
from vitreous.web.clips import Clip, read_clip
from vitreous.web.engine import Engine, kept_as
from vitreous.web.problems import Problem
from vitreous.web.uploads import Part, identity, open_picture, weight

Problems = dict[tuple[str, int], Problem]  # by what could not be made of the file


def keep(engine: Engine, part: Part) -> schema.Uploaded:
    """Decode a file for every number of channels and of frames that the models take; one must be able to use it."""
    number, problems = identity(part.held), Problems()
    told = keep_images(engine, number, part, problems)
    clip = keep_clips(engine, number, part, problems)
    if told is None and clip is not None:
        told = schema.Uploaded(id=number, name=part.name, width=clip.size[0], height=clip.size[1])
    if told is None:
        raise next(iter(problems.values()))
    engine.hashes.put(number, hashlib.sha256(part.held).hexdigest())
    refused = {
        name: problem.detail
        for name, served in engine.models.items()
        if (problem := problems.get(kind_of(served.model.channels, served.model.frames))) is not None
    }
    return told.model_copy(update={"refused": refused, "frames": None if clip is None else clip.count})


def kind_of(channels: int, frames: int | None) -> tuple[str, int]:
    return ("channels", channels) if frames is None else ("frames", frames)


def keep_images(engine: Engine, number: str, part: Part, problems: Problems) -> schema.Uploaded | None:
    """The file as an image; what it is for the first model that can use it."""
    first = None
    for count in engine.channels:
        try:
            made = open_picture(part, engine.limits, count)
        except Problem as problem:
            problems[kind_of(count, None)] = problem
            continue
        engine.images.put(kept_as(number, count), made, weight(made))
        wide, high = made.image.size
        first = first or schema.Uploaded(id=number, name=made.name, width=wide, height=high, note=made.note)
    return first


def keep_clips(engine: Engine, number: str, part: Part, problems: Problems) -> Clip | None:
    """The file as a clip; what it is for the first model that can use it."""
    first = None
    for frames in engine.lengths:
        try:
            made = read_clip(part, engine.limits, frames)
        except Problem as problem:
            problems[kind_of(3, frames)] = problem
            continue
        engine.clips.keep(number, frames, made)
        first = first or made
    return first
