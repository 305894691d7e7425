"""The work of `vitreous ask` and `vitreous words`: figures and arrays of words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from vitreous._support.progress import show_progress
from vitreous.cli.arguments import Backbone, Place, parse_settings
from vitreous.cli.results import Found, Summary, find_pictures, named_file, placed, tell_notes
from vitreous.errors import InputError, OptionError
from vitreous.language import ask as asking
from vitreous.language import words as weighing
from vitreous.registry import METHODS

ENDINGS = {"ask": ".answer", "words": ".words"}


def ask(
    image: str,
    question: str,
    backbone: Backbone,
    method: str,
    options: list[str],
    answer: str | None,
    words: str,
    most: int,
    place: Place,
) -> None:
    name = METHODS[method.strip().replace("-", "_")].name
    values = chosen_options(name, options)
    found = one_picture(image)
    model = backbone.load()
    with show_progress(False if place.as_json else None):
        made = asking.ask(
            model, str(found.files[0]), question, answer, name, words=parse_words(words), most=most, **values
        )
    summary, files = written(made, "ask", model.name, found, place)
    told = {"question": question, "answer": made.text, "generated": made.generated, "method": made.maps[0].method}
    listed = [{"word": word, "target": one.target, "said": one.labels[0]} for word, one in zip(made.words, made.maps)]
    if place.as_json:
        said = {"model": model.name, "image": str(found.files[0]), **told, "words": listed, **files}
        typer.echo(json.dumps({**said, "notes": list(summary.notes)}, indent=2))
    else:
        typer.echo(f"{made.text}\n")
        for entry in listed:
            typer.echo(f"    {entry['said']}")
        typer.echo(f"\n{', '.join(files.values())}: {told['method']}, {len(made)} words of {model.name}")
    tell_notes(summary, place.as_json)


def words(image: str, text: str, backbone: Backbone, method: str, place: Place) -> None:
    found = one_picture(image)
    model = backbone.load()
    made = weighing.words(model, str(found.files[0]), text, method)
    summary, files = written(made, "words", model.name, found, place)
    weights = [{"word": word, "relevance": float(value)} for word, value in zip(made.words, made.values)]
    if place.as_json:
        told: dict[str, Any] = {"model": model.name, "image": str(found.files[0]), "text": text, "method": method}
        told |= {"similarity": made.similarity, "words": weights, **files, "notes": list(summary.notes)}
        typer.echo(json.dumps(told, indent=2))
    else:
        for entry in weights:
            typer.echo(f"{entry['relevance']:+.4f}  {entry['word']}")
        typer.echo(f"\n{', '.join(files.values())}: {method}, similarity {made.similarity:.4f}")
    tell_notes(summary, place.as_json)


def one_picture(image: str) -> Found:
    found = find_pictures([image])
    if len(found.files) != 1:
        raise InputError(f"{image}: {len(found.files)} images; ask about one")
    return found


def parse_words(text: str) -> int | str | list[str]:
    """all, 5 or token:dog,word:3."""
    text = text.strip()
    if text == asking.ALL:
        return text
    return int(text) if text.isdigit() else [part.strip() for part in text.split(",") if part.strip()]


def chosen_options(method: str, options: list[str]) -> dict[str, Any]:
    settings = parse_settings(options)
    other = [name for name in settings if name != method]
    if other:
        raise OptionError(f"--set {other[0]}.…: name that method: --method {other[0]}")
    return settings.get(method, {})


def written(made: Any, kind: str, model: str, found: Found, place: Place) -> tuple[Summary, dict[str, str]]:
    """Write the figure and the numbers; the files by what they are."""
    out, found, formats = named_file(place.out, found, place.formats)
    summary = Summary(model, out, found.named, notes=dict.fromkeys(found.notes))
    files: dict[str, str] = {}
    endings = [f"{ENDINGS[kind]}.{one}" for one in formats]
    if place.out.suffix and out != place.out:  # the file was named
        endings = [f".{one}" for one in formats]
    if not endings:
        return summary, files
    name = found.names[found.files[0]]
    with placed(summary, name, endings, made.mark["identity"], place.overwrite) as own:
        for one, ending in zip(formats, endings):
            file: Path = made.save(out / f"{own}{ending}")
            files["numbers" if one == "npz" else "figure"] = str(file)
    return summary, files
