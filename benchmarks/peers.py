"""The same maps by other means: libraries of the package index, and plain PyTorch with hooks.

A peer is a function of a setting (model, images, classes) that gives a map. `of` names the row of `bench.py` beside
which it is timed, `within` the largest difference, as a share of the largest value, that still counts as the same map;
None: chance is drawn differently, so that only the cost can be compared.

Peers run at their best: weights ask for no gradient, copies go in batches. The authors' own repositories of rollout,
gae and cdam are not on the package index; what stands here for them, written from the formulas, is the usual way with
timm: `fused_attn` off, a hook on each attention's softmax. Both hold for timm's ViTs only.
"""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from metrics import Setting

COPIES = 16  # in a batch
Map = Tensor  # [B h w] or [B Y X]
PEERS: dict[str, list[Peer]] = defaultdict(list)


@dataclass(frozen=True)
class Peer:
    """Another way to a map."""

    name: str
    run: Callable[[Setting], Map]
    package: str  # to install; empty: none
    within: float | None
    match: Callable[[Map], Map]  # what it does to a map, so that ours can be treated alike


def peer(
    of: str, name: str, package: str = "", within: float | None = 1e-3, match: Callable[[Map], Map] = lambda map: map
) -> Callable[[Callable[[Setting], Map]], Callable[[Setting], Map]]:
    def declare(run: Callable[[Setting], Map]) -> Callable[[Setting], Map]:
        PEERS[of].append(Peer(name, run, package, within, match))
        return run

    return declare


def need(module: str, package: str) -> Any:
    """Another library, or an error that says how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{module} does not import ({error}); pip install {package}") from error


# -------------------------------------------------------------------------------------------------------------- captum


@peer("gradient", "captum Saliency", "captum")
def saliency(given: Setting) -> Map:
    captum = need("captum.attr", "captum")
    return captum.Saliency(given.model.net).attribute(leaf(given), given.targets).mean(1)


@peer("input_x_gradient", "captum InputXGradient", "captum")
def input_x_gradient(given: Setting) -> Map:
    captum = need("captum.attr", "captum")
    return captum.InputXGradient(given.model.net).attribute(leaf(given), given.targets).sum(1)


@peer("integrated_gradients, 50 steps", "captum IntegratedGradients", "captum")
def integrated_gradients(given: Setting) -> Map:
    captum = need("captum.attr", "captum")
    many = max(COPIES, len(given.images))
    found = captum.IntegratedGradients(given.model.net).attribute(
        given.images, target=given.targets, n_steps=50, method="gausslegendre", internal_batch_size=many
    )
    return found.sum(1)


@peer("smoothgrad, 16 samples", "captum NoiseTunnel(Saliency)", "captum", within=None)
def smoothgrad(given: Setting) -> Map:
    captum = need("captum.attr", "captum")
    tunnel = captum.NoiseTunnel(captum.Saliency(given.model.net))
    many = max(1, COPIES // len(given.images))
    found = tunnel.attribute(
        leaf(given), nt_samples=16, nt_samples_batch_size=many, stdevs=0.5, target=given.targets, abs=False
    )
    return found.abs().mean(1)


@peer("occlusion, zeros", "captum Occlusion", "captum")
def occlusion(given: Setting) -> Map:
    captum = need("captum.attr", "captum")
    y, x = given.patch
    found = captum.Occlusion(given.model.net).attribute(
        given.images, (3, y, x), (3, y, x), 0, given.targets, perturbations_per_eval=COPIES
    )
    return found[:, 0, ::y, ::x]


@peer("occlusion, zeros", "captum FeatureAblation", "captum")
def feature_ablation(given: Setting) -> Map:
    captum = need("captum.attr", "captum")
    y, x = given.patch
    numbers = torch.arange(given.maps[0].numel(), device=given.images.device).view(1, 1, *given.maps.shape[1:])
    patches = numbers.repeat_interleave(y, 2).repeat_interleave(x, 3)
    found = captum.FeatureAblation(given.model.net).attribute(
        given.images, 0, given.targets, feature_mask=patches, perturbations_per_eval=COPIES
    )
    return found[:, 0, ::y, ::x]


def leaf(given: Setting) -> Tensor:
    return given.images.clone().requires_grad_()


# ---------------------------------------------------------------------------------------------------- pytorch-grad-cam


def as_a_picture(map: Map, size: tuple[int, int] = (224, 224)) -> Map:
    """What pytorch-grad-cam makes of a map: the positive part, from 0 to 1, as large as the image."""
    scale = need("pytorch_grad_cam.utils.image", "grad-cam").scale_cam_image
    return torch.from_numpy(scale(scale(map.clamp_min(0).cpu().numpy(), size)[:, None].mean(1)))


@peer("gradcam", "pytorch-grad-cam GradCAM", "grad-cam", match=as_a_picture)
def gradcam(given: Setting) -> Map:
    return cam(given, leaf(given))


@peer("gradcam", "pytorch-grad-cam GradCAM, last norm only", "grad-cam", match=as_a_picture)
def gradcam_at_best(given: Setting) -> Map:
    """Where nothing before the layer asks for a gradient, so that the backward pass ends there."""
    weight = given.model.net.blocks[-1].norm1.weight
    weight.requires_grad_(True)
    try:
        return cam(given, given.images)
    finally:
        weight.requires_grad_(False)
        weight.grad = None


def cam(given: Setting, images: Tensor) -> Map:
    library = need("pytorch_grad_cam", "grad-cam")
    targets = importlib.import_module("pytorch_grad_cam.utils.model_targets")
    net, prefix = given.model.net, given.model.layout.prefix

    def placed(tokens: Tensor) -> Tensor:
        return tokens[:, prefix:].unflatten(1, given.maps.shape[1:]).permute(0, 3, 1, 2).float()

    chosen = [targets.ClassifierOutputTarget(number) for number in given.classes]
    with library.GradCAM(net, [net.blocks[-1].norm1], reshape_transform=placed) as method:
        return torch.from_numpy(np.asarray(method(images, chosen)))


# ----------------------------------------------------------------------------------------------------------------- lxt


@peer("attn_lrp", "lxt AttnLRP", "lxt")
def attn_lrp(given: Setting) -> Map:
    return lxt_relevance(given, "wrap_attention_forward")


@peer("cp_lrp", "lxt CP-LRP", "lxt")
def cp_lrp(given: Setting) -> Map:
    return lxt_relevance(given, "cp_wrap_attention_forward")


def lxt_relevance(given: Setting, rule: str) -> Map:
    """lxt.efficient's rules for norms, activations and attention, put into timm's modules: it ships none for them."""
    patches = lxt_patches()
    attend = F.scaled_dot_product_attention
    ruled = getattr(patches, rule)(lambda _, *args, **kwargs: attend(*args, **kwargs))
    gelu, norm = nn.GELU.forward, type(given.model.net.norm)
    with (
        mock.patch.object(
            nn.GELU, "forward", lambda self, x: patches.identity_rule_implicit(lambda y: gelu(self, y), x)
        ),
        mock.patch.object(norm, "forward", patches.layer_norm_forward),
        mock.patch.object(F, "scaled_dot_product_attention", lambda *args, **kwargs: ruled(None, *args, **kwargs)),
        leaf_at(given.model.net.blocks[0]) as tokens,
    ):
        (grad,) = torch.autograd.grad(score(given), tokens[0])
    return on_grid(given, (tokens[0].detach() * grad).sum(-1))


def lxt_patches() -> Any:
    """lxt.efficient asks transformers, for BERT, for a function that newer ones have not; here it need not be there."""
    with mock.patch("transformers.pytorch_utils.find_pruneable_heads_and_indices", None, create=True):
        return need("lxt.efficient.patches", "lxt")


# ------------------------------------------------------------------------------------------------ plain PyTorch, hooks

HOOKS = "plain PyTorch, hooks"


@peer("attention, all layers", HOOKS)
def attention(given: Setting) -> Map:
    with softmaxes(given.model.net) as seen, torch.no_grad():
        given.model.net(given.images)
    return on_grid(given, torch.stack([a[:, :, 0].mean(1) for a in seen]).mean(0))


@peer("rollout", HOOKS)
def rollout(given: Setting) -> Map:
    with softmaxes(given.model.net) as seen, torch.no_grad():
        given.model.net(given.images)
        eye = eye_of(seen[0])
        rolled = eye.expand(len(seen[0]), -1, -1)
        for a in seen:
            rolled = (a.mean(1) + eye) / 2 @ rolled
    return on_grid(given, rolled[:, 0])


@peer("gae", HOOKS)
def gae(given: Setting) -> Map:
    with softmaxes(given.model.net, grad=True) as seen:
        grads = torch.autograd.grad(score(given), seen)
    relevance = eye_of(seen[0]).expand(len(seen[0]), -1, -1)
    for a, grad in zip(seen, grads):
        relevance = relevance + (a.detach() * grad).clamp_min(0).mean(1) @ relevance
    return on_grid(given, relevance[:, 0])


@peer("grad_rollout", HOOKS)
def grad_rollout(given: Setting) -> Map:
    with softmaxes(given.model.net, grad=True) as seen:
        grads = torch.autograd.grad(score(given), seen)
    eye = eye_of(seen[0])
    rolled = eye.expand(len(seen[0]), -1, -1)
    for a, grad in zip(seen, grads):
        factor = (a.detach() * grad).mean(1).clamp_min(0) + eye
        rolled = factor / factor.sum(-1, keepdim=True) @ rolled
    return on_grid(given, rolled[:, 0])


@peer("cdam", HOOKS)
def cdam(given: Setting) -> Map:
    with leaf_at(given.model.net.blocks[-1].attn) as tokens:
        (grad,) = torch.autograd.grad(score(given), tokens[0])
    return on_grid(given, (tokens[0].detach() * grad).sum(-1))


@peer("token_ablation", HOOKS)
def token_ablation(given: Setting) -> Map:
    """Copies of the tokens that enter the first block, each without one of them."""
    net, count, prefix = given.model.net, given.maps[0].numel(), given.model.layout.prefix
    tokens = count + prefix
    others = torch.stack([torch.tensor([j for j in range(tokens) if j != i]) for i in range(prefix, tokens)])
    with torch.no_grad():
        whole = net(given.images)[0, given.targets[0]]
        falls = []
        for part in others.to(given.images.device).split(COPIES):
            hook = net.blocks[0].register_forward_pre_hook(lambda _, args, part=part: args[0][0, part])
            falls.append(whole - net(given.images)[:, given.targets[0]])
            hook.remove()
    return torch.cat(falls).view(1, *given.maps.shape[1:])


def eye_of(a: Tensor) -> Tensor:
    return torch.eye(a.shape[-1], device=a.device, dtype=a.dtype)


def score(given: Setting) -> Tensor:
    return given.model.net(given.images).gather(1, given.targets[:, None]).sum()


def on_grid(given: Setting, values: Tensor) -> Map:
    """One value a token [B N], without those in front of the patches."""
    return values[:, given.model.layout.prefix :].reshape(given.maps.shape).float()


@contextmanager
def softmaxes(net: Any, grad: bool = False) -> Iterator[list[Tensor]]:
    """The attention of every block, [B H N N] each; the first begins the graph, where one is asked for."""
    seen: list[Tensor] = []

    def note(module: nn.Module, args: Any, a: Tensor) -> Tensor:
        if grad and not seen:
            a = a.detach().requires_grad_()
        seen.append(a)
        return a

    fused = [block.attn.fused_attn for block in net.blocks]
    hooks = [block.attn.attn_drop.register_forward_hook(note) for block in net.blocks]
    for block in net.blocks:
        block.attn.fused_attn = False
    try:
        yield seen
    finally:
        for hook, block, was in zip(hooks, net.blocks, fused):
            hook.remove()
            block.attn.fused_attn = was


@contextmanager
def leaf_at(module: nn.Module) -> Iterator[list[Tensor]]:
    """What enters a module, where gradients then begin."""
    seen: list[Tensor] = []

    def enter(module: nn.Module, args: Any) -> Any:
        seen.append(args[0].detach().requires_grad_())
        return (seen[0], *args[1:])

    hook = module.register_forward_pre_hook(enter)
    try:
        yield seen
    finally:
        hook.remove()
