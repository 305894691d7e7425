"""Targets of requests: as in the library, except that no name in them reaches the file system."""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np

from vitreous._support.words import plain
from vitreous.errors import TargetError
from vitreous.models.output import Form
from vitreous.trace.apply import PLACED
from vitreous.trace.latents import Latent
from vitreous.trace.parse_target import parse, parse_kind
from vitreous.trace.placing import place
from vitreous.trace.region import Region
from vitreous.trace.target import Contrast, Target, no_classifier
from vitreous.trace.trace import Trace
from vitreous.trace.word import parse_words
from vitreous.web import latents
from vitreous.web.engine import Engine, Held, Served

KINDS = re.compile(r"\s*-\s*(?=(?:text|concept|neuron|latent):)", re.IGNORECASE)
MASK = re.compile(r"@\s*mask:([0-9a-f]{8,24})\b", re.IGNORECASE)
ANSWERED = re.compile(r"\?[0-9a-f]{24}$")  # behind the name of a model: which answer
HELD = ".held"  # the ending of a mask that is no file
PLACES = "give CLASS@x,y, CLASS@x0,y0,x1,y1, CLASS@predicted or CLASS@mask:ID"
LONGEST = 300


def resolve(engine: Engine, served: Served, trace: Trace, asked: str | int) -> Target:
    """The target that was asked for; concepts are those that this server holds."""
    found = on_image(engine, served, trace, asked)
    if found.names_classes and not trace.classifies:
        raise no_classifier(served.name)
    return found


async def expect(engine: Engine, served: Served, image: str, asked: Iterable[str | int]) -> None:
    """Raise unless all targets of a request exist: a job is not begun for one that does not."""

    def work() -> None:
        trace = engine.trace(served, image)
        for one in asked:
            on_image(engine, served, trace, one)

    await engine.ask(served, work)


def on_image(engine: Engine, served: Served, trace: Trace, asked: str | int) -> Target:
    """The target that was asked for, put on the image where it has a place."""
    found = read(engine, served, str(asked).strip(), served.model.outputs or trace.output.shape[1])
    return place(found, trace) if served.model.form in PLACED else found


def read(engine: Engine, served: Served, text: str, outputs: int) -> Target:
    if len(text) > LONGEST:
        raise TargetError(f"a target of {len(text)} letters is too long")
    if served.model.form is Form.WORDS:
        return word_of(served, text)
    kind, colon, rest = text.partition(":")
    parts = KINDS.split(text)
    if len(parts) == 2 and all(parts):
        one, other = (read(engine, served, part, outputs) for part in parts)
        check_latents(one, other)
        return Contrast(one, other)
    if colon and kind.lower() == "concept":
        return find_concept(engine, served, rest.strip())
    if colon and kind.lower() == "text":
        return parse_kind("text", rest.strip(), served.model, outputs)
    if colon and kind.lower() == "latent":
        return latents.parse(engine, served, rest.strip())
    if re.search(r"(^|-)\s*like:", text.lower()):
        raise TargetError(f"{text[:60]!r}: files are not read here; vitreous explain --like compares two images")
    if "concept:" in text.lower() or "latent:" in text.lower() or ";" in text:
        raise TargetError(f"{text[:60]!r} is not one target; give a class, top-1, a-b or concept:NAME")
    return held_masks(engine, parse(MASK.sub(r"@\1" + HELD, text), served.model, outputs))


def held_masks(engine: Engine, target: Target) -> Target:
    """The target with the drawn regions that the server holds; any other mask would be a file."""
    if isinstance(target, Contrast):
        return Contrast(held_masks(engine, target.one), held_masks(engine, target.other))
    if not isinstance(target, Region) or target.mask is None:
        return target
    name = str(target.mask)
    if not re.fullmatch(r"[0-9a-f]{8,24}" + re.escape(HELD), name):
        raise TargetError(f"{str(target)[:60]!r}: {PLACES}; files are not read here")
    return Region(target.cls, mask=find_mask(engine, name.removesuffix(HELD)))


def find_mask(engine: Engine, number: str) -> np.ndarray:
    """A drawn region by its id, or as the library names it."""
    found = engine.masks.get(number) or next((one for one in engine.masks.values() if one.digest == number), None)
    if found is None:
        raise TargetError("this region is not here (any more); draw it again")
    return found.pixels


def word_of(served: Served, text: str) -> Target:
    """A word of an answer."""
    if ANSWERED.search(served.name) is None:
        said = f"{served.name} answers questions, and none was asked yet"
        raise TargetError(f"{said}: POST /api/answers, and name the model as it says")
    return parse_words(text, served.model)


def check_latents(one: Target, other: Target) -> None:
    """Raise if a latent is contrasted with what is none of its dictionary: they are read from different runs."""
    digests = [side.latents.digest if isinstance(side, Latent) else None for side in (one, other)]
    if digests[0] != digests[1]:
        raise TargetError(f"{one}, {other}: a latent is compared with another one of the same dictionary only")


def find_concept(engine: Engine, served: Served, name: str) -> Target:
    found = find_held(engine, served, name)
    if found is None:
        raise TargetError(f"there is no concept {name[:60]!r} here; make it in the Concepts tab")
    if found.model != served.name:
        raise TargetError(f"the concept {found.concept.name!r} was made with {found.model}; make it with {served.name}")
    return found.concept


def find_held(engine: Engine, served: Served, name: str) -> Held | None:
    """A concept by its id, else the last used of this name."""
    here = [one for one in engine.concepts.values() if one.model == served.name]
    named = [one for one in here if one.concept.name == name]
    named = named or [one for one in here if plain(one.concept.name) == plain(name)]
    return engine.concepts.get(name) or (named[-1] if named else None)


def settle(target: Target, trace: Trace) -> Target:
    """The target with "top-1" replaced by the class it stands for."""
    return target.fix(trace.output).single()


def heading(target: Target, trace: Trace) -> str:
    """The target as a heading."""
    return target.title(trace.model, trace.output, 0)
