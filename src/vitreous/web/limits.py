"""How much one server, one client and one request may take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vitreous.errors import OptionError
from vitreous.registry import Declared

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
MB = 10**6


@dataclass(frozen=True)
class Limits:
    upload_bytes: int = 20 * MB
    concept_bytes: int = 60 * MB  # of all examples together
    json_bytes: int = MB
    pixels: int = 40 * MB
    frames: int = 2_000  # of one clip
    clip_pixels: int = 400 * MB  # of all its frames
    methods: int = 16
    targets: int = 8
    maps: int = 48  # of one job
    models: int = 8  # held at once
    sheet: int = 24  # images beside each other in Compare
    pairs: int = 1000  # of maps whose agreement is asked for at a time
    examples: int = 32  # of one concept
    concepts: int = 64
    masks_bytes: int = 32 * MB  # regions that visitors drew
    answers: int = 64  # questions with their answers
    queue: int = 16  # jobs that wait for a model
    own_jobs: int = 4  # that one client may have waiting or running
    quick: int = 64  # short questions that wait for a model
    seconds: float = 30.0  # for an answer, and for a body to arrive
    job_seconds: float = 600.0
    patience: float = 5.0  # seconds that a job runs unheard before it is cancelled
    grace: float = 2.0  # … and seconds after its last listener has left
    jobs_kept: int = 256
    images_bytes: int = 500 * MB  # decoded images
    maps_bytes: int = 100 * MB
    traces_bytes: int | None = None  # None: a quarter of the memory budget
    rate: float = 100.0  # requests a second and client
    burst: int = 400
    clients: int = 10_000  # whose rates are remembered


def most(default: Any) -> int:
    """The upper limit of an integer option: enough for any sensible use."""
    return max(8 * default, 64) if isinstance(default, int) else 64


def bounded(declared: Declared) -> dict[str, Any]:
    """The JSON schema of the options, with an upper limit for every integer."""
    options: dict[str, Any] = declared.schema["options"]
    return {name: with_maximum(name, told) for name, told in options.items()}


def with_maximum(name: str, told: dict[str, Any]) -> dict[str, Any]:
    end = 2**31 - 1 if name == "seed" else most(told.get("default"))
    if told.get("type") == "integer" and "maximum" not in told:
        return {**told, "maximum": end}
    if "anyOf" in told:
        return {**told, "anyOf": [with_maximum(name, {"default": told.get("default"), **one}) for one in told["anyOf"]]}
    return told


def check_options(declared: Declared, options: Mapping[str, Any]) -> dict[str, Any]:
    """Check options, and refuse values that would occupy the server for hours."""
    values = declared.check(options)
    defaults = declared.check({})
    for name, value in values.items():
        end = 2**31 - 1 if name == "seed" else most(defaults[name])
        listed = value if isinstance(value, list | tuple) else [value]
        if len(listed) > 64 or any(isinstance(v, int) and abs(v) > end for v in listed):
            raise OptionError(f"{declared.name}.{name}={str(value)[:40]}: this server allows at most {end}")
    return values
