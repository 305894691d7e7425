"""Python code and shell commands that compute the same maps."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from dataclasses import replace
from typing import Any

from vitreous.errors import TargetError
from vitreous.models.load import EMBEDDED
from vitreous.registry import METHODS
from vitreous.trace.apply import is_aimed
from vitreous.web import schema
from vitreous.web.engine import ASSETS, Engine, Held, Served, Source
from vitreous.web.targets import find_held

CONCEPT = re.compile(r"concept:\s*([\w .-]+?)\s*(?=$|-\s*(?:text|concept|neuron):)", re.IGNORECASE)
Method = schema.MethodAsked
WINDOWS = os.name == "nt"


def write(engine: Engine, served: Served, asked: schema.ExplainAsked, *, alone: bool) -> schema.Snippet:
    """`alone`: only this computer reaches the server, so its paths may be told, and they hold for the visitor."""
    concepts = {name: held for text in map(str, asked.targets) for name, held in concepts_in(engine, served, text)}
    targets = list(dict.fromkeys(named(str(text), concepts) for text in asked.targets))
    held = list({one.concept.name: one for one in concepts.values()}.values())
    photo = engine.name_of(asked.image)
    packaged = engine.packaged.get(asked.image)
    within = packaged.relative_to(ASSETS.parent).as_posix() if packaged else None
    source = located(served.source) if alone else bare(served.source)
    file = photo
    if packaged:
        file = str(packaged) if alone else f"src/vitreous/{within}"
    aimed = frozenset(name for name, declared in METHODS.items() if is_aimed(served.model, declared))
    return schema.Snippet(
        python=python(source, photo, within, asked.methods, targets, held, aimed),
        cli=command(source, file, asked.methods, targets, held, aimed),
    )


def located(source: Source) -> Source:
    """A model's files by their full paths, which hold in any folder."""
    spec, weights = source.spec, source.weights
    named = spec is not None and (is_path(spec) or os.path.isfile(spec))
    return replace(source, spec=full_path(spec) if spec and named else spec, weights=weights and full_path(weights))


def full_path(name: str) -> str:
    """The full path of a file or folder; what is neither, as it is."""
    path = os.path.abspath(os.path.expanduser(name))
    return path if os.path.exists(path) else name


def is_path(name: str) -> bool:
    """Whether a model was named by its folder."""
    return name.startswith((".", "~")) or os.path.isabs(name)


def bare(source: Source) -> Source:
    """A model's files by their bare names: visitors do not learn the server's folders."""
    spec = file_name(source.spec) if source.spec and is_path(source.spec) else source.spec
    return replace(source, spec=spec, weights=source.weights and file_name(source.weights))


def concepts_in(engine: Engine, served: Served, text: str) -> list[tuple[str, Held]]:
    found = []
    for name in CONCEPT.findall(text):
        held = find_held(engine, served, name)
        if held is None:
            raise TargetError(f"there is no concept {name[:60]!r} here; make it in the Concepts tab")
        found.append((name, held))
    return found


def named(text: str, concepts: dict[str, Held]) -> str:
    """A target with its concepts by name, not by id."""
    return CONCEPT.sub(lambda found: f"concept:{concepts[found[1]].concept.name}", text)


# -------------------------------------------------------------------------------------------------------------- python


def python(
    source: Source,
    photo: str,
    within: str | None,
    methods: list[Method],
    targets: list[str],
    concepts: list[Held],
    aimed: frozenset[str],
) -> str:
    """One forward pass, shared by all maps; `within`: the photo's place in the package, if it has one.

    `aimed`: the methods whose maps depend on the target.
    """
    where = f"Path(vitreous.__file__).parent / {within!r}" if within else repr(photo)
    lines = ["from pathlib import Path", ""] if within else []
    lines += ["import vitreous", ""]
    lines += [f"model = vitreous.load({loading(source)})"]
    for held in concepts:
        c = held.concept
        lines.append(
            f"vitreous.Concept.from_images(model, {list(c.examples)!r}, {c.similarity!r}, name={c.name!r})"
            f".save({f'vitreous-concepts/{c.name}.safetensors'!r})"
        )
    lines += [f"trace = vitreous.Trace(model, [{where}])  # one forward pass, shared", "maps = ["]
    lines += [f"    {calling(one)}," for one in methods if one.name not in aimed]
    lines += [f"    {calling(one, target)}," for target in targets for one in methods if one.name in aimed]
    return "\n".join([*lines, "]", ""])


def loading(source: Source) -> str:
    told = [] if source.spec in (None, EMBEDDED) else [repr(source.spec)]
    told += [f"weights={source.weights!r}"] if source.weights else []
    told += [f"img_size={source.img_size!r}"] if source.img_size else []
    told += [f"bands={source.bands!r}"] if source.bands else []
    return ", ".join(told)


def calling(one: Method, target: str | None = None) -> str:
    asked = "" if target is None else f", target={target!r}"
    return (
        f"vitreous.explain(model, trace, {one.name!r}{asked}{''.join(f', {k}={v!r}' for k, v in one.options.items())})"
    )


# ------------------------------------------------------------------------------------------------------------- command


def command(
    source: Source, photo: str, methods: list[Method], targets: list[str], concepts: list[Held], aimed: frozenset[str]
) -> str:
    """Shell commands; one if possible, more for a method with two settings or a target with a comma."""
    model = loaded(source)
    lines = [
        words("vitreous", "concept", "build", c.name, *c.examples, *model, "--similarity", c.similarity)
        for c in (held.concept for held in concepts)
    ]
    sets = [targets] if not any("," in target for target in targets) else [[target] for target in targets]
    for some in rounds(methods):
        targeted = any(one.name in aimed for one in some)
        settings = [f"{one.name}.{key}={value_text(value)}" for one in some for key, value in one.options.items()]
        chosen = ["--method", ",".join(one.name for one in some), *(w for s in settings for w in ("--set", s))]
        for part in sets if targeted else [[]]:
            asked = ["--target", ",".join(part)] if part else []
            lines.append(words("vitreous", "explain", photo, *model, *chosen, *asked))
    return "\n".join(lines) + "\n"


def rounds(methods: list[Method]) -> list[list[Method]]:
    """Groups in which each method occurs once."""
    found: list[list[Method]] = []
    for one in methods:
        free = next((some for some in found if one.name not in [other.name for other in some]), None)
        if free is None:
            found.append([one])
        else:
            free.append(one)
    return found


def loaded(source: Source) -> list[str]:
    told = [] if source.spec in (None, EMBEDDED) else ["--model", str(source.spec)]
    told += ["--weights", source.weights] if source.weights else []
    size = source.img_size
    told += ["--img-size", "x".join(map(str, size)) if isinstance(size, tuple) else str(size)] if size else []
    told += ["--channels", ",".join(map(str, source.bands))] if source.bands else []
    return told


def file_name(path: str) -> str:
    return re.split(r"[\\/]", path.rstrip("\\/"))[-1]


def value_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def words(*given: str) -> str:
    """A command as the shell of this computer reads it."""
    return subprocess.list2cmdline(given) if WINDOWS else shlex.join(given)
