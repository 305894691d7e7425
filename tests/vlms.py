"""Tiny random vision-language models of transformers, and a tokenizer with a few words."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from torch import nn

tr = pytest.importorskip("transformers")

SIDE = 32
TEXT = "what is this ? a dog on the red sofa . cat and photo of no yes two small big green bench it there"
WORDS = TEXT.split()
SPECIAL = [
    "<pad>",
    "<s>",
    "</s>",
    "<unk>",
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
    "<end_of_utterance>",
]
NAMES = SPECIAL + WORDS + [f"word{i}" for i in range(64 - len(SPECIAL) - len(WORDS))]
IMAGE = NAMES.index("<image>")
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
PACKED = {"depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32}
PACKED |= {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
MARKS = {"image_token_id": IMAGE, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63}


def tokenizer() -> Any:
    """Words, one token each."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({name: i for i, name in enumerate(NAMES)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    found = tr.PreTrainedTokenizerFast(tokenizer_object=made, **names)
    found.add_special_tokens({"additional_special_tokens": ["<image>"]})
    return found


def text(kind: str, **more: Any) -> dict[str, Any]:
    some = {"vocab_size": len(NAMES), "num_hidden_layers": 2, "num_key_value_heads": 2, "max_position_embeddings": 256}
    return {"model_type": kind, **SIZES, **some, **ENDS, **more}


def sees(kind: str, **more: Any) -> dict[str, Any]:
    own = {"num_attention_heads": 2, "num_hidden_layers": 2, "image_size": SIDE, "patch_size": 8}
    return {"model_type": kind, **SIZES, **own, **more}


def rope(*section: int) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(section)}


def llava() -> Any:
    """CLIP, whose last layer is not read, and Llama with grouped queries."""
    tower = sees("clip_vision_model", num_hidden_layers=3, projection_dim=16)
    made = tr.LlavaConfig(
        vision_config=tower, text_config=text("llama", head_dim=8), image_token_id=IMAGE, vision_feature_layer=-2
    )
    return tr.LlavaForConditionalGeneration(made)


def paligemma() -> Any:
    """SigLIP, and Gemma, which reads the prompt as a whole."""
    tower = sees("siglip_vision_model", vision_use_head=False)
    made = tr.PaliGemmaConfig(
        vision_config=tower, text_config=text("gemma", head_dim=8), image_token_id=IMAGE, projection_dim=32
    )
    return tr.PaliGemmaForConditionalGeneration(made)


def idefics(name: str = "Idefics3") -> Any:
    """Cells merged 2×2 by a pixel shuffle."""
    make, own = getattr(tr, f"{name}Config"), getattr(tr, f"{name}ForConditionalGeneration")
    tower = {key: value for key, value in sees("").items() if key != "model_type"}
    return own(make(vision_config=tower, text_config=text("llama", head_dim=8), image_token_id=IMAGE, scale_factor=2))


def smolvlm() -> Any:
    return idefics("SmolVLM")


def qwen2_5() -> Any:
    """Packed patches, attention in windows in two of three layers, cells merged 2×2."""
    tower = {**PACKED, "window_size": 16, "fullatt_block_indexes": [1]}
    words = text("qwen2_5_vl_text", rope_parameters=rope(1, 1, 2))
    made = tr.Qwen2_5_VLConfig(vision_config=tower, text_config=words, **MARKS)
    return tr.Qwen2_5_VLForConditionalGeneration(made)


def qwen3() -> Any:
    """Packed patches, cells merged 2×2, a layer of the tower that also feeds the language model."""
    tower = {**PACKED, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    words = text("qwen3_vl_text", head_dim=8, rope_parameters=rope(2, 1, 1))
    return tr.Qwen3VLForConditionalGeneration(tr.Qwen3VLConfig(vision_config=tower, text_config=words, **MARKS))


KINDS = {
    "llava": llava,
    "paligemma": paligemma,
    "idefics3": idefics,
    "smolvlm": smolvlm,
    "qwen2_5": qwen2_5,
    "qwen3": qwen3,
}

GRIDS = {kind: (8, 8) if "qwen" in kind else (4, 4) for kind in KINDS}  # of the tower's patches


def built(kind: str, dtype: torch.dtype = torch.float32, attention: str = "sdpa") -> Any:
    """A random network whose weights are large enough for its answers to depend on the image."""
    torch.manual_seed(0)
    net = KINDS[kind]().eval().requires_grad_(False).to(dtype)
    net.set_attn_implementation(attention)
    for name, weight in net.named_parameters():
        if weight.ndim > 1:
            nn.init.normal_(weight, std=0.08 if "embed" in name else 0.25)
    return net


@cache
def saved(kind: str) -> Path:
    """A LLaVA with its processor, as a folder."""
    folder = Path(mkdtemp(prefix=f"{kind}-"))
    size = {"height": SIDE, "width": SIDE}
    template = "{% for m in messages %}{% for c in m.content %}{{ '<image> ' if c.type == 'image' else c.text }}"
    template += "{% endfor %}{% endfor %} it there"
    more = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    pixels = tr.CLIPImageProcessor(size=size, crop_size=size)
    made = tr.LlavaProcessor(pixels, tokenizer(), chat_template=template, **more)
    built(kind).save_pretrained(folder)
    made.save_pretrained(folder)
    return folder
