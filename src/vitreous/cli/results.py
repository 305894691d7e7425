"""Shared by the commands that read images and write files: finding the images, naming and reporting the results."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import typer

from vitreous._support.files import FIGURES
from vitreous._support.memory import in_batches
from vitreous._support.progress import show_progress, steps
from vitreous.cli.places import MOVED, place, release, release_all
from vitreous.errors import InputError
from vitreous.images import listing, pictures
from vitreous.images.videos import Video, open_video
from vitreous.models.model import Model

BATCH = 8
FILES = {*FIGURES, ".npz", ".gif"}  # endings of the file that --out may name
SHOWN = 20  # images listed in the summary
Batch = list[tuple[Path, pictures.Picture | Video]]


@dataclass(frozen=True)
class Found:
    """The images that a command reads."""

    files: list[Path]
    named: set[str]  # the paths that were named one by one
    names: dict[Path, str]  # of the results
    notes: list[str]


@dataclass
class Summary:
    """The results of a command, printed as text or as JSON."""

    model: str
    out: Path
    named: set[str]
    methods: dict[str, None] = field(default_factory=dict)
    done: list[dict[str, Any]] = field(default_factory=list)
    failed: list[dict[str, str]] = field(default_factory=list)
    notes: dict[str, None] = field(default_factory=dict)
    channels: int = 3  # that the model takes
    frames: int | None = None  # that it takes, if it takes videos
    weights: tuple[Path, ...] = ()  # files that the user gave
    moved: list[tuple[Path, Path]] = field(default_factory=list)  # results whose name was taken, and their new one
    taken: set[str] = field(default_factory=set)  # names that this run has used

    @classmethod
    def of(cls, model: Model, out: Path, found: Found) -> Summary:
        notes, weights = dict.fromkeys(found.notes), given_files(model)
        made = cls(model.name, out, found.named, notes=notes, channels=model.channels, weights=weights)
        return replace(made, frames=model.frames)

    @property
    def model_and_weights(self) -> str:
        """The model, with the files of weights that the user gave: vitreous_tiny (mine.pth)."""
        files = ", ".join(file.name for file in self.weights)
        return f"{self.model} ({files})" if files else self.model

    def tell_moved(self, wanted: Path, found: Path) -> None:
        """Note that a result has a new name: one note for all of them."""
        self.moved.append((wanted, found))
        self.notes = {note: None for note in self.notes if not note.endswith(MOVED)}
        (first, new), others = self.moved[0], len(self.moved) - 1
        more = f", and {others} more have new names" if others else ""
        self.notes[f"{first} is something else and stays; the new result is {new}{more}{MOVED}"] = None

    def is_named(self, image: str) -> bool:
        """Whether this image was named on the command line, rather than found in a folder."""
        return os.path.abspath(image) in self.named

    @property
    def code(self) -> int:
        return 2 if not self.done or any(self.is_named(entry["image"]) for entry in self.failed) else 0


def given_files(model: Model) -> tuple[Path, ...]:
    """The files of weights that its name does not tell already: not those of its folder or of the hub's cache."""
    own = model.name, Path(model.spec or "").name
    cached = "snapshots"  # in the paths of that cache
    return tuple(f for f in model.weights if f.stem not in own and f.parent.name not in own and cached not in f.parts)


def check_out(out: Path) -> None:
    """Raise if this path cannot be a folder of results."""
    if out.suffix.lower() in FILES and not out.exists():
        raise InputError(f"--out {out}: is the name of a file; give a folder, as there are several files to write")
    for folder in (out, *out.parents):
        if folder.exists() and not folder.is_dir():
            raise InputError(f"--out {out}: {folder} is a file, not a folder")


def names_file(out: Path) -> bool:
    """Whether --out names a file, not a folder."""
    return out.suffix.lower() in FILES and not out.is_dir()


def named_file(out: Path, found: Found, formats: tuple[str, ...]) -> tuple[Path, Found, tuple[str, ...]]:
    """The folder, the names and the kinds of files of the results: --out may also name the only file of one image."""
    if not names_file(out):
        return out, found, formats
    if len(found.files) != 1:
        raise InputError(
            f"--out {out}: is the name of one file, but there are {len(found.files)} images; give a folder"
        )
    check_out(out.parent)
    return out.parent, replace(found, names={found.files[0]: out.stem}), (out.suffix.lower().removeprefix("."),)


def find_pictures(sources: Sequence[str], limit: int | None = None) -> Found:
    """The images to read, without what vitreous wrote, and how their results are called."""
    listed = listing.look(*sources)
    files = list(listed.files[:limit])
    named = {os.path.abspath(source) for source in sources}
    return Found(files, named, relative_names(files, sources), [] if listed.note is None else [listed.note])


def read_batches(files: list[Path], summary: Summary, size: int = BATCH) -> Iterator[Batch]:
    """Yield batches of readable images; failures go into the summary."""
    batch: Batch = []
    for file in files:
        try:
            picture: pictures.Picture | Video
            if summary.frames is not None:
                picture = open_video(file, summary.frames)
            else:
                picture = pictures.open_file(file, summary.channels)
        except InputError as error:
            summary.failed.append({"image": str(file), "reason": str(error)})
            continue
        if isinstance(picture, pictures.Picture) and picture.note:
            summary.notes[picture.note] = None
        batch.append((file, picture))
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def work_through(
    files: list[Path],
    summary: Summary,
    size: int,
    work: Callable[[Batch], None],
    report: Callable[[], None],
    quiet: bool,
    finish: Callable[[], None] = lambda: None,
) -> None:
    """Process the images in batches, then `finish`; on an interrupt, report what was finished."""
    with show_progress(False if quiet else None):
        try:
            for batch in steps(read_batches(files, summary, size), len(files), "images", len):
                in_batches(partial(on_part, work, batch), len(batch), len(batch))
            finish()
        except KeyboardInterrupt:
            report()
            raise
        finally:
            release_all()


def on_part(work: Callable[[Batch], None], batch: Batch, part: slice) -> None:
    work(batch[part])


def relative_names(files: Sequence[Path], sources: Sequence[str | Path]) -> dict[Path, str]:
    """The name of each image's results: its path below the folder, or the fixed part of the pattern, that was named.

    Without the ending and with / between folders: album/cat. An image that was named itself has its stem. The name
    depends on nothing else, so two images may have the same one: `place` tells them apart.
    """
    named = {os.path.abspath(source) for source in sources}
    roots = {os.path.abspath(fixed_part(source)): number for number, source in reversed([*enumerate(sources)])}
    names = {}
    for file in files:
        place = Path(os.path.abspath(file))
        above = [parent for parent in place.parents if str(parent) in roots and str(place) not in named]
        root = min(above, key=lambda parent: roots[str(parent)], default=place.parent)
        names[file] = "/".join(map(short, place.relative_to(root).with_suffix("").parts))
    return names


def fixed_part(source: str | Path) -> Path:
    """A folder as it is, and of a pattern the folders before its first wildcard."""
    path = Path(source)
    if os.path.lexists(path):
        return path
    parts = [*takewhile(lambda part: not any(c in part for c in "*?["), path.parts)]
    return Path(*parts) if len(parts) < len(path.parts) else path


@contextmanager
def placed(summary: Summary, name: str, suffixes: Sequence[str], identity: str, overwrite: bool) -> Iterator[str]:
    """The name under which the files of one image are to be written meanwhile; another than `name` is noted."""
    found = place(summary.out, name, suffixes, identity, overwrite, summary.taken)
    if found != name:
        shown = next((suffix for suffix in suffixes if suffix in FIGURES), suffixes[0])
        summary.tell_moved(*(summary.out / f"{one}{shown}" for one in (name, found)))
    try:
        yield found
    finally:
        release(summary.out, found, suffixes)


def short(name: str, most: int = 180) -> str:
    """Cut a name to a length that file systems accept, with room for a suffix."""
    return name.encode(errors="replace")[:most].decode(errors="ignore")


def tell_notes(summary: Summary, as_json: bool) -> None:
    """Print notes and failures to standard error; in JSON mode the notes are part of the output."""
    for note in () if as_json else summary.notes:
        typer.secho(f"note: {note}", err=True, fg="yellow")
    for entry in summary.failed:
        fatal = not summary.done or summary.is_named(entry["image"])
        word, colour = ("error", "red") if fatal else ("skipped", "yellow")
        typer.secho(f"{word}: {entry['reason']}", err=True, fg=colour)
