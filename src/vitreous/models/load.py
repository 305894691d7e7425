"""Models by name: timm, Hugging Face, torchvision, open_clip, a local checkpoint, or the one in the package."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from vitreous._support.optional import needs
from vitreous.errors import ModelError, WeightsError, nearest, one_line, one_of
from vitreous.images import preprocess
from vitreous.models.checkpoint import Blank, State, bare_names, classes_in, fill, read_state, some
from vitreous.models.labels import read_labels
from vitreous.models.model import Model

LOG = logging.getLogger(__name__)
ASSETS = Path(__file__).parents[1] / "assets"
EMBEDDED = "vitreous_tiny"
RANDOM = "random"
Size = tuple[int, int]


def load(
    spec: str | None = None,
    weights: str | Path | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    *,
    img_size: int | Size | None = None,
    labels: Sequence[str] | Mapping[int, str] | str | Path | None = None,
    probe: str | Path | None = None,
) -> Model:
    """A model by name.

    "timm/NAME" or NAME, "hf/ID" or "hf/FOLDER", "torchvision/NAME", "openclip/NAME[:TAG]"; nothing: the embedded one.
    `weights`: a .safetensors or .pth file, or "random"; nothing: the published ones. `img_size`: another input size.
    `probe`: a file of `vitreous probe train`, whose classes take the place of the model's own.
    """
    if probe is not None and labels is not None:
        raise ModelError("a probe brings its own labels; give either labels or a probe")
    spec = EMBEDDED if spec is None else spec
    source, _, name = spec.partition("/")
    if source not in LOADERS:
        source, name = ("embedded" if spec == EMBEDDED else "timm"), spec
    where, kind = pick_device(device), to_dtype(dtype)
    model = LOADERS[source](name, None if weights is None else str(weights), to_size(img_size))
    if labels is not None:
        given = labels if isinstance(labels, Mapping) or not isinstance(labels, str | Path) else read_labels(labels)
        model = Model(model.net, model._preprocess, given, name=model.name, forward=model._forward, classifier=True)
    if probe is not None:
        from vitreous.models.probe.attach import attach

        model = attach(model, probe)
    model.net.eval().requires_grad_(False)
    model.to(where, kind)
    LOG.info("%s runs on %s in %s", model.name, model.device, model.dtype)
    return model


def pick_device(device: str | torch.device | None) -> torch.device:
    """The one asked for, or the GPU if there is one."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
        return torch.device(device)
    except Exception as error:  # each backend has its own way to say that it is not there
        raise ModelError(f"there is no device {str(device)!r} here ({one_line(error, 80)}); try cpu") from None


def to_dtype(dtype: torch.dtype | str | None) -> torch.dtype:
    if isinstance(dtype, torch.dtype) or dtype is None:
        return dtype or torch.float32
    names = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype not in names:
        raise ModelError(f"unknown dtype {dtype!r}; known: {one_of(names)}")
    return names[dtype]


def to_size(size: int | Size | None) -> Size | None:
    """Height and width."""
    pair = (size, size) if isinstance(size, int) else size
    if pair is not None and (len(pair) != 2 or not all(isinstance(side, int) and side > 0 for side in pair)):
        raise ModelError(f"img_size={size!r}: give one number or (height, width), e.g. 384 or (224, 448)")
    return None if pair is None else (pair[0], pair[1])


# ------------------------------------------------------------------------------------------------ the sources


def load_embedded(name: str, weights: str | None, size: Size | None) -> Model:
    import timm

    state = None if weights == RANDOM else read_state(weights or str(ASSETS / f"{EMBEDDED}.safetensors"))
    options: dict[str, Any] = {} if size is None else {"img_size": size}
    if state is None or any(key.endswith("reg_token") for key in state):  # a plain DeiT-Tiny of the user has none
        options |= {"reg_tokens": 4, "no_embed_class": True}
    classes = {} if state is None else classes_in(state)
    with nullcontext() if state is None else Blank():
        net = timm.create_model("deit_tiny_patch16_224", **options, **classes)
    if state is not None:
        fill(net, state, weights or EMBEDDED)
    labels = (ASSETS / "imagenet1k.txt").read_text(encoding="utf-8").splitlines()
    known = labels if net.num_classes == len(labels) else None
    return Model(net, preprocess.default(size or (224, 224), *preprocess.IMAGENET), known, name=EMBEDDED)


def load_timm(name: str, weights: str | None, size: Size | None) -> Model:
    import timm

    architecture = name.partition(".")[0]
    known = timm.list_models()
    if not name.startswith(("hf-hub:", "hf_hub:", "local-dir:")) and architecture not in known:
        raise ModelError(f"unknown model {name!r}{hint(name) or nearest(architecture, known) or SEE}")
    options: dict[str, Any] = {} if size is None else {"img_size": size}
    state = None if weights in (None, RANDOM) else read_state(str(weights))
    if state is not None:
        options |= classes_in(state)
    try:
        with hush(), nullcontext() if state is None else Blank():
            net = timm.create_model(name, pretrained=weights is None, **options)
    except Exception as error:
        if "img_size" in str(error) and size is not None:
            raise ModelError(f"{name} does not take another img_size ({one_line(error, 120)})") from error
        raise no_download(name, error) if weights is None else ModelError(f"{name}: {one_line(error)}") from error
    if state is not None:
        fill(net, state, str(weights))
    return Model(net, preprocess.of_timm(net, size), name=name)


SEE = "; see: vitreous models"


def hint(name: str) -> str:
    """What a user may have meant who gave something else than the name of a timm model."""
    path = Path(name)
    if path.is_dir() or (name.count("/") == 1 and not path.suffix):
        return f"; a Hugging Face folder or ID is written hf/{name}"
    if path.suffix in (".safetensors", ".pth", ".pt", ".bin", ".ckpt"):
        return (
            "; a file of weights needs its architecture: load(NAME, weights=FILE), on the command line -m NAME -w FILE"
        )
    return ""


def load_hf(name: str, weights: str | None, size: Size | None) -> Model:
    transformers = needs("transformers", "hf")
    if name.startswith((".", "/", "~")) and not Path(name).is_dir():
        raise ModelError(f"hf/{name}: no such folder")
    try:
        with hush():
            config = transformers.AutoConfig.from_pretrained(name)
    except Exception as error:
        raise ModelError(f"hf/{name}: no such folder or hub model, or no connection ({one_line(error, 160)})") from None
    wanted = (getattr(config, "architectures", None) or [""])[0]
    made = getattr(transformers, wanted, None) or transformers.AutoModel
    try:
        net = from_folder(made, name) if weights is None else from_config(made, config)
        if weights not in (None, RANDOM):
            fill(net, read_state(str(weights)), str(weights))
    except WeightsError:
        raise
    except Exception as error:
        raise ModelError(f"hf/{name}: cannot be loaded ({one_line(error, 200)})") from error
    net.config._name_or_path = name  # where its image processor lies
    return Model(net, preprocess.of_hf(net, size, local=False), name=Path(name).name)


def from_folder(made: Any, name: str) -> Any:
    """from_pretrained, which fills what a checkpoint lacks with noise; here that is an error."""
    with quiet() if Path(name).is_dir() else hush():  # a download shows how far it is
        net, told = made.from_pretrained(name, output_loading_info=True)
    missing = sorted(told["missing_keys"])
    if missing and all(key.split(".")[0] == "pooler" for key in missing):  # not part of what was trained
        net.pooler = None
    elif missing:
        raise WeightsError(f"hf/{name}: its weights do not fit {type(net).__name__}: {some('missing', missing)}")
    return net


def from_config(made: Any, config: Any) -> Any:
    return made._from_config(config) if hasattr(made, "_from_config") else made.from_config(config)


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' progress bars and advice: what matters is raised."""
    from transformers.utils import logging as theirs

    bars = theirs.is_progress_bar_enabled()
    theirs.disable_progress_bar()
    try:
        with hush():
            yield
    finally:
        if bars:
            theirs.enable_progress_bar()


def load_torchvision(name: str, weights: str | None, size: Size | None) -> Model:
    import torchvision

    known = torchvision.models.list_models()
    if name not in known:
        raise ModelError(f"torchvision has no model {name!r}{nearest(name, known) or SEE}")
    usual = torchvision.models.get_model_weights(name).DEFAULT
    state = None if weights in (None, RANDOM) else read_state(str(weights))
    options: dict[str, Any] = {} if state is None else classes_in(state)
    if size is not None:
        options["image_size"] = one_side(size, name)
    try:
        if weights is None and size is not None:
            state = usual.get_state_dict(progress=True, check_hash=True)
        ready = usual if weights is None and size is None else None
        with nullcontext() if state is None else Blank():
            net = torchvision.models.get_model(name, weights=ready, **options)
    except Exception as error:
        if "image_size" in str(error) and size is not None:
            raise ModelError(f"{name} does not take another img_size ({one_line(error, 120)})") from error
        raise no_download(name, error) if weights is None else ModelError(f"{name}: {one_line(error)}") from error
    if state is not None:
        fill(net, resample(net, state), str(weights or name))
    labels = usual.meta["categories"] if options.get("num_classes", 1000) == len(usual.meta["categories"]) else None
    side = getattr(net, "image_size", None)
    steps = preprocess.adapt(usual.transforms())
    steps = steps if side is None or steps.size == (side, side) else preprocess.of_module(net)
    return Model(net, steps, labels, name=name, classifier=True)


def one_side(size: Size, name: str) -> int:
    if size[0] != size[1]:
        raise ModelError(f"{name} takes square images only, not {size[0]}×{size[1]}")
    return size[0]


def resample(net: Any, state: State) -> State:
    """torchvision's position embedding at the size of this network."""
    from torchvision.models.vision_transformer import VisionTransformer, interpolate_embeddings

    key = "encoder.pos_embedding"
    state = bare_names(net.state_dict(), state)
    if (
        not isinstance(net, VisionTransformer)
        or key not in state
        or state[key].shape == net.encoder.pos_embedding.shape
    ):
        return state
    return dict(interpolate_embeddings(net.image_size, net.patch_size, OrderedDict(state)))


def load_openclip(name: str, weights: str | None, size: Size | None) -> Model:
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
    options: dict[str, Any] = {} if size is None else {"force_image_size": size}
    try:
        with hush():
            published = (tag or tags[0]) if weights is None else None
            net, _, steps = open_clip.create_model_and_transforms(name, pretrained=published, **options)
    except Exception as error:
        raise no_download(name, error) if weights is None else ModelError(f"{name}: {one_line(error)}") from error
    if weights not in (None, RANDOM):
        fill(net, read_state(str(weights)), str(weights))
    return Model(net, steps, name=name, forward=net.encode_image, classifier=False)


def few(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (" …" if len(names) > 5 else "") or "none"


@contextmanager
def hush() -> Iterator[None]:
    """Without log lines: what matters is raised."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)


LOADERS: dict[str, Callable[[str, str | None, Size | None], Model]] = {
    "embedded": load_embedded,
    "timm": load_timm,
    "hf": load_hf,
    "torchvision": load_torchvision,
    "openclip": load_openclip,
}


TRANSFORMERS = [  # timm's files of them
    *("beit", "cait", "deit", "eva", "naflexvit", "swin_transformer", "swin_transformer_v2"),
    *("vision_transformer", "vision_transformer_relpos", "xcit"),
]


def catalogue(everything: bool = True) -> dict[str, list[str]]:
    """The names that `load` knows, by source; or only those of Vision Transformers."""
    import timm
    import torchvision

    timm_names = timm.list_models(module="" if everything else TRANSFORMERS)
    vision = torchvision.models.list_models(module=torchvision.models)
    found = {"embedded": [EMBEDDED], "timm": timm_names, "torchvision": vision, "openclip": []}
    try:
        import open_clip

        found["openclip"] = open_clip.list_models()
    except ImportError:
        pass
    if not everything:
        found["torchvision"] = [name for name in vision if name.startswith(("vit", "swin"))]
        found["openclip"] = [name for name in found["openclip"] if name.startswith("ViT")]
    return found


def no_download(name: str, error: Exception) -> ModelError:
    return ModelError(
        f"the weights of {name} could not be downloaded ({one_line(error, 120)}); "
        "give a file with weights=…, or weights='random' for untrained ones"
    )
