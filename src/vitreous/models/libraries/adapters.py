"""Adapters of PEFT (LoRA and others) on a base: read as data, verified, and merged into the weights."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from vitreous._support.optional import needs
from vitreous.errors import ModelError, VitreousError, WeightsError, one_line
from vitreous.models.checkpoint import State, classes_in, read_safetensors, some
from vitreous.models.checkpoints.pickles import read_pickle, tensors_of
from vitreous.models.libraries import SOURCES, Loaded, Size, huggingface

FILES = ("adapter_model.safetensors", "adapter_model.bin")


def load_adapted(source: str, name: str, weights: str | None, size: Size | None, folder: Path) -> Loaded:
    """The base model with an adapter."""
    needs("peft", "peft")
    file = next((folder / one for one in FILES if (folder / one).is_file()), None)
    if file is None:
        raise WeightsError(f"{folder}: has no {' or '.join(FILES)}; copy the whole folder of the adapter")
    state = read_safetensors(file) if file.suffix == ".safetensors" else tensors_of(read_pickle(file))
    classes = classes_in({key: value for key, value in state.items() if "lora_" not in key}).get("num_classes")
    if source == huggingface.PREFIX:
        base = huggingface.load_base(name, weights, size, classes)
    else:
        base = SOURCES[source].load(name, weights, size)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of another base than the one that it names: what matters is verified
            net = joined(base.net, folder, state)
    except VitreousError:
        raise
    except Exception as error:
        raise ModelError(f"{folder}: does not fit {base.name} ({one_line(error, 160)}); name its base model") from error
    return base._replace(net=net, weights=(*base.weights, file))


def joined(net: Any, folder: Path, state: State) -> Any:
    """The network with the adapter merged into its weights, where its kind can be merged."""
    import peft

    config = peft.PeftConfig.from_pretrained(str(folder))
    config.inference_mode = True
    adapted = peft.get_peft_model(net, config)
    told = peft.set_peft_model_state_dict(adapted, dict(state))
    mine = set(peft.get_peft_model_state_dict(adapted))
    wrong = {"unexpected": {*told.unexpected_keys, *(state.keys() - mine)}, "missing": mine - state.keys()}
    said = "; ".join(some(what, sorted(keys)) for what, keys in wrong.items() if keys)
    if said:
        raise WeightsError(f"{folder}: does not fit {type(net).__name__}: {said}; name its base model")
    adapted.eval()
    return adapted.merge_and_unload() if hasattr(adapted.base_model, "merge_and_unload") else adapted
