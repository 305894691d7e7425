"""Shared by the commands that read images and write files: finding the images, naming and reporting the results."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, takewhile, zip_longest
from pathlib import Path
from typing import Any

import typer

from vitreous._support.memory import in_batches
from vitreous._support.progress import show_progress, steps
from vitreous.errors import InputError
from vitreous.images import pictures

BATCH = 8
SHOWN = 20  # images listed in the summary
ANIMATION = ".discard.gif"
Batch = list[tuple[Path, pictures.Picture]]


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

    def is_named(self, image: str) -> bool:
        """Whether this image was named on the command line, rather than found in a folder."""
        return os.path.abspath(image) in self.named

    @property
    def code(self) -> int:
        return 2 if not self.done or any(self.is_named(entry["image"]) for entry in self.failed) else 0


def check_out(out: Path) -> None:
    """Raise if this path cannot be a folder."""
    for folder in (out, *out.parents):
        if folder.exists() and not folder.is_dir():
            raise InputError(f"--out {out}: {folder} is a file, not a folder")


def find_pictures(sources: list[str], out: Path) -> tuple[list[Path], set[str]]:
    """The image files to read, without the results of earlier runs, and the paths that were named one by one."""
    named = {os.path.abspath(source) for source in sources}
    files = [file for file in pictures.find(*sources) if os.path.abspath(file) in named or not is_result(file, out)]
    return files, named


def read_batches(files: list[Path], summary: Summary, size: int = BATCH) -> Iterator[Batch]:
    """Yield batches of readable images; failures go into the summary."""
    batch: Batch = []
    for file in files:
        try:
            picture = pictures.open_file(file, summary.channels)
        except InputError as error:
            summary.failed.append({"image": str(file), "reason": str(error)})
            continue
        if picture.note:
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
) -> None:
    """Process the images in batches; on an interrupt, report what was finished."""
    with show_progress(False if quiet else None):
        try:
            for batch in steps(read_batches(files, summary, size), len(files), "images", len):
                in_batches(partial(on_part, work, batch), len(batch), len(batch))
        except KeyboardInterrupt:
            report()
            raise


def on_part(work: Callable[[Batch], None], batch: Batch, part: slice) -> None:
    work(batch[part])


def result_files(out: Path, name: str) -> tuple[Path, Path]:
    return out / f"{name}.png", out / f"{name}.npz"


def is_result(file: Path, out: Path) -> bool:
    """Whether this is a figure or an animation of an earlier run, recognised by the raw maps beside it."""
    figure, maps = result_files(out, file.stem)
    if file.name.endswith(ANIMATION):
        figure = out / file.name
    return os.path.abspath(file) == os.path.abspath(figure) and maps.is_file()


def unique_names(files: list[Path], out: Path, ending: str = "") -> dict[Path, str]:
    """The name of each image's results: its stem, with as much of its path as makes it unique.

    Only earlier results are overwritten, never an image or another file. `ending`: the suffix added to each name.
    """
    names: dict[Path, str] = {}
    levels = [Counter(map(str.lower, level)) for level in zip_longest(*map(spellings, files), fillvalue="")]
    taken = {os.path.abspath(file).lower() for file in files}
    for file in files:
        distinct = [name for name, level in zip(spellings(file), levels) if level[name.lower()] == 1]
        for name in chain(distinct, (f"{short(file.stem)}_{i}" for i in range(2, 10 + len(files)))):
            figure, maps = result_files(out, name + ending)
            place, beside = (os.path.abspath(path).lower() for path in (figure, maps))
            if place not in taken and beside not in taken and (maps.is_file() or not figure.exists()):
                taken.add(place)
                names[file] = name
                break
        else:
            raise InputError(f"--out {out}: every name for the results of {file} is taken; give an empty folder")
    return names


def spellings(file: Path) -> list[str]:
    """cat, cat_jpg, album_cat, album_cat_jpg, holidays_album_cat, …"""
    folders = [part for part in file.parts[:-1] if part not in (file.anchor, "..", ".")]
    starts = ["_".join([*folders[start:], ""]) for start in range(len(folders), -1, -1)]
    ending = file.suffix.replace(".", "_")
    return [short(f"{start}{file.stem}{end}") for start in starts for end in ("", ending)]


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
