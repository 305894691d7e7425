"""The command line and the public Python names, from the code itself."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from typing import Any

import typer

import vitreous
from vitreous.cli.main import app

GROUPS = {
    "Load and explain": (
        "load",
        "Model",
        "explain",
        "explain_targets",
        "explain_pair",
        "Pair",
        "methods",
        "ConfiguredMethod",
        "Attribution",
    ),
    "Measure": ("evaluate", "Score", "advise", "Advice"),
    "Images and words": ("ask", "Answer", "words", "Words", "Word"),
    "Counterfactuals": ("counterfactual", "Counterfactual"),
    "Look inside": ("inspect", "with_registers", "maximize", "Maximized", "cass", "check", "Check", "Trace", "Layout"),
    "Targets": ("Class", "Top", "Contrast", "Concept", "Like", "Text", "Neuron", "Target"),
    "Whole data sets": ("run_leaderboard", "Leaderboard", "run_study", "open_study", "Study"),
    "Extend": ("METHODS", "METRICS", "method", "metric", "Noted", "Case", "Measured", "Map", "Output", "Scores"),
    "Other libraries": (
        *("from_captum", "captum_style", "quantus_explain", "lightning_callback", "trainer_callback"),
        *("to_coco", "to_masks", "to_fiftyone"),
    ),
    "Around any call": ("limit_memory", "show_progress", "replay"),
    "Errors": (
        *("VitreousError", "InputError", "ModelError", "ModelWarning", "WeightsError", "Unsupported"),
        *("TargetError", "OptionError", "CaptureError", "EmptyMap", "InputWarning"),
    ),
}


# ------------------------------------------------------------------------------------------------------------------ CLI


def cli_page() -> str:
    """Every command with its arguments and options."""
    root = typer.main.get_command(app)
    lead = (
        "This page is generated from the parser; `vitreous COMMAND --help` shows the same. "
        "A wrong call prints one line and exits with code 2."
    )
    return "\n\n".join(["# Command line", lead, *commands("vitreous", root, 2)])


def commands(path: str, command: Any, level: int) -> Iterator[str]:
    for name, one in command.commands.items():
        yield f"{'#' * level} {path} {name}"
        yield inspect.cleandoc(one.help or "")
        if hasattr(one, "commands"):
            yield from commands(f"{path} {name}", one, level + 1)
        else:
            yield usage(f"{path} {name}", one)


def usage(path: str, command: Any) -> str:
    given = [p for p in command.params if p.param_type_name == "argument"]
    words = " ".join((p.metavar or p.name.upper()) if p.required else f"[{p.metavar or p.name.upper()}]" for p in given)
    rows = [f"| {spelled(p)} | {default(p)} | {p.help or ''} |" for p in command.params if p.name != "help"]
    table = "\n".join(["| option | default | what it does |", "|---|---|---|", *rows])
    return f"```text\n{path} {words + ' ' if words else ''}[OPTIONS]\n```\n\n{table}"


def spelled(p: Any) -> str:
    if p.param_type_name == "argument":
        return f"`{p.metavar or p.name.upper()}`"
    return ", ".join(f"`{word}`" for word in (*p.opts, *p.secondary_opts))


def default(p: Any) -> str:
    return "" if p.default in (None, False, ()) else f"`{str(p.default).lower() if p.default is True else p.default}`"


# --------------------------------------------------------------------------------------------------------------- Python


def api_page() -> str:
    """Every public name: its signature and what it says of itself."""
    said = ["# Python", "All names below are available as `vitreous.NAME`. Names that are not listed here may change."]
    placed = {"__version__", *(name for names in GROUPS.values() for name in names)}
    others = tuple(name for name in vitreous.__all__ if name not in placed)
    for title, names in {**GROUPS, **({"Also": others} if others else {})}.items():
        said.append(f"## {title}")
        for name in names:
            said += describe(name, getattr(vitreous, name))
    return "\n\n".join(said)


def describe(name: str, value: Any) -> list[str]:
    doc = inspect.getdoc(value) or ""
    if inspect.ismodule(value):
        return [f"### {name}", prose(doc), *(part for one in functions_of(value) for part in one)]
    if inspect.isclass(value) and issubclass(value, Exception):
        return [f"### {name}", prose(doc)]
    if hasattr(value, "dim_str"):
        return [f"### {name}", f"A tensor of floating-point numbers, `[{value.dim_str}]`."]
    if inspect.isclass(value):
        return [f"### {name}", signature(name, value), prose(doc), members(value)]
    if callable(value):
        return [f"### {name}", signature(name, value), prose(doc)]
    return [f"### {name}", prose(inspect.getdoc(type(value)) or "")]


def functions_of(module: Any) -> Iterator[list[str]]:
    """The functions a module offers."""
    for name in getattr(module, "__all__", ()):  # those of vitreous.methods have pages of their own
        value = getattr(module, name)
        if inspect.isfunction(value):
            short = module.__name__.removeprefix("vitreous.")
            yield [signature(f"{short}.{name}", value), prose(inspect.getdoc(value) or "")]


def prose(doc: str) -> str:
    """A docstring: its first paragraphs as text, lines that are set in columns as they are."""
    parts = doc.split("\n\n")
    return "\n\n".join(f"```text\n{part}\n```" if "    " in part else part for part in parts)


def signature(name: str, value: Any) -> str:
    found = inspect.signature(value)
    parameters = [p for p in found.parameters.values() if p.name not in ("self", "cls")]
    back = "" if inspect.isclass(value) or found.return_annotation is found.empty else f" -> {shown(found)}"
    short = f"{name}({', '.join(map(written, parameters))}){back}"
    if len(short) <= 88 and not any(p.kind is p.KEYWORD_ONLY for p in parameters):
        return f"```py\n{short}\n```"
    lines, starred = [], False
    for p in parameters:
        if p.kind is p.KEYWORD_ONLY and not starred:
            lines.append("    *,")
            starred = True
        lines.append(f"    {written(p)},")
    return "```py\n" + "\n".join([f"{name}(", *lines, f"){back}"]) + "\n```"


def written(p: inspect.Parameter) -> str:
    """A parameter as its author wrote it, without what only a form needs."""
    stars = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
    kind = "" if p.annotation is p.empty else f": {plain_type(p.annotation)}"
    value = "…" if repr(p.default) == "<factory>" else repr(p.default)
    return f"{stars}{p.name}{kind}" + ("" if p.default is p.empty else f" = {value}")


def plain_type(annotation: Any) -> str:
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    if not text.startswith("Annotated["):
        return text
    inner = ast.parse(text, mode="eval").body
    assert isinstance(inner, ast.Subscript) and isinstance(inner.slice, ast.Tuple)
    return ast.unparse(inner.slice.elts[0])


def shown(found: inspect.Signature) -> str:
    return plain_type(found.return_annotation)


def members(cls: type) -> str:
    """Public methods and properties, with their first sentence."""
    rows = []
    layers = [base for base in reversed(cls.__mro__) if base.__name__ == cls.__name__]  # users know one `Trace`
    for name, value in (item for layer in layers for item in vars(layer).items()):
        plain = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        doc = inspect.cleandoc(getattr(plain.fget if isinstance(plain, property) else plain, "__doc__", None) or "")
        wanted = inspect.isfunction(plain) or isinstance(plain, property) or hasattr(plain, "attrname")
        if not name.startswith("_") and wanted and doc:
            call = "" if isinstance(plain, property) or hasattr(plain, "attrname") else "()"
            first = doc.split("\n\n")[0].replace("\n", " ").replace("|", "\\|")
            rows.append(f"| `.{name}{call}` | {first} |")
    return "\n".join(["| | |", "|---|---|", *rows]) if rows else ""
