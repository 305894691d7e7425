"""What a command writes of a result: the values of --format."""

from __future__ import annotations

from vitreous.errors import OptionError

FIGURES, NUMBERS, NOTHING = ("png", "svg", "pdf"), "npz", "none"
USUAL = "png,npz"


def parse_formats(text: str) -> tuple[str, ...]:
    """Parse png,npz to what is written: kinds of figures, and npz for the numbers; none: nothing."""
    known = (*FIGURES, NUMBERS)
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
