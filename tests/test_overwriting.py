"""Nothing is lost: results have names of their own, and what is there is replaced only by the same or on demand."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vitreous.cli.results import relative_names


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --------------------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("sources", "file", "name"),
    [
        (["in"], "in/cat.jpg", "cat"),
        (["in"], "in/album/cat.jpg", "album/cat"),
        (["in/"], "in/album/best.of/cat.v2.jpg", "album/best.of/cat.v2"),
        (["."], "in/album/cat.jpg", "in/album/cat"),
        (["in/album/cat.jpg"], "in/album/cat.jpg", "cat"),
        (["in/album/*.jpg"], "in/album/cat.jpg", "cat"),
        (["in/*/*.jpg"], "in/album/cat.jpg", "album/cat"),
        (["in/**/c?t.*"], "in/album/cat.jpg", "album/cat"),
        (["*.jpg"], "cat.jpg", "cat"),
        (["in/album", "in"], "in/album/cat.jpg", "cat"),
        (["in", "in/album"], "in/album/cat.jpg", "album/cat"),
        (["in", "in/album/cat.jpg"], "in/album/cat.jpg", "cat"),
        (["../in"], "../in/album/cat.jpg", "album/cat"),
    ],
)
def test_names_are_paths_below_what_was_named(here: Path, sources: list[str], file: str, name: str) -> None:
    (here / "in" / "album" / "best.of").mkdir(parents=True)
    os.chdir(here / "in" if sources == ["../in"] else here)
    assert relative_names([Path(file)], sources) == {Path(file): name}


def test_names_do_not_depend_on_their_neighbours(here: Path) -> None:
    (here / "in").mkdir()
    alone = relative_names([Path("in/x.png")], ["in"])
    among = relative_names([Path(f"in/{name}") for name in ("a/x.png", "x.jpg", "x.png")], ["in"])
    assert among[Path("in/x.png")] == alone[Path("in/x.png")] == "x"


def test_names_of_many_and_of_odd_files(here: Path) -> None:
    for folder in "ab":
        (here / folder).mkdir()
    many = [Path(f"{folder}/{i}.jpg") for folder in "ab" for i in range(2000)]
    assert len(set(relative_names(many, ["."]).values())) == 4000
    long = Path("in") / ("ü" * 120 + ".jpg")
    assert len(relative_names([long], [long])[long].encode()) <= 180
    folder = Path("[a]")
    folder.mkdir()
    assert relative_names([folder / "cat.jpg"], [folder]) == {folder / "cat.jpg": "cat"}
