"""The schedule of a training run: its stages, learning rates, hidden patches and loss weights, step by step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from losses import DROPPED, FORCED, REGISTERS, WHOLE

STAGES = ("forced", "whole", "dropped", "registers")
DROPS_EVERY = {"dropped": 2, "registers": 3}  # steps
DECODERS_LEARN_BY = 0.075  # of the registers stage: their term grows to its full weight until then


def cosine(progress: float, peak: float, warm_up: float, end: float = 0.0) -> float:
    """A learning rate that rises linearly, then falls from `peak` along a cosine towards `end` times the peak."""
    fall = 0.5 * (1 + math.cos(math.pi * progress))
    return peak * min(1.0, progress / warm_up) * (end + (1 - end) * fall)


@dataclass(frozen=True)
class Recipe:
    """Everything that must stay the same when a run is continued; the lengths of the stages are in steps."""

    forced: int
    whole: int
    dropped: int
    registers: int
    batch: int
    lr_scale: float
    seed: int

    @property
    def total(self) -> int:
        return self.forced + self.whole + self.dropped + self.registers

    def stage(self, step: int) -> tuple[str, int]:
        """The stage to which a step belongs, and its number there."""
        for name in STAGES:
            length: int = getattr(self, name)
            if step < length:
                return name, step
            step -= length
        raise IndexError(f"the recipe has {self.total} steps")

    def learning_rate(self, step: int) -> float:
        """One cosine for the forced stage, one for whole and dropped together, one for the registers."""
        name, number = self.stage(step)
        if name == "forced":
            return self.lr_scale * cosine((number + 0.5) / self.forced, 2e-3, 0.05, 0.05)
        if name == "registers":
            return self.lr_scale * cosine((number + 0.5) / self.registers, 5e-4, 0.025)
        return self.lr_scale * cosine((step - self.forced + 0.5) / (self.whole + self.dropped), 1e-3, 0.03)

    def batch_size(self, step: int) -> int:
        """The forced stage takes half of the images, and more steps."""
        return max(1, self.batch // 2) if self.stage(step)[0] == "forced" else self.batch

    def removed(self, step: int) -> int | None:
        """None if the student sees all patches at this step, 3 if a third of them is hidden, 2 if half of them is."""
        name, number = self.stage(step)
        every = DROPS_EVERY.get(name)
        if every is None or number % every != every - 1:
            return None
        return (3, 2)[number // every % 2]

    def weights(self, step: int) -> dict[str, float]:
        """The weights of the loss terms."""
        name, number = self.stage(step)
        if name == "forced":
            return FORCED
        if name == "registers":
            ready = min(1.0, 0.02 + number / self.registers / DECODERS_LEARN_BY)
            return {**REGISTERS, "local": REGISTERS["local"] * ready}
        return WHOLE if self.removed(step) is None else DROPPED
