"""Parse command-line options to the values that the library takes."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import typer

from vitreous.errors import OptionError
from vitreous.models.model import Model
from vitreous.registry import METHODS, METRICS, Declared, Method

Settings = dict[str, dict[str, Any]]


def parse_settings(given: list[str], metrics: bool = False) -> Settings:
    """Parse ["rollout.discard=0.9"] to {"rollout": {"discard": 0.9}}; `metrics`: also accept options of metrics."""
    settings: Settings = {}
    for text in given:
        found = re.fullmatch(r"\s*([\w-]+)\.([\w-]+)\s*=(.*)", text)
        if found is None:
            raise OptionError(f"--set {text}: write method.option=value, e.g. --set rollout.discard=0.9")
        name, option = found[1].replace("-", "_"), found[2].replace("-", "_")
        value = parse_value(found[3].strip())
        known: Declared = METRICS[name] if metrics and name in METRICS else METHODS[name]
        known.check({option: value})
        settings.setdefault(name, {})[option] = value
    return settings


def parse_value(text: str) -> Any:
    """Parse a number, a list (1,2 or [1, 2]), true, false or a word."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        pass
    return [parse_value(part.strip()) for part in text.split(",")] if "," in text else text


def pick_methods(text: str) -> tuple[list[Method], bool]:
    """The named methods without duplicates, and whether the text was "all"."""
    if text.strip() == "all":
        return list(METHODS.values()), True
    names = [name.strip().replace("-", "_") for name in text.split(",") if name.strip()]
    if not names:
        raise OptionError("--method: name at least one; see: vitreous methods")
    return [METHODS[name] for name in dict.fromkeys(names)], False


def load_model(
    spec: str | None,
    weights: str | None,
    device: str | None,
    img_size: str | None,
    labels: Path | None = None,
    probe: Path | None = None,
) -> Model:
    from vitreous.models.load import is_here, load

    if weights is None and not is_here(spec) and sys.stderr.isatty():
        typer.secho(f"loading {spec}, which is downloaded on first use …", err=True, dim=True)
    model = load(spec, weights, device, img_size=parse_size(img_size), labels=labels, probe=probe)
    if model.device.type != "cpu" or sys.stderr.isatty():
        typer.secho(f"{model.name} runs on {model.device}", err=True, dim=True)
    return model


def parse_size(text: str | None) -> int | tuple[int, int] | None:
    """Parse 384, or 224x448 (height × width)."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d+)(?:[x×,](\d+))?", text.strip())
    if found is None or not int(found[1]) or not int(found[2] or 1):
        raise OptionError(f"--img-size {text}: write one number or height×width, e.g. 384 or 224x448")
    return (int(found[1]), int(found[2])) if found[2] else int(found[1])
