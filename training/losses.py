"""What the student learns in each stage: named terms, to be weighted and added up.

Each function compares forward passes of student and teacher. Axes as in network.py.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from network import Pass, ViT
from torch import Tensor, nn

Terms = dict[str, Tensor]

FORCED = {"classes": 0.3, "sublayers": 3.0}
WHOLE = {"classes": 1.0, "stream": 2.0}
DROPPED = {"classes": 1.0, "stream": 0.6}
REGISTERS = {
    "classes": 1.0,
    "class_token": 0.3,
    "norms": 30.0,
    "cap": 2.0,
    "early": 0.3,
    "local": 0.5,
    "moved": 0.5,
}

# A patch is outlying if its norm exceeds this multiple of its image's median norm:
LARGE_START = 1.4  # when the registers' first values are taken
LARGE_NORM = 1.3  # in the term that keeps norms alike
LARGE_TARGET = 1.25  # when attention moves to the registers
START_NOISE = 0.02
MOST_ATTENTION = 0.05  # of the class token on a single patch while no patch is dropped


def weighted(terms: Terms, weights: dict[str, float]) -> Tensor:
    return torch.stack([weights[name] * term for name, term in terms.items()]).sum()


def divergence(logits: Tensor, wanted: Tensor) -> Tensor:
    """KL divergence of the student's class distribution from the teacher's."""
    log_p, log_q = logits.float().log_softmax(-1), wanted.float().log_softmax(-1)
    return F.kl_div(log_p, log_q, log_target=True, reduction="batchmean")


def relative_error(given: Tensor, wanted: Tensor) -> Tensor:
    """Squared error over the variance of what is wanted."""
    return (given.float() - wanted.float()).square().mean() / wanted.float().var()


# ------------------------------------------------------------------------------------ forced, whole and dropped


def sublayer_errors(written: list[Tensor], stream: list[Tensor]) -> Tensor:
    """For the embedding and each sublayer, the error of what it writes [1 + 2 L]."""
    errors = [relative_error(written[0], stream[0])]
    for given, before, after in zip(written[1:], stream[:-1], stream[1:], strict=True):
        wanted = after.float() - before.float()
        errors.append((given.float() - wanted).square().mean() / wanted.square().mean())
    return torch.stack(errors)


def forced_terms(logits: Tensor, written: list[Tensor], teacher: Pass) -> Terms:
    """Every sublayer has read the teacher's stream and learns what the teacher's sublayer wrote."""
    errors = sublayer_errors(written, teacher.stream)
    return {"classes": divergence(logits, teacher.logits), "sublayers": errors.mean()}


def stream_terms(student: Pass, teacher: Pass) -> Terms:
    """Classes and residual stream, late sublayers weighing more; with dropped patches only the class token counts."""
    dropped = student.stream[0].shape != teacher.stream[0].shape
    tokens = slice(1) if dropped else slice(None)
    pairs = zip(student.stream, teacher.stream, strict=True)
    errors = torch.stack([relative_error(given[:, tokens], wanted[:, tokens]) for given, wanted in pairs])
    weights = torch.linspace(0.5, 1.5, len(errors), device=errors.device)
    return {"classes": divergence(student.logits, teacher.logits), "stream": (errors * weights).mean()}


# -------------------------------------------------------------------------------------------------- registers


def relative_norms(patches: Tensor) -> Tensor:
    """The norm of each patch token over the median of its image [B P]."""
    norms = patches.float().norm(dim=-1)
    return norms / norms.median(1, keepdim=True).values.detach()


@torch.no_grad()
def add_registers(net: ViT, batches: Iterable[Tensor]) -> ViT:
    """The network with four registers, which start as the mean input token of outlying patches, plus a little noise.

    Outlying are the patches whose norm has grown large two blocks before the end. Each register has a quarter of the
    image.
    """
    grid, width, device = net.dimensions.grid, net.dimensions.width, net.pos_embed.device
    index = torch.arange(grid**2, device=device)
    quarter = (index // grid * 2 // grid) * 2 + index % grid * 2 // grid  # [P]
    members = F.one_hot(quarter, 4).float()  # [P 4]
    total, count = torch.zeros(4, width, device=device), torch.zeros(4, device=device)
    for images in batches:
        blocks = net(images).blocks
        large = (relative_norms(blocks[-3][:, net.prefix :]) > LARGE_START).float()[..., None] * members  # [B P 4]
        total += torch.einsum("bpq,bpd->qd", large, blocks[0][:, net.prefix :])
        count += large.sum((0, 1))
    mean = total / count[:, None].clamp(min=1)
    noise = START_NOISE * torch.randn(4, width)  # from the CPU's generator, the same on every device
    grown = ViT(net.dimensions, registers=4).to(device)
    grown.load_state_dict({**net.state_dict(), "reg_token": (mean + noise.to(device))[None]})
    return grown


def moved_attention(attention: Tensor, tokens: Tensor) -> Tensor:
    """How the class token should attend in a block [B H 1 + 1 + P]: class token, all registers together, patches.

    Given are the teacher's attention [B H 1 + P] and the tokens [B 1 + P D] that entered its block. An outlying patch
    keeps no more than the mean of its ordinary neighbours; what is left over goes to the registers.
    """
    count, heads, length = attention.shape
    grid = round((length - 1) ** 0.5)
    patches = attention[..., 1:].float()
    ordinary = (relative_norms(tokens[:, 1:]) < LARGE_TARGET).float()[:, None].expand_as(patches)

    def around(values: Tensor) -> Tensor:  # mean over the 3 × 3 neighbourhood
        return F.avg_pool2d(values.reshape(count, heads, grid, grid), 3, 1, 1).flatten(2)

    kept = patches * ordinary
    mean = kept.sum(-1, keepdim=True) / ordinary.sum(-1, keepdim=True)  # decides where no neighbour is ordinary
    neighbours = (around(kept) + 0.01 * mean) / (around(ordinary) + 0.01)
    goal = torch.where(ordinary > 0, patches, torch.minimum(patches, neighbours))
    return torch.cat([attention[..., :1].float(), (patches - goal).sum(-1, keepdim=True), goal], -1)


def move_divergence(student: Tensor, goal: Tensor) -> Tensor:
    """KL divergence of the student's attention [B H T] from the goal, in which the registers are one entry."""
    prefix = student.shape[-1] - (goal.shape[-1] - 2)
    parts = [student[..., :1], student[..., 1:prefix].sum(-1, keepdim=True), student[..., prefix:]]
    given = torch.cat(parts, -1)
    return (goal * ((goal + 1e-6).log() - (given + 1e-6).log())).sum(-1).mean()


def dropped_register_terms(student: Pass, teacher: Pass, prefix: int) -> Terms:
    """The terms that need no complete image: classes, class token, norms of patches, cap on attention."""
    depth = len(student.attention)
    seen = student.attention[0].shape[-1] - prefix
    cap = MOST_ATTENTION * student.patches.shape[1] / seen
    late = student.blocks[depth // 3 + 1 :]
    norms = [(relative_norms(tokens[:, prefix:]) - LARGE_NORM).relu().square().mean() for tokens in late]
    excess = [(row[..., prefix:].amax(-1) - cap).relu().mean() for row in student.attention[-2:]]
    return {
        "classes": divergence(student.logits, teacher.logits),
        "class_token": relative_error(student.stream[-1][:, 0], teacher.stream[-1][:, 0]),
        "norms": torch.stack(norms).mean(),
        "cap": torch.stack(excess).mean(),
    }


def register_terms(student: Pass, teacher: Pass, prefix: int, decoders: nn.ModuleList) -> Terms:
    """All terms of the stage with registers: the stream is compared in the first third of the blocks only."""
    depth = len(student.attention)
    third = depth // 3
    early = [
        (relative_error(given[:, 0], wanted[:, 0]) + relative_error(given[:, prefix:], wanted[:, 1:])) / 2
        for given, wanted in zip(student.blocks[1 : third + 1], teacher.blocks[1 : third + 1], strict=True)
    ]
    read = (student.blocks[depth // 2 + 1][:, prefix:], student.blocks[depth][:, prefix:])
    decoded = [decoder(F.layer_norm(tokens, tokens.shape[-1:])) for decoder, tokens in zip(decoders, read, strict=True)]
    own = student.patches.detach()
    moved = [
        move_divergence(student.attention[block], moved_attention(teacher.attention[block], teacher.blocks[block]))
        for block in range(depth - third, depth)
    ]
    return {
        **dropped_register_terms(student, teacher, prefix),
        "early": torch.stack(early).mean(),
        "local": torch.stack([relative_error(found, own) for found in decoded]).sum(),
        "moved": torch.stack(moved).mean(),
    }
