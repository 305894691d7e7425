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
from conftest import Run

from vitreous.cli.arguments import OLDER, Choice, Limit, spelling
from vitreous.cli.groups import grouped
from vitreous.cli.main import app
from vitreous.cli.values import parse_formats
from vitreous.errors import OptionError

CLI = Path(__file__).parents[1] / "src" / "vitreous" / "cli"
VIEWS = ("heads", "layers", "qk", "flow", "discard", "features", "registers")
SEVERAL = (" May be repeated.", " One for each --model.", " Several are separated by commas.")
DIFFERENT = {  # the same word for something else
    "--limit": {"Use only the first N images.", "Use only the first N images of each class."},
    "--overwrite": {  # of names that vitreous gives, and of a name by which a concept or a probe is called
        "Replace other results of vitreous; without it, the new ones get new names.",
        "Replace another one that the file holds; without it, that is refused.",
    },
    "--out": {"Folder for the results.", "File to write."},
    "--seed": {
        "Seed of all random choices: images, noise, intervals.",
        "Seed of the start and of the random views. Repeated: one image for each.",
    },
    "--latents": {  # of a dictionary, and for visitors of the page
        "How many; default: by the number of patches.",
        "Latents that visitors may choose as targets: a file written by vitreous concept discover, or a folder. "
        "May be repeated; default: vitreous-concepts.",
    },
    "--words": {  # of an answer, and to choose names from
        "all, the first N, or words of the answer separated by commas: token:dog,word:3.",
        "A file of words, one a line, to name latents by: needs a text tower.",
    },
    "--by": {"sae (a TopK sparse autoencoder) or nmf (semi-NMF).", "What takes its place: zero, mean or resample."},
    "--steps": {
        "Steps of the ascent.",
        "Number of shares, from 0 on.",
        "Steps of the fit; default: 1500 of sae, 60 of nmf.",
    },
    "--channels": {  # of the images, and in `inspect qk` of an attention head
        "Channels of the images that figures show: one, or three as red, green and blue; from 0: 3,2,1.",
        "Show these channels: 26,59.",
    },
    "--layer": {
        "Layer from 0, or from the end by -1, -2, …; or all.",
        "Outliers after this layer; most: after the one with the most.",
        "The block whose patch tokens are taken apart; -2 is the last but one.",
        "Cluster the patch features of this block; default: the middle one.",
    },
    "--method": {  # of the maps of an image, of its words, and rows of a leaderboard
        "One method; see: vitreous methods.",
        "gradient, gae or occlusion.",
        "Methods, separated by commas, or all; see: vitreous methods.",
        "Methods, separated by commas, or all; each may have options of its own: gae,gae:start_layer=2.",
    },
    "--metric": {  # columns of a leaderboard, and the one that decides
        "Metrics or families of them, separated by commas, or all; each may have options: srg,srg:of=logit.",
        "The faithfulness metric that decides; default: srg.",
        "Metric of faithfulness; none: not measured.",
    },
    "--model": {
        "timm name, hf/ID, torchvision/NAME, openclip/NAME, a folder or a file; default: the embedded model.",
        "The architecture, where A or B are files of weights.",
    },
    "--patch": {
        "Row and column from 0: 7,7; or readout: what the classifier reads.",
        "Similarity to this patch of the first image: row and column from 0: 5,7.",
    },
    "--centred": {  # keys, and patch features
        "Subtract the mean from the keys, as a softmax does.",
        "Subtract the mean of all patches before they are compared.",
    },
    "--workers": {  # of a study, and of a server
        "Processes that read images; with --engine ray, workers that compute.",
        "Worker processes, each with its own copy of the models; default: one for each --device.",
    },
    "--head": {"Attention head from 0; or all.", "Attention head from 0; or mean."},
}
ORDER = (
    *("--model", "--weights", "--img-size", "--bands", "--device", "--labels", "--probe", "--memory"),
    *("--method", "--metric", "--set", "--target", "--masks"),
    *("--limit", "--sample", "--seed", "--engine", "--workers", "--address", "--gpus", "--batch", "--shard"),
    *("--out", "--format", "--overwrite", "--json"),
)


SHORT = {"--method": "-x", "--target": "-t", "--model": "-m", "--weights": "-w", "--set": "-s", "--out": "-o"}
READ = {"IMAGE...", "DATA"}  # how arguments that stand for images are called
STORED = {  # resumed, not replaced
    *(f"vitreous study {kind}" for kind in ("cass", "spread", "compare", "leaderboard", "maps", "shortcuts")),
    *(f"vitreous ablate {what}" for what in ("heads", "mlps", "layers")),
    "vitreous diff",
}
DRAW = {
    "vitreous ask",
    "vitreous counterfactual",
    "vitreous words",
    "vitreous explain",
    "vitreous cass",
    "vitreous maximize",
    *(f"vitreous inspect {view}" for view in VIEWS),
}


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
def test_an_option_has_one_spelling(path: str) -> None:
    """One long name, the same short one everywhere, and none of the older spellings in any help."""
    for one in COMMANDS[path].params:
        if one.param_type_name != "option" or one.name == "help":
            continue
        long = [name for name in one.opts if name.startswith("--")]
        short = [name for name in one.opts if not name.startswith("--")]
        assert long == ["--channels", "--bands"] or len(long) == 1, long
        assert not {name.removeprefix("--") for name in long} & set(OLDER)
        assert short == [SHORT[long[0]]] if long[0] in SHORT else True
        assert not set(short) & set(SHORT.values()) or long[0] in SHORT


@pytest.mark.parametrize("path", COMMANDS)
def test_older_spellings_are_understood(path: str) -> None:
    """--methods is --method, --metrics is --metric, wherever these are; and nothing says so."""
    command = COMMANDS[path]
    given = [name for name in OLDER if f"--{OLDER[name]}" in options(command)]
    settings = {"token_normalize_func": spelling, "resilient_parsing": True}
    for name in given:
        context = command.make_context(path, [f"--{name}", "rollout"], **settings)
        assert "rollout" in context.params.values()


def test_older_spellings_for_real(run: Run, tmp_path: Path) -> None:
    assert "unknown method 'nosuch'" in run("explain", "gone.png", "--methods", "nosuch").error
    assert "No such option" in run("explain", "gone.png", "--methode", "rollout").error
    assert "--methods" not in run("evaluate", "--help").out
    assert "srg" in run("metrics", "srg").out, "a command of this name stays one"


@pytest.mark.parametrize("path", COMMANDS)
def test_what_reads_images_has_a_limit(path: str) -> None:
    names = {one.metavar for one in COMMANDS[path].params if one.param_type_name == "argument"}
    assert ("--limit" in options(COMMANDS[path])) == bool(READ & names)


@pytest.mark.parametrize("path", COMMANDS)
def test_what_writes_says_whether_it_may_overwrite(path: str) -> None:
    found = options(COMMANDS[path])
    assert ("--overwrite" in found) == ("--out" in found and path not in STORED)
    assert ("--format" in found) == (path in DRAW)


def test_formats() -> None:
    assert parse_formats("png,npz") == ("png", "npz")
    assert parse_formats(" .SVG , pdf,svg") == ("svg", "pdf")
    assert parse_formats("none") == ()
    for text in ("jpeg", "none,png", "", ","):
        with pytest.raises(OptionError, match="--format"):
            parse_formats(text)


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
    assert list(options(made))[:4] == ["--inputs", "--limit", "--sample", "--seed"] and made.help == "Do it."


def test_a_group_may_extend_another() -> None:
    @dataclass(frozen=True)
    class More(Choice):
        more: Limit = 4

    assert More(limit=1).more == 4 and list(More.__dataclass_fields__) == ["inputs", "limit", "sample", "seed", "more"]


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
