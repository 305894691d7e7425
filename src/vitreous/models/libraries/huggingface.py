"""Hugging Face: networks of transformers, their configurations and their image processors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vitreous._support.optional import needs
from vitreous.errors import ModelError, WeightsError, one_line
from vitreous.images import preprocess as generic
from vitreous.images.preprocess import IMAGENET, Preprocess, scaled
from vitreous.models.checkpoint import Convert, State, some
from vitreous.models.checkpoints.read import Checkpoint, files_of
from vitreous.models.libraries import any as any_other
from vitreous.models.libraries import hf_video, open_clip, packed, vlm
from vitreous.models.libraries.any import Loaded, Size, cropped, stated_size
from vitreous.models.libraries.grids import grid_of, refuse_odd_size, resampled_note
from vitreous.models.libraries.hf_video import frames as frames
from vitreous.models.libraries.hub import cached, hub
from vitreous.models.libraries.loading import Filled, Settings, filled, hush, read_weights
from vitreous.models.libraries.tasks import (
    is_classifier,
    meaning_of,
    names_of,
    said_if_varying,
    stretches,
    usual_processor,
)

PREFIX = "hf"
PACKAGE = "transformers"
CHECKPOINTING: tuple[str, ...] = ("gradient_checkpointing",)
HOOKS: tuple[str, ...] = ("_hf_hook",)  # accelerate's
PREFIXES: tuple[str, ...] = ()
CLASSIFIERS = ("classifier", "head", "score")


def owns(net: nn.Module) -> bool:
    towers = hasattr(net, "get_image_features") or hasattr(net, "get_text_features")
    return towers or hasattr(net, "main_input_name") or is_configured(net)


def is_configured(net: nn.Module) -> bool:
    return hasattr(getattr(net, "config", None), "model_type")


def name(net: nn.Module) -> str:
    return str(getattr(getattr(net, "config", None), "_name_or_path", None) or type(net).__name__)


def inner(net: Any) -> Any:
    """The network inside an adapter of PEFT (LoRA and others), which forwards everything but its class."""
    return net.get_base_model() if hasattr(net, "get_base_model") and hasattr(net, "peft_config") else net


def labels(net: nn.Module) -> Mapping[int, str]:
    named: Mapping[Any, str] = getattr(getattr(net, "config", None), "id2label", None) or {}
    return names_of(type(inner(net)).__name__, named)


def classifies(net: nn.Module) -> bool | None:
    if hasattr(net, "get_image_features") or open_clip.owns(net):
        return False
    return is_classifier(type(inner(net)).__name__) if hasattr(net, "main_input_name") else None


def meaning(net: nn.Module) -> str | None:
    if (told := meaning_of(net, type(inner(net)).__name__)) is not None:
        return told
    config = getattr(net, "config", None)
    problem, one = getattr(config, "problem_type", None), getattr(config, "num_labels", None) == 1
    kinds = {"regression": "value", "multi_label_classification": "sigmoid"}
    kinds |= {"single_label_classification": "sigmoid" if one else "logits"}
    return kinds.get(str(problem))


def channels(net: nn.Module) -> int | None:
    """Those of the first convolution, or else those that the configuration states."""
    config = getattr(net, "config", None)
    places = config, getattr(config, "vision_config", None)
    stated = next((count for place in places if (count := getattr(place, "num_channels", None))), None)
    return any_other.channels(net) or stated


def run(net: Any, images: Tensor) -> Any:
    if packed.packs(net):
        return packed.run(net, images)
    if hasattr(net, "get_image_features"):  # a model of images and text
        return net.get_image_features(pixel_values=images, **stretch(net, images))
    if open_clip.owns(net):  # code on the hub that keeps CLIP's conventions
        return open_clip.run(net, images)
    if hasattr(net, "main_input_name"):
        return net(**hf_video.inputs(net, images), **stretch(net, images))
    return net(images)  # a network of the user's that keeps a configuration


def stretch(net: Any, images: Tensor) -> dict[str, bool]:
    """The option that a network needs if an image has another size than usual."""
    usual = own_size(net)
    other = usual is not None and tuple(images.shape[-2:]) != usual
    return {"interpolate_pos_encoding": True} if other and stretches(net) else {}


def own_size(net: Any) -> Size | None:
    config = getattr(net, "config", None)
    return stated_size(net, config, getattr(config, "vision_config", None))


def text(net: Any, name: str) -> Callable[[str], Any] | None:
    def embed(prompt: str) -> Any:
        import transformers

        tokenizer = transformers.AutoTokenizer.from_pretrained(net.config._name_or_path)
        length = "max_length" if "siglip" in net.config.model_type else True
        tokens = tokenizer([prompt], return_tensors="pt", padding=length, truncation=True)
        return net.get_text_features(**tokens.to(next(net.parameters()).device))

    return embed if hasattr(net, "get_text_features") else open_clip.text(net, name)


# ------------------------------------------------------------------------------------------------------- preprocessing


def preprocess(net: nn.Module, size: Size | None = None) -> Preprocess:
    return find_preprocess(net, size, local=True) if is_configured(net) else any_other.preprocess(net, size)


def find_preprocess(net: Any, size: Size | None, local: bool) -> Preprocess:
    """The image processor saved with the network, or else the usual one of its architecture at the network's size."""
    path = str(getattr(net.config, "_name_or_path", ""))
    if frames(net) is not None:
        return hf_video.preprocess(net, size, hf_video.saved_processor(path, local))
    saved = saved_processor(path, local)
    if saved is not None and vlm.speaks(net):
        return generic.measured(vlm.transform(net, saved))
    kind = net.config.model_type.replace("_vision_model", "").replace("_with_registers", "")
    if (channels(net) or 3) != 3:
        steps = usual_processor(kind) if saved is None else saved
        made = of_bands(net, steps, size or own_size(net) or (224, 224))
        return replace(made, assumed=saved is None)
    if packed.packs(net) and size is None:
        return packed.preprocess(net, saved)
    if saved is not None:
        return adapt(saved) if size is None else resized(saved, size)
    size = size or own_size(net) or (224, 224)
    usual = usual_processor(kind)
    made = cropped(size, *IMAGENET) if usual is None else resized(usual, size)
    return replace(made, assumed=True)


def of_bands(net: Any, processor: Any, size: Size) -> Preprocess:
    """The steps of a processor for a network of other channels than three; without one, ImageNet's colours."""
    count = channels(net) or 3
    if processor is None or not hasattr(processor, "image_mean"):
        return cropped(size, *IMAGENET, channels=count)
    told = processor.to_dict()
    before, crop = dict(told["size"]), dict(told.get("crop_size") or {}) if told.get("do_center_crop") else {}
    kept = crop["height"] / (before.get("shortest_edge") or before["height"]) if crop else 1.0
    unit = 255 * (told["rescale_factor"] if told.get("do_rescale", True) else 1.0)  # of what it normalises
    mean, std = (told["image_mean"], told["image_std"]) if told.get("do_normalize", True) else ([0.0], [1.0])
    mean, std = ([value / unit for value in listed(values)] for values in (mean, std))
    return scaled(size, mean, std, count, kept, whole="shortest_edge" not in before)


def listed(values: Any) -> list[float]:
    return [float(value) for value in ([values] if isinstance(values, int | float) else values)]


def saved_processor(name: str, local: bool) -> Any:
    """The image processor in a folder or in the local cache (unless `local`, also on the hub), if there is one."""
    from transformers import AutoImageProcessor

    try:
        return AutoImageProcessor.from_pretrained(name, local_files_only=local) if name else None
    except Exception:  # none was saved, or it needs a package that is not installed: use the usual one
        return None


def resized(processor: Any, size: Size) -> Preprocess:
    """A processor for another input size: the same share of the image, the same colours."""
    told = processor.to_dict()
    before, crop = dict(told["size"]), dict(told.get("crop_size") or {}) if told.get("do_center_crop") else {}
    edge = before.get("shortest_edge")
    kept = crop["height"] / (edge or before["height"]) if crop else 1.0  # of the resized image's side
    if edge and size[0] != size[1]:  # it would pad a square image
        return cropped(size, told["image_mean"], told["image_std"], kept)
    high, wide = (round(side / kept) for side in size)
    told["size"] = {"shortest_edge": min(high, wide)} if edge and crop else {"height": high, "width": wide}
    if crop:
        told["crop_size"] = {"height": size[0], "width": size[1]}
    try:
        return adapt(type(processor)(**told))
    except (AttributeError, KeyError, TypeError, ValueError):  # it takes no size of this kind
        return cropped(size, told["image_mean"], told["image_std"], told.get("crop_pct") or kept)


def adapt(given: Any, channels: int = 3) -> Preprocess:
    """Any preprocessing a user may give: a callable, an image processor, or a processor of images and text."""
    if hasattr(given, "image_processor") and not hasattr(given, "image_mean"):
        return adapt(given.image_processor, channels)
    if callable(given) and hasattr(given, "image_mean") and channels == 3:
        return said_if_varying(generic.measured(lambda image: hf_video.one_frame(given, image)))
    return generic.adapt(given, channels)


# ------------------------------------------------------------------------------------------------------------- loading


def load(name: str, weights: str | None, size: Size | None) -> Loaded:
    return load_base(name, weights, size)


def load_base(name: str, weights: str | None, size: Size | None, classes: int | None = None) -> Loaded:
    """`classes`: an adapter will replace the classifier by one of so many."""
    transformers = needs("transformers", "hf")
    here = Path(name).is_dir()
    if name.startswith((".", "/", "~")) and not here:
        raise ModelError(f"hf/{name}: no such folder")
    found = read_weights(weights)
    with nullcontext() if here else hub() as reason:
        config = read_config(transformers, name, reason)
        make = (
            getattr(transformers, (getattr(config, "architectures", None) or [""])[0], None) or transformers.AutoModel
        )
        if classes is not None and "Classification" not in make.__name__:
            make = transformers.AutoModelForImageClassification
        try:
            done = of_weights(make, name, config, weights, found, size, classes)
        except WeightsError:
            raise
        except Exception as error:
            raise ModelError(f"hf/{name}: cannot be loaded ({reason or one_line(error, 200)})") from error
        done.net.config._name_or_path = name  # type: ignore[union-attr]  # where its image processor is
        refuse_odd_size(done.net, size, f"hf/{name}", own_size(done.net))
        built_at = own_size(done.net)
        if size is None and built_at != stated_size(config, getattr(config, "vision_config", None)):
            size = built_at  # as its weights tell, whatever the processor beside the configuration says
        return Loaded(done.net, find_preprocess(done.net, size, local=False), Path(name).name, None, None, *done[1:])


def read_config(transformers: Any, name: str, reason: str | None) -> Any:
    """The configuration in a folder, in the cache or on the hub; `reason`: why the hub cannot be asked."""
    try:
        with hush():
            return transformers.AutoConfig.from_pretrained(name)
    except Exception as error:
        said = f"no such folder or hub model, or no connection ({reason or one_line(error, 160)})"
        raise ModelError(f"hf/{name}: {said}") from None


def of_weights(
    make: Any,
    name: str,
    config: Any,
    weights: str | None,
    found: Checkpoint | None,
    size: Size | None,
    classes: int | None = None,
) -> Filled:
    """A network with its published weights, with those of a file, or untrained."""
    if weights is None:
        net = from_folder(make, name, classes)
        before = own_size(net)
        grid = None if size in (None, before) else grid_of(net, before)
        said = () if grid is None or size is None else (resampled_note(f"hf/{name}", grid.size, size, grid.patch),)
        return Filled(net, (), said, files_here(name))
    if found is None:
        return Filled(built(make, config, Settings(None, classes)))
    return filled(lambda asked: built(make, config, asked), found, size, own_size, converter(make), stretches=True)


def built(make: Any, config: Any, asked: Settings) -> Any:
    """A network of a configuration, changed as its weights tell."""
    config = deepcopy(config)
    sees = getattr(config, "vision_config", config)
    if asked.size is not None:
        sees.image_size = asked.size[0] if asked.size[0] == asked.size[1] else list(asked.size)
    if asked.channels is not None and hasattr(sees, "num_channels"):
        sees.num_channels = asked.channels
    if asked.classes not in (None, getattr(config, "num_labels", None)) and "Classification" in make.__name__:
        config.num_labels = asked.classes  # whose names are not known
    return from_config(make, config)


def converter(make: Any) -> Convert:
    """Through transformers, which renames what its older versions called differently."""

    def convert(state: State, net: Any) -> State:
        with quiet():
            net, told = make.from_pretrained(None, config=net.config, state_dict=state, output_loading_info=True)
        strange = any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        return state if strange else dict(net.state_dict())

    return convert


def files_here(name: str) -> tuple[Path, ...]:
    """The files of the weights in a folder or in the local cache of the hub."""
    if Path(name).is_dir():
        return files_of(Path(name))
    return cached(name, ("model.safetensors", "pytorch_model.bin", "model.safetensors.index.json"))


def from_folder(made: Any, name: str, classes: int | None = None) -> Any:
    """from_pretrained, which fills what a checkpoint lacks with noise; here that is an error."""
    other = {} if classes is None else {"num_labels": classes, "ignore_mismatched_sizes": True}
    with quiet() if Path(name).is_dir() else hush():  # a download shows its progress
        net, told = made.from_pretrained(name, output_loading_info=True, **other)
    missing = sorted(key for key in told["missing_keys"] if classes is None or not key.startswith(CLASSIFIERS))
    if missing and all(key.split(".")[0] == "pooler" for key in missing):  # not part of what was trained
        net.pooler = None
    elif missing:
        raise WeightsError(f"hf/{name}: its weights do not fit {type(net).__name__}: {some('missing', missing)}")
    return net


def from_config(made: Any, config: Any) -> Any:
    return made._from_config(config) if hasattr(made, "_from_config") else made.from_config(config)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the progress bars and the advice of transformers: whatever matters is raised."""
    from transformers.utils import logging as theirs

    bars = theirs.is_progress_bar_enabled()
    theirs.disable_progress_bar()
    try:
        with hush():
            yield
    finally:
        if bars:
            theirs.enable_progress_bar()


def names(everything: bool) -> list[str] | None:
    """None: neither the hub's models nor the user's folders can be listed."""
    return None
