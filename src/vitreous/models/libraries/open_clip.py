"""open_clip, and OpenAI's CLIP, whose conventions it keeps: an image tower and a text tower."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn

from vitreous._support.optional import needs
from vitreous.errors import ModelError, nearest
from vitreous.images.preprocess import Preprocess, adapt
from vitreous.models.checkpoint import State
from vitreous.models.libraries import any as any_other
from vitreous.models.libraries.any import Loaded, Size, cropped, stated_size
from vitreous.models.libraries.any import channels as channels
from vitreous.models.libraries.any import frames as frames
from vitreous.models.libraries.any import labels as labels
from vitreous.models.libraries.any import meaning as meaning
from vitreous.models.libraries.any import name as name
from vitreous.models.libraries.grids import refuse_odd_size
from vitreous.models.libraries.hub import hub
from vitreous.models.libraries.loading import SEE, Filled, Settings, filled, hush, not_built, read_weights

PREFIX = "openclip"
PACKAGE = "open_clip_torch"
CHECKPOINTING: tuple[str, ...] = ("grad_checkpointing",)
HOOKS: tuple[str, ...] = ()
PREFIXES: tuple[str, ...] = ()
COLOURS = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
USUAL = "ViT-B-32"  # its tokenizer is that of nearly all


def owns(net: nn.Module) -> bool:
    return hasattr(net, "encode_image") or hasattr(net, "encode_text")


def classifies(net: nn.Module) -> bool | None:
    return False if hasattr(net, "encode_image") else None


def run(net: Any, images: Tensor) -> Any:
    return net.encode_image(images) if hasattr(net, "encode_image") else net(images)


def preprocess(net: Any, size: Size | None = None) -> Preprocess:
    """open_clip's evaluation transform, with the settings that the network carries."""
    if not (hasattr(net, "encode_image") and hasattr(net, "visual")):
        return any_other.preprocess(net, size)
    size = size or stated_size(net, net.visual) or (224, 224)
    config, count = getattr(net.visual, "preprocess_cfg", None) or {}, channels(net.visual) or 3
    if count != 3:
        return cropped(size, *COLOURS, channels=count)
    try:
        from open_clip.transform import PreprocessCfg, image_transform_v2

        return adapt(image_transform_v2(PreprocessCfg(**{**config, "size": size}), is_train=False))
    except ImportError:
        return cropped(size, *COLOURS)


def text(net: Any, name: str) -> Callable[[str], Any] | None:
    def embed(prompt: str) -> Any:
        import open_clip

        known = name if name in open_clip.list_models() else USUAL
        tokens = open_clip.get_tokenizer(known)([prompt], context_length=getattr(net, "context_length", None))
        return net.encode_text(tokens.to(next(net.parameters()).device))

    return embed if hasattr(net, "encode_text") else None


def load(name: str, weights: str | None, size: Size | None) -> Loaded:
    open_clip = needs("open_clip", "clip")
    name, _, tag = name.partition(":")
    known = open_clip.list_models()
    if name not in known:
        raise ModelError(f"open_clip has no model {name!r}{nearest(name, known) or SEE}")
    tags = open_clip.list_pretrained_tags_by_model(name)
    if tag and tag not in tags:
        raise ModelError(f"open_clip has no weights {tag!r} for {name}{nearest(tag, tags) or '; it has ' + few(tags)}")
    if weights is None and not tags:
        raise ModelError(f"open_clip has no weights for {name}; give a file with weights=…, or weights='random'")
    published, steps = (tag or tags[0]) if weights is None else None, None
    state = read_weights(weights)

    def build(asked: Settings) -> nn.Module:
        nonlocal steps
        options: dict[str, Any] = {} if asked.size is None else {"force_image_size": asked.size}
        reason = None
        try:
            with hush(), hub() if published else nullcontext() as reason:
                net, _, steps = open_clip.create_model_and_transforms(name, pretrained=published, **options)
        except Exception as error:
            raise not_built(name, error, weights, reason) from error
        refuse_odd_size(net, size, name)
        return net  # type: ignore[no-any-return]

    made = Filled(build(Settings(size))) if state is None else filled(build, state, size, built_size, resample)
    return Loaded(made.net, adapt(steps), name, None, None, *made[1:])


def built_size(net: Any) -> Size | None:
    return stated_size(net, net.visual)


def resample(state: State, net: nn.Module) -> State:
    """Resize the position embedding of a state to this network's."""
    from open_clip.model import resize_pos_embed

    resize_pos_embed(state, net)
    return state


def few(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (" …" if len(names) > 5 else "") or "none"


def names(everything: bool) -> list[str] | None:
    try:
        import open_clip
    except ImportError:
        return []
    found: list[str] = open_clip.list_models()
    return found if everything else [name for name in found if name.startswith("ViT")]
