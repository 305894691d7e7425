"""The values of options: --format, --img-size and --channels."""

from __future__ import annotations

import re

from vitreous.errors import OptionError

FIGURES, NUMBERS, NOTHING, FILM = ("png", "svg", "pdf"), "npz", "none", "gif"
USUAL = "png,npz"


def parse_formats(text: str, films: bool = False) -> tuple[str, ...]:
    """Parse png,npz to what is written: kinds of figures, npz for the numbers, gif for a film; none: nothing."""
    known = (*FIGURES, NUMBERS, *([FILM] if films else []))
    words = [word.strip().lower().removeprefix(".") for word in text.split(",") if word.strip()]
    if words == [NOTHING]:
        return ()
    for word in words:
        if word not in known:
            alone = " (none stands alone)" if word == NOTHING else ""
            raise OptionError(f"--format {text}: give {', '.join(known)} or none{alone}")
    if not words:
        raise OptionError(f"--format is empty; give {', '.join(known)} or none")
    return tuple(dict.fromkeys(words))


def parse_bands(text: str | None) -> tuple[int, ...] | None:
    """Parse 3 or 3,2,1."""
    if text is None:
        return None
    if re.fullmatch(r"\d+(,\d+,\d+)?", text.replace(" ", "")) is None:
        raise OptionError(f"--channels {text}: write one channel number or three, from 0, e.g. 3 or 3,2,1")
    return tuple(int(part) for part in text.split(","))


def parse_size(text: str | None) -> int | tuple[int, int] | None:
    """Parse 384, or 224x448 (height × width)."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d+)(?:[x×,](\d+))?", text.strip())
    if found is None or not int(found[1]) or not int(found[2] or 1):
        raise OptionError(f"--img-size {text}: write one number or height×width, e.g. 384 or 224x448")
    return (int(found[1]), int(found[2])) if found[2] else int(found[1])
