"""What the documents show works: Python is run, commands are parsed with the real parser."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from vitreous import METHODS, METRICS
from vitreous.cli.main import app

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=lambda p: p.name)
def test_python_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page.name == "own-method.md":
        pytest.skip("test_registry runs this one")
    (tmp_path / "src").symlink_to(ROOT / "src")
    monkeypatch.chdir(tmp_path)
    space: dict[str, object] = {}
    for block in blocks(page, "python"):
        exec(block, space)


COMMANDS = [line for page in PAGES for block in blocks(page, "sh") for line in block.splitlines()]
COMMANDS = [line.split("#")[0].strip() for line in COMMANDS if line.startswith("vitreous ")]


def test_there_are_commands() -> None:
    assert len(COMMANDS) >= 12


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_parse(line: str) -> None:
    words = shlex.split(line)[1:]
    command = typer.main.get_command(app)
    while hasattr(command, "commands") and words:
        command = command.commands[words.pop(0)]
    context = command.make_context(command.name, words, resilient_parsing=False)
    chosen = context.params.get("method")
    for name in (chosen or "").split(","):
        assert not name or name in METHODS


def test_the_readme_names_every_method_and_metric() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in (*METHODS, *METRICS):
        assert f"`{name}`" in text


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#]+?)\)", page.read_text(encoding="utf-8")):
            if "://" not in link:
                assert (page.parent / link).exists(), f"{page.name}: {link}"
