"""grad_eclip, clip_surgery and maskclip: the authors' numbers, and the formulas written out for an open_clip network."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import zoo
from conftest import Oracle, off
from torch import Tensor, nn

import vitreous
from vitreous import Concept, Model, Trace
from vitreous.errors import OptionError, TargetError, Unsupported
from vitreous.methods.text.grad_eclip import last_attention
from vitreous.models.libraries import open_clip as library
from vitreous.trace.concept import Text
from vitreous.trace.target import Class, Contrast, Each

SINGLE, DOUBLE = (torch.float32, 5e-5), (torch.float64, 2e-7)


# ----------------------------------------------------------------------------------------------- the authors' numbers


@pytest.fixture(scope="session")
def stored(oracle: Oracle) -> dict[str, np.ndarray]:
    with np.load(oracle.folder / "clip.npz") as file:
        return dict(file)


def clip_of(stored: dict[str, np.ndarray], dtype: torch.dtype) -> Model:
    open_clip = zoo.library("open_clip", "clip")
    tower = {"layers": 4, "width": 64, "head_width": 16, "patch_size": 8, "image_size": 64}
    text = {"context_length": 8, "vocab_size": 64, "width": 32, "heads": 2, "layers": 1}
    net = open_clip.CLIP(embed_dim=64, vision_cfg=tower, text_cfg=text, quick_gelu=True).eval().to(dtype)
    state = {name[len("_state/any/") :]: torch.from_numpy(v) for name, v in stored.items() if name.startswith("_state")}
    net.load_state_dict(state)
    return Model(net, preprocess=None, name="tiny-clip")


def text_of(stored: dict[str, np.ndarray], number: int) -> Text:
    return Text(f"text{number}", torch.from_numpy(stored[f"_text/text{number}/vector"]))


def images_of(stored: dict[str, np.ndarray], dtype: torch.dtype) -> Tensor:
    return torch.stack([torch.from_numpy(stored[f"image{i}/any/x"]) for i in range(2)]).to(dtype)


@pytest.fixture
def spoken(stored: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch) -> None:
    """The text tower knows the three stored texts, and the empty one as the third."""
    known = {f"text{i}": text_of(stored, i).vector for i in range(3)}
    known[""] = known["text2"]
    monkeypatch.setattr(library, "text", lambda net, name: lambda prompt: known[prompt][None])


PUBLISHED: list[tuple[str, str, dict[str, Any]]] = [
    ("grad_eclip", "grad_eclip", {"heads": "one"}),
    ("grad_eclip_no_ksim", "grad_eclip", {"heads": "one", "ksim": "none"}),
    ("grad_eclip_qk", "grad_eclip", {"heads": "one", "ksim": "qk"}),
    ("grad_eclip_true_heads", "grad_eclip", {}),
    ("grad_eclip_no_ksim_true_heads", "grad_eclip", {"ksim": "none"}),
    ("grad_eclip_qk_true_heads", "grad_eclip", {"ksim": "qk"}),
    ("maskclip", "maskclip", {}),
    ("maskclip_ksim", "maskclip", {"ksim": True}),
    ("surgery_cosine", "clip_surgery", {"empty": False}),
    ("surgery_against_text2", "clip_surgery", {}),
    ("surgery", "clip_surgery", {"prompts": "text0|text1| text2"}),
]


@pytest.mark.usefixtures("spoken")
@pytest.mark.parametrize(("dtype", "limit"), [SINGLE, DOUBLE], ids=["float32", "float64"])
def test_published_maps(stored: dict[str, np.ndarray], dtype: torch.dtype, limit: float) -> None:
    model, images = clip_of(stored, dtype), images_of(stored, dtype)
    for key, method, options in PUBLISHED:
        for text in range(3 if key == "surgery" else 2):
            ours = vitreous.explain(model, images, method, text_of(stored, text), **options).map
            for image in range(2):
                assert off(ours[image], stored[f"image{image}/text{text}/{key}"]) < limit, (key, text, image)


@pytest.mark.parametrize(("dtype", "limit"), [SINGLE, DOUBLE], ids=["float32", "float64"])
def test_published_scores(stored: dict[str, np.ndarray], dtype: torch.dtype, limit: float) -> None:
    """With one head the last attention gives another score than the model's own, which stays as it is."""
    model, images, target = clip_of(stored, dtype), images_of(stored, dtype), text_of(stored, 1)
    trace = Trace(model, images)
    one, own = last_attention(trace, "one")[0], last_attention(trace, "true")[0]
    for image in range(2):
        assert abs(float(trace.score(target, one)[image].detach()) - stored[f"image{image}/text1/score"]) < 1e-5
        assert abs(float(trace.score(target, own)[image].detach()) - stored[f"image{image}/text1/score_true_heads"]) < 1e-5
        assert off(trace.output[image], stored[f"image{image}/any/embedding"]) < limit


def test_a_contrast_of_texts_is_the_redundant_text(stored: dict[str, np.ndarray]) -> None:
    model, images = clip_of(stored, torch.float64), images_of(stored, torch.float64)
    target = Contrast(text_of(stored, 0), text_of(stored, 2))
    ours = vitreous.explain(model, images, "clip_surgery", target).map
    assert off(ours[1], stored["image1/text0/surgery_against_text2"]) < 2e-7
