"""Limits that no load on the machine can change: operations, in forwards of the same images, and passes.

What runs many variants of an image is counted on a small one, 6×6 patches, beside the one run of the image itself: the
share of a forward that a variant needs is then nearly that of 14×14 patches.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from counting import Flops, counted_runs, flops

import vitreous


@dataclass(frozen=True)
class Limit:
    """What a method or a metric may cost."""

    label: str
    name: str
    forwards: float  # by operations; where there are variants: for each, beside one forward
    passes: int
    options: dict[str, Any] = field(default_factory=dict)
    variants: int = 0  # of the small image; 0: it runs none, and the large one is used

    def found(self) -> tuple[float, int]:
        """Operations in forwards, and passes."""
        model, image = case(96 if self.variants else 224)
        if self.name in vitreous.METRICS:
            map = vitreous.explain(model, image, "attention")

            def work() -> object:
                return vitreous.evaluate(model, image, map, self.name, **self.options)

        else:

            def work() -> object:
                return vitreous.explain(model, image, self.name, **self.options)

        work()  # what is found out once for a model is no part of the cost
        with counted_runs() as runs, Flops() as counter:
            work()
        cost = counter.total / forward(model, image)
        return (cost - 1) / self.variants if self.variants else cost, len(runs)


LIMITS = [
    Limit("attention, last layer", "attention", 0.96, 1),
    Limit("attention, all layers", "attention", 1.05, 1, {"across": "mean"}),
    Limit("rollout", "rollout", 1.1, 1),
    Limit("cdam", "cdam", 0.95, 1),
    Limit("gradcam", "gradcam", 0.95, 1),
    Limit("gae", "gae", 2.1, 1),
    Limit("grad_rollout", "grad_rollout", 2.1, 1),
    Limit("legrad", "legrad", 2.0, 1),
    Limit("gradient", "gradient", 2.1, 1),
    Limit("attn_lrp", "attn_lrp", 2.4, 1),
    Limit("cp_lrp", "cp_lrp", 2.4, 1),
    Limit("centred_lrp", "centred_lrp", 2.4, 1),
    Limit("libra_fullgrad", "libra_fullgrad", 2.1, 1),
    Limit("libra_fullgrad, biases", "libra_fullgrad", 2.1, 1, {"bias": True}),
    Limit("attcat", "attcat", 2.2, 1),
    Limit("gae, Libra", "gae", 2.2, 1, {"rules": "libra"}),
    Limit("xgradcam", "xgradcam", 0.96, 1),
    Limit("hirescam", "hirescam", 0.96, 1),
    Limit("cp_lrp, gamma", "cp_lrp", 4.6, 1, {"gamma_linear": 0.25}),
    Limit("res_lrp", "res_lrp", 2.4, 1),
    Limit("transformer_attribution", "transformer_attribution", 4.8, 1),
    Limit("transformer_attribution, single", "transformer_attribution", 5.0, 1, {"precision": "single"}),
    Limit("norm_attention, rolled out", "norm_attention", 1.5, 1, {"residual": True}),
    Limit("norm_attention, last layer", "norm_attention", 1.1, 1, {"layer": -1}),
    Limit("value_zeroing, last layer", "value_zeroing", 1.25, 1, {"layer": -1}),
    Limit("beyond_intuition, a step", "beyond_intuition", 1.0, 5, {"steps": 38}, 38),
    Limit("beyond_intuition, tokens", "beyond_intuition", 4.0, 3, {"path": "tokens"}),
    Limit("integrated_gradients, a step", "integrated_gradients", 2.2, 6, {"steps": 36}, 36),
    Limit("value_zeroing, rolled out, a token", "value_zeroing", 0.5, 1, {}, 36),
    Limit("token_ablation, a token", "token_ablation", 0.88, 4, {}, 36),
    Limit("tis, a mask", "tis", 0.49, 5, {"masks": 36}, 36),
    Limit("occlusion, a patch", "occlusion", 0.9, 6, {}, 36),
    Limit("deletion, a step", "deletion", 0.92, 6, {"steps": None}, 36),
    Limit("token_deletion, a step", "token_deletion", 0.48, 37, {"steps": 36}, 36),
]


@cache
def case(size: int) -> tuple[vitreous.Model, torch.Tensor]:
    """A DeiT-Tiny for images of this size, and one of them."""
    torch.manual_seed(0)
    model = vitreous.load("deit_tiny_patch16_224", weights="random", img_size=size, device="cpu")
    return model, torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(0))


def forward(model: vitreous.Model, image: torch.Tensor) -> int:
    with torch.no_grad():
        return flops(lambda: model.net(image))


def quick() -> int:
    """A table; 1 where a limit is not kept."""
    print("| | forwards, counted | limit | passes | limit |\n|---|---|---|---|---|")
    kept = True
    for limit in LIMITS:
        forwards, runs = limit.found()
        good = forwards <= limit.forwards and runs <= limit.passes
        kept = kept and good
        cells = f"{forwards:.3f} | {limit.forwards:.3f} | {runs} | {limit.passes}"
        print(f"| {limit.label} | {cells}{'' if good else ' (missed)'} |", flush=True)
    return 0 if kept else 1
