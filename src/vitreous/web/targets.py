"""Targets of requests: as in the library, except that no name in them reaches the file system."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from vitreous._support.words import plain
from vitreous.errors import TargetError
from vitreous.trace.apply import PLACED
from vitreous.trace.latent import parse_latent
from vitreous.trace.parse_target import parse, parse_kind
from vitreous.trace.placing import place
from vitreous.trace.region import Region
from vitreous.trace.target import Contrast, Target, no_classifier
from vitreous.trace.trace import Trace
from vitreous.web.engine import Engine, Held, Served

KINDS = re.compile(r"\s*-\s*(?=(?:text|concept|neuron|latent):)", re.IGNORECASE)
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
    kind, colon, rest = text.partition(":")
    parts = KINDS.split(text)
    if len(parts) == 2 and all(parts):
        one, other = (read(engine, served, part, outputs) for part in parts)
        return Contrast(one, other)
    if colon and kind.lower() == "concept":
        return find_concept(engine, served, rest.strip())
    if colon and kind.lower() == "text":
        return parse_kind("text", rest.strip(), served.model, outputs)
    if colon and kind.lower() == "latent":
        return parse_latent(rest.strip(), served.model, files=False)
    if re.search(r"(^|-)\s*like:", text.lower()):
        raise TargetError(f"{text[:60]!r}: files are not read here; vitreous explain --like compares two images")
    if "concept:" in text.lower() or "latent:" in text.lower() or ";" in text:
        raise TargetError(f"{text[:60]!r} is not one target; give a class, top-1, a-b or concept:NAME")
    found = parse(text, served.model, outputs)
    if any(isinstance(one, Region) and one.mask is not None for one in parts_of(found)):
        raise TargetError(
            f"{text[:60]!r}: give CLASS@x,y, CLASS@x0,y0,x1,y1 or CLASS@predicted; files are not read here"
        )
    return found


def parts_of(target: Target) -> Iterator[Target]:
    """A target, or both sides of a contrast."""
    if isinstance(target, Contrast):
        yield from parts_of(target.one)
        yield from parts_of(target.other)
    else:
        yield target


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
