"""The options of the command line: each declared once, with one help text and in one order."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer

from vitreous.cli.arguments import Choice, Limit, grouped
from vitreous.cli.main import app

CLI = Path(__file__).parents[1] / "src" / "vitreous" / "cli"
SEVERAL = (" May be repeated.", " One for each --model.", " Several are separated by commas.")
DIFFERENT = {  # the same word for something else
    "--out": {"Folder for the results.", "File to write."},
    "--seed": {
        "Seed of all random choices: images, noise, intervals.",
        "Seed of the start and of the random views. Repeated: one image for each.",
    },
    "--steps": {"Steps of the ascent.", "Number of shares, from 0 on."},
    "--channels": {  # of the images, and in `inspect qk` of an attention head
        "Channels of the images that figures show: one, or three as red, green and blue; from 0: 3,2,1.",
        "Show these channels: 26,59.",
    },
    "--layer": {
        "Layer from 0, or from the end by -1, -2, …; or all.",
        "Outliers after this layer; most: after the one with the most.",
    },
    "--method": {  # of the maps of an image, and rows of a leaderboard
        "Methods, separated by commas, or all; see: vitreous methods.",
        "Methods, separated by commas, or all; each may have options of its own: gae,gae:start_layer=2.",
    },
    "--head": {"Attention head from 0; or all.", "Attention head from 0; or mean."},
}
ORDER = (
    *("--model", "--weights", "--img-size", "--bands", "--device", "--labels", "--probe", "--memory"),
    *("--method", "--metrics", "--set", "--target", "--masks"),
    *("--limit", "--sample", "--seed", "--engine", "--workers", "--address", "--gpus", "--batch", "--shard"),
    *("--out", "--format", "--json"),
)


def commands(path: str = "vitreous", command: Any = None) -> Iterator[tuple[str, Any]]:
    command = command or typer.main.get_command(app)
    if not hasattr(command, "commands"):
        yield path, command
        return
    for name, one in command.commands.items():
        yield from commands(f"{path} {name}", one)


COMMANDS = dict(commands())


def options(command: Any) -> dict[str, str]:
    """The long names of a command's options, each with its help."""
    found = [p for p in command.params if p.param_type_name == "option" and p.name != "help"]
    return {p.opts[0]: p.help or "" for p in found}


def test_an_option_says_the_same_in_every_command() -> None:
    texts: dict[str, set[str]] = defaultdict(set)
    for command in COMMANDS.values():
        for name, text in options(command).items():
            for more in SEVERAL:
                text = text.removesuffix(more)
            texts[name].add(text)
    assert {name: found for name, found in texts.items() if len(found) > 1} == DIFFERENT


@pytest.mark.parametrize("path", COMMANDS)
def test_options_stand_in_one_order(path: str) -> None:
    found = [ORDER.index(name) for name in options(COMMANDS[path]) if name in ORDER]
    assert found == sorted(found)


@pytest.mark.parametrize("path", COMMANDS)
def test_help_is_plain_english(path: str) -> None:
    """A sentence for each: it begins with a capital letter or a value, and says image."""
    command = COMMANDS[path]
    for text in [command.help, *(p.help for p in command.params if p.name != "help")]:
        assert text and text.strip().endswith("."), text
        assert not {"picture", "pictures", "photo", "photos"} & set(text.lower().replace(".", " ").split()), text
        assert "so many" not in text


def test_a_group_is_its_options() -> None:
    seen: dict[str, Any] = {}

    @grouped
    def command(name: str, *, choice: Choice, out: Annotated[int, typer.Option("--out")] = 3) -> None:
        """Do it."""
        seen.update(name=name, choice=choice, out=out)

    one = typer.Typer()
    one.command()(command)
    made = typer.main.get_command(one)
    made.main(["a", "--limit", "2", "--seed", "5"], standalone_mode=False)
    assert seen == {"name": "a", "choice": Choice(limit=2, seed=5), "out": 3}
    assert list(options(made))[:4] == ["--limit", "--sample", "--seed", "--out"] and made.help == "Do it."


def test_a_group_may_extend_another() -> None:
    @dataclass(frozen=True)
    class More(Choice):
        more: Limit = 4

    assert More(limit=1).more == 4 and list(More.__dataclass_fields__) == ["limit", "sample", "seed", "more"]


@pytest.mark.parametrize("file", sorted(CLI.glob("*.py")), ids=lambda file: file.name)
def test_modules_and_functions_stay_short(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 350
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and node.end_lineno is not None:
            assert node.end_lineno - node.lineno < 60, f"{file.name}: {node.name}"


@pytest.mark.process
def test_help_needs_no_torch() -> None:
    code = (
        "import sys; from vitreous.cli.main import app\n"
        "for words in ([], ['explain'], ['study', 'cass'], ['inspect', 'qk']): "
        "app([*words, '--help'], standalone_mode=False)\n"
        "sys.exit(3 if {'torch', 'numpy'} & set(sys.modules) else 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0
