"""Python code and shell commands that compute the same maps."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vitreous._support.files import sha256
from vitreous.errors import TargetError
from vitreous.models.load import EMBEDDED
from vitreous.models.speaker import WordsModel
from vitreous.registry import METHODS
from vitreous.trace.apply import is_aimed
from vitreous.web import schema
from vitreous.web.engine import ASSETS, Engine, Held, Served, Source
from vitreous.web.targets import MASK, find_held

CONCEPT = re.compile(r"concept:\s*([\w .-]+?)\s*(?=$|-\s*(?:text|concept|neuron):)", re.IGNORECASE)
Method = schema.MethodAsked
WINDOWS = os.name == "nt"


@dataclass(frozen=True)
class Recipe:
    """What all copied code begins with: a model, an image, concepts, and checks that they are the same files."""

    source: Source
    file: str  # the image, for a command
    where: str  # the image, for Python
    targets: list[str]
    concepts: list[Held]
    checks: list[tuple[str, str]]  # file, SHA-256

    @property
    def model(self) -> list[str]:
        return loaded(self.source)


def write(engine: Engine, served: Served, asked: schema.ExplainAsked, *, alone: bool) -> schema.Snippet:
    """`alone`: only this computer reaches the server, so its paths may be told, and they hold for the visitor."""
    given = recipe(engine, served, asked.image, list(map(str, asked.targets)), alone=alone)
    aimed = frozenset(name for name, declared in METHODS.items() if is_aimed(served.model, declared))
    told = schema.Snippet(python=python(given, asked.methods, aimed), cli=command(given, asked.methods, aimed))
    if isinstance(served.model, WordsModel):
        return asking(told, served.model, given, asked.methods)
    panned = engine.clips.samples.get(asked.image)
    return told if panned is None else panning(told, panned.stem, engine.name_of(asked.image))


def recipe(engine: Engine, served: Served, image: str, asked: list[str], *, alone: bool) -> Recipe:
    concepts = {name: held for text in asked for name, held in concepts_in(engine, served, text)}
    targets = list(dict.fromkeys(named(text, concepts) for text in asked))
    held = list({one.concept.name: one for one in concepts.values()}.values())
    photo, packaged = engine.name_of(image), engine.packaged.get(image)
    source = located(served.source) if alone else bare(served.source)
    sure = [] if alone else checks(served.source)
    file, where = photo, repr(photo)
    if packaged:
        within = packaged.relative_to(ASSETS.parent).as_posix()
        file = str(packaged) if alone else f"src/vitreous/{within}"
        where = f"Path(vitreous.__file__).parent / {within!r}"
    elif (digest := engine.hashes.get(image)) is not None:
        sure = [*sure, (photo, digest)]
    return Recipe(source, file, where, targets, held, sure)


def begin(given: Recipe) -> list[str]:
    """Imports, the checks, the model, the concepts, and one forward pass."""
    lines = ["import hashlib"] if given.checks else []
    lines += ["from pathlib import Path", "", "import vitreous", ""]
    for name, digest in given.checks:
        lines.append(f"found = hashlib.sha256(Path({name!r}).read_bytes()).hexdigest()")
        lines.append(f"assert found == {digest!r}, {f'{name}: this is another file'!r}")
    lines += [f"model = vitreous.load({loading(given.source)})"]
    for held in given.concepts:
        c = held.concept
        lines.append(
            f"vitreous.Concept.from_images(model, {list(c.examples)!r}, {c.similarity!r}, name={c.name!r})"
            f".save({f'vitreous-concepts/{c.name}.safetensors'!r})"
        )
    return [*lines, f"image = {given.where}", "trace = vitreous.Trace(model, [image])  # one forward pass, shared"]


def command_words(given: Recipe, lines: list[str]) -> str:
    """Commands one after the other: first the check of the files, without which the others do not run, and concepts."""
    sums = [f"{digest}  {name}" for name, digest in given.checks]
    told = [f"rem SHA-256: {one}" for one in sums] if WINDOWS else []
    if sums and not WINDOWS:
        told = [f"printf '%s\\n' {shlex.join(sums)} | sha256sum --check"]
    concepts = [
        words("vitreous", "concept", "build", c.name, *c.examples, *given.model, "--similarity", c.similarity)
        for c in (held.concept for held in given.concepts)
    ]
    end = " && \\\n" if sums and not WINDOWS else "\n"
    return end.join([*told, *concepts, *lines]) + "\n"


def asking(told: schema.Snippet, model: WordsModel, given: Recipe, methods: list[Method]) -> schema.Snippet:
    """The same for a question with its answer, which make the model."""
    answer = str(model.speaker.tokenizer.decode(model.answer))
    first, made = f"model = vitreous.load({loading(given.source)})", f"{given.where}, {model.question!r}, {answer!r}"
    python = told.python.replace(first, f"{first}\nmodel = vitreous.ask(model, {made}).model  # with this answer", 1)
    said = ["--answer", answer, "--words", ",".join(given.targets)]
    lines = [
        words("vitreous", "ask", given.file, model.question, *given.model, "--method", one.name, *said)
        + "".join(f" --set {one.name}.{key}={value_text(value)}" for key, value in one.options.items())
        for one in methods
    ]
    return schema.Snippet(python=python, cli=command_words(given, lines))


def panning(told: schema.Snippet, name: str, clip: str) -> schema.Snippet:
    """The same for a sample clip, which is made of a packaged photo."""
    python = told.python.replace(f"image = {clip!r}", f"image = pan({name!r})", 1)
    python = python.replace("import vitreous\n", "import vitreous\nfrom vitreous.images.pan import pan\n", 1)
    make = f"from vitreous.images.pan import save_pan; save_pan({json.dumps(name)}, {json.dumps(clip)})"
    return schema.Snippet(python=python, cli=words("python", "-c", make) + "\n" + told.cli)


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


def checks(source: Source) -> list[tuple[str, str]]:
    """The bare name and the SHA-256 of the file of the weights, if there is one."""
    if not source.weights:
        return []
    path = Path(source.weights.partition("#")[0]).expanduser()
    return [(path.name, sha256(path))] if path.is_file() else []


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
    text = MASK.sub(r"@mask-\1.png", text)  # as the page saves a drawn region
    return CONCEPT.sub(lambda found: f"concept:{concepts[found[1]].concept.name}", text)


# -------------------------------------------------------------------------------------------------------------- python


def python(given: Recipe, methods: list[Method], aimed: frozenset[str]) -> str:
    """One forward pass, shared by all maps; `aimed`: the methods whose maps depend on the target."""
    lines = [*begin(given), "maps = ["]
    lines += [f"    {calling(one)}," for one in methods if one.name not in aimed]
    lines += [f"    {calling(one, target)}," for target in given.targets for one in methods if one.name in aimed]
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


def command(given: Recipe, methods: list[Method], aimed: frozenset[str]) -> str:
    """Shell commands; one if possible, more for a method with two settings or a target with a comma."""
    lines, targets = list[str](), given.targets
    sets = [targets] if not any("," in target for target in targets) else [[target] for target in targets]
    for some in rounds(methods):
        targeted = any(one.name in aimed for one in some)
        settings = [f"{one.name}.{key}={value_text(value)}" for one in some for key, value in one.options.items()]
        chosen = ["--method", ",".join(one.name for one in some), *(w for s in settings for w in ("--set", s))]
        for part in sets if targeted else [[]]:
            asked = ["--target", ",".join(part)] if part else []
            lines.append(words("vitreous", "explain", given.file, *given.model, *chosen, *asked))
    return command_words(given, lines)


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
