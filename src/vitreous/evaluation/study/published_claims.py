"""What was published about four methods: their sparsity and correlations, and nine claims that a study can check."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from vitreous._support.words import spoken
from vitreous.evaluation.study.comparison import NOTHING, Key

Quantity = Literal["sparsity", "r", "same", "dimmed", "bins"]
Rule = Literal["first", "falling", "inside"]

HARDLY = 0.3  # a smaller |r| is hardly a correlation (Cohen's "small")
LARGELY = 0.75  # of the signs
SPARSITY = {"cdam": 0.84, "token_ablation": 0.66, "attention": 0.54, "gae": 0.49}  # published, the sparsest first
CORRELATION = {
    frozenset(("cdam", "token_ablation")): 0.44,
    frozenset(("gae", "token_ablation")): 0.34,
    frozenset(("gae", "attention")): 0.75,
    frozenset(("cdam", "gae")): 0.47,
    frozenset(("cdam", "attention")): 0.12,
    frozenset(("token_ablation", "attention")): 0.10,
}
SOURCE = "1,000 ImageNet images, DINO ViT-S/8 with a linear head"
CAVEAT = f"Published: {SOURCE}; another model, head or data set may differ without either being wrong."
SEEN = "seen in a scatter plot, no number given"
LEAST = {"first": 2, "falling": 3}  # methods that a rule needs; the others need one
ANY = float("inf")


@dataclass(frozen=True)
class Claim:
    """A sentence of a paper, and what decides whether it holds.

    `quantity`: what is compared; all but `sparsity` is a relation of each method to `partner`. `rule`: the `first`
    method has more than each of the others; the values are `falling` from each to the next; or each of them lies
    `inside` the limits. In `text`, {first}, {others}, {any_other}, {all} and {order} name the methods.
    """

    id: str
    text: str
    quantity: Quantity
    methods: tuple[str, ...]
    rule: Rule
    partner: str = ""
    limits: tuple[float, float] = (0.0, ANY)  # of the differences, or of the values
    paper: str = "brocki2023class"

    def about(self, methods: Sequence[str]) -> list[str]:
        """Those of its methods that were compared; none where the claim cannot be checked with them."""
        there = [name for name in self.methods if name in methods]
        missing = self.partner and self.partner not in methods
        headless = self.rule == "first" and self.methods[0] not in there
        return [] if missing or headless or len(there) < LEAST.get(self.rule, 1) else there

    def keys(self, methods: Sequence[str]) -> list[Key]:
        """The series it is about; pairs of methods are named in the order of comparison."""
        alone = not self.partner or self.quantity == "dimmed"
        return [
            (self.quantity, name) if alone else (self.quantity, *sorted((name, self.partner), key=methods.index))
            for name in self.about(methods)
        ]

    def pairs(self, methods: Sequence[str]) -> list[tuple[Key, Key]]:
        """Which series must be the greater one, and than which."""
        keys = self.keys(methods)
        if self.rule == "first":
            return [(keys[0], other) for other in keys[1:]]
        return list(pairwise(keys)) if self.rule == "falling" else []

    def sentence(self, methods: Sequence[str]) -> str:
        """The claim about the methods that were compared."""
        there = self.about(methods)
        return self.text.format(
            first=there[0],
            others=spoken(there[1:]),
            any_other=spoken(there[1:], "or"),
            all=spoken(there),
            order=", ".join(there),
            s="s" if len(there) == 1 else "",
        )


CLAIMS = (
    Claim("sparsest", "{first} is sparser than {others}", "sparsity", tuple(SPARSITY), "first"),
    Claim("sparsity-order", "Sparsity falls in the order {order}", "sparsity", tuple(SPARSITY), "falling"),
    Claim(
        "nearer-to-ablation",
        "cdam correlates better with token_ablation than gae does",
        "r",
        ("cdam", "gae"),
        "first",
        partner="token_ablation",
    ),
    Claim(
        "nearest-to-attention",
        "gae correlates better with attention than {any_other}",
        "r",
        ("gae", "cdam", "token_ablation"),
        "first",
        partner="attention",
    ),
    Claim(
        "hardly-attention",
        f"{{all}} hardly correlate{{s}} with attention (|r| < {HARDLY})",
        "r",
        ("cdam", "token_ablation"),
        "inside",
        partner="attention",
        limits=(-HARDLY, HARDLY),
    ),
    Claim(
        "zero-attention",
        "cdam is near zero where attention is near zero",
        "bins",
        ("cdam",),
        "inside",
        partner="attention",
        limits=(-ANY, NOTHING),
    ),
    Claim(
        "same-sign",
        f"cdam and token_ablation largely agree on the sign (share of equal signs > {LARGELY})",
        "same",
        ("cdam",),
        "inside",
        partner="token_ablation",
        limits=(LARGELY, ANY),
    ),
    *(
        Claim(
            f"low-on-negative-{name}",
            "gae is low but positive on tokens that {first} calls negative",
            "dimmed",
            (name,),
            "inside",
            partner="gae",
            limits=(-ANY, 0.0),
        )
        for name in ("cdam", "token_ablation")
    ),
)
