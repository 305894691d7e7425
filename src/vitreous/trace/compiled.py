"""Forward passes of a network as its user compiled it, where only the output counts.

Methods and metrics that hide pixels ask for nothing but scores, so a network that was given compiled runs compiled:
`scored_by_output` says so for the runs within it. Its first output is compared with that of the plain network; where
it differs, or does not compile here, the network runs as usual. Everything that looks inside, and every gradient (torch
compiles the gradients of all weights into one, and no map needs them), runs the plain network.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from vitreous.capture.attention import near
from vitreous.errors import ModelError
from vitreous.models.kinds_of_module import is_compiled
from vitreous.trace.perform import Batch
from vitreous.trace.run import NO_LAYER, Finished, Run
from vitreous.trace.target import Class, Contrast, Each, Graded, Neuron, Numbered, Target, Top
from vitreous.types import Images

AGREES = "does it give the same if compiled?"


@contextmanager
def scored_by_output(trace: Batch, target: Target) -> Iterator[bool]:
    """Within it, runs of this trace may be compiled; whether they are, for a target that reads the output only."""
    usual = reads_output(target) and trace.surgery is None and not (trace.inputs or trace.layout.alone)
    able = usual and trace.facts.get(AGREES) is not False and any(map(is_compiled, trace.model.net.modules()))
    before, trace.compiled = trace.compiled, able
    try:
        yield able
    finally:
        trace.compiled = before


def reads_output(target: Target) -> bool:
    """Whether the target is a function of the output alone; a compiled run does not show the embedding."""
    match target:
        case Class() | Numbered() | Top() | Neuron():
            return True
        case Graded(target=inner):
            return reads_output(inner)
        case Contrast(one=one, other=other):
            return reads_output(one) and reads_output(other)
        case Each(targets=targets):
            return all(map(reads_output, targets))
    return False


def run_compiled(trace: Batch, images: Images, rows: Sequence[int]) -> Finished | None:
    """A compiled run, which has no embedding; None if this trace asks for more than outputs, or it is not the same."""
    if not trace.compiled or trace.facts.get(AGREES) is False:
        return None
    model, device = trace.model, images.device.type
    kind = torch.get_autocast_dtype(device)
    try:
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(device, kind, trace.autocast):
            with model.compiled():
                output = model.run(images)
    except ModelError:  # it does not compile on this machine, or fails by itself, which the plain run will tell
        trace.facts.note(AGREES, False)
        return None
    if not trace.facts.knows(AGREES):
        plain = trace.run(images[:1], Run.to_output().unseen().of(rows[:1])).output
        trace.facts.note(AGREES, output.shape[1:] == plain.shape[1:] and near(output[:1], plain))
        if not trace.facts.get(AGREES):
            return None
    return Finished(images, (), NO_LAYER, output=output, embedding=output)
