"""Model libraries: each in a module of the same shape, recognised by its networks, and known to no other module."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import zoo
from torch import nn

from vitreous import Model
from vitreous.errors import ModelError
from vitreous.models.libraries import (
    LIBRARIES,
    SOURCES,
    huggingface,
    library_of,
    open_clip,
    timm,
    torchvision,
)
from vitreous.models.libraries import any as any_other
from vitreous.models.libraries.any import Library, Source

PACKAGE = Path(__file__).parents[1] / "src" / "vitreous"
HOME = PACKAGE / "models" / "libraries"

# ----------------------------------------------------------------------------------------------------------- the shape


def functions(shape: type) -> dict[str, list[str]]:
    """The functions that a protocol asks for, and what they take."""
    found = inspect.getmembers(shape, inspect.isfunction)
    return {name: list(inspect.signature(f).parameters)[1:] for name, f in found if not name.startswith("_")}


def test_every_library_has_the_same_functions() -> None:
    wanted = functions(Library)
    names = "owns name labels classifies channels frames meaning run preprocess text load names"
    assert set(names.split()) == wanted.keys()
    for library in LIBRARIES:
        for name, parameters in wanted.items():
            assert list(inspect.signature(getattr(library, name)).parameters) == parameters, (library.__name__, name)
        for name in (*Library.__annotations__, *Source.__annotations__):
            assert hasattr(library, name), (library.__name__, name)


def test_sources_are_loaded_by_their_prefix() -> None:
    assert [*SOURCES] == ["embedded", "timm", "hf", "torchvision", "openclip"]
    for source in SOURCES.values():
        for name, parameters in functions(Source).items():
            assert list(inspect.signature(getattr(source, name)).parameters) == parameters, (source.__name__, name)
    with pytest.raises(ModelError, match=r"give it to Model\(net\)"):
        any_other.load("mine", None, None)


# -------------------------------------------------------------------------------------------------------- who owns what

OWNERS = {
    "timm ViT": timm,
    "timm Swin": timm,
    "torch.compile": timm,
    "HF ViT sdpa": huggingface,
    "HF DINOv2 registers sdpa": huggingface,
    "HF CLIP vision eager": huggingface,
    "torchvision ViT": torchvision,
    "open_clip ViT-B-32": open_clip,
    "hand-written": any_other,
    "sequence first": any_other,
}


@pytest.mark.parametrize("name", OWNERS)
def test_the_library_of_a_network(name: str) -> None:
    model = Model(zoo.network(name))
    assert model.library is library_of(model.module) is OWNERS[name]
    assert model.size == (zoo.ZOO[name].size if model.library is not any_other else (224, 224))


def test_a_hugging_face_model_of_images_and_text() -> None:
    transformers = zoo.library("transformers", "hf")
    tower = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.CLIPConfig(
        vision_config={**tower, "image_size": 32, "patch_size": 16}, text_config=tower, projection_dim=8
    )
    model = Model(transformers.CLIPModel._from_config(config).eval())
    assert model.library is huggingface
    assert model.classifier is False
    assert model.size == (32, 32)
    assert model.run(torch.zeros(1, 3, 32, 32)).shape == (1, 8)
    assert huggingface.text(model.module, model.name) is not None
    assert huggingface.text(zoo.network("HF ViT sdpa"), "") is None


class Embeds(nn.Module):
    """A module by hand, after CLIP's conventions."""

    def encode_image(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean((2, 3))


class Configured(Embeds):
    """A module by hand, after Hugging Face's and CLIP's conventions, as some code on the hub."""

    main_input_name = "pixel_values"
    config = SimpleNamespace(model_type="vit", image_size=48, _name_or_path="mine")


def test_conventions_are_enough() -> None:
    x = torch.rand(2, 3, 48, 48)
    for net, owner in {Embeds(): open_clip, Configured(): huggingface, nn.Linear(2, 2): any_other}.items():
        assert library_of(net) is owner
    for net in (Embeds(), Configured()):
        assert torch.equal(Model(net).run(x), x.mean((2, 3)))
        assert Model(net).classifier is False
    assert Model(Configured()).name == "mine"
    assert Model(Configured()).size == (48, 48)


# ---------------------------------------------------------------------------------------- nobody else knows a library

NAMES = {"timm", "transformers", "torchvision", "open_clip", "openclip", "huggingface", "accelerate"}
PREFIX = "hf/"  # hf alone is an extra of the package
QUIRKS = {
    *("pretrained_cfg", "preprocess_cfg", "patch_embed", "reg_token", "checkpoint_filter_fn"),
    *("grad_checkpointing", "gradient_checkpointing", "_hf_hook", "main_input_name", "model_type", "vision_config"),
    *("get_image_features", "get_text_features", "encode_image", "encode_text", "interpolate_pos_encoding"),
    *("pixel_values", "image_processor", "image_mean", "id2label", "_name_or_path", "context_length"),
    *("image_embeds", "pooler_output", "last_hidden_state", "x_norm_clstoken", "_from_config", "from_pretrained"),
}
EXCEPTIONS = {  # not about models
    "bridges/huggingface.py": {"transformers", "image_mean"},  # its Trainer, and whether that has a processor of images
    "cli/health.py": {"timm", "transformers", "open_clip"},  # versions of what is installed
    "evaluation/report/files.py": {"timm", "transformers"},  # the same, beside results
    "images/decoding.py": {"torchvision"},  # its decoder of JPEG files
    "images/steps.py": {"torchvision", "timm"},  # the classes of transforms, whatever the network
    "trace/perturb/fills.py": {"torchvision"},  # its Gaussian blur
}


def texts(tree: ast.AST) -> set[int]:
    """Docstrings, by identity."""
    homes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, homes)]
    return {id(body[0].value) for body in bodies if body and isinstance(body[0], ast.Expr)}


def words(node: ast.AST) -> list[str]:
    """What a piece of code names: things, attributes, modules; strings that are no sentences."""
    if isinstance(node, ast.Import):
        return [part for alias in node.names for part in alias.name.split(".")]
    if isinstance(node, ast.ImportFrom):
        return [*(node.module or "").split("."), *(alias.name for alias in node.names)]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.findall(rf"^(?:{PREFIX}|\w+)", node.value) if re.fullmatch(r"\S+", node.value) else []
    if isinstance(node, ast.alias):  # named by its import
        return []
    named = [getattr(node, field, None) for field in ("id", "attr", "arg", "name")]
    return [name for name in named if isinstance(name, str)]


def known_libraries(code: str) -> Iterator[tuple[int, str]]:
    """Line and word of all that is about one library."""
    tree = ast.parse(code)
    prose = texts(tree)
    for node in ast.walk(tree):
        if id(node) not in prose:
            yield from ((getattr(node, "lineno", 0), word) for word in words(node) if word in {*NAMES, *QUIRKS, PREFIX})


def test_no_other_module_knows_a_library() -> None:
    wrong, excused = [], set()
    for file in sorted(PACKAGE.rglob("*.py")):
        place = file.relative_to(PACKAGE).as_posix()
        for line, word in known_libraries(file.read_text(encoding="utf-8")) if file.parent != HOME else ():
            if word in EXCEPTIONS.get(place, ()):
                excused.add((place, word))
            else:
                wrong.append(f"src/vitreous/{place}:{line}: {word} belongs in models/libraries/")
    assert not wrong, "\n".join(wrong)
    unused = {(place, word) for place, some in EXCEPTIONS.items() for word in some} - excused
    assert not unused, "exceptions that nothing needs"


@pytest.mark.parametrize(
    ("code", "word"),
    [
        ("import timm", "timm"),
        ("from torchvision.transforms import v2", "torchvision"),
        ("from vitreous.models.libraries.timm import wordnet", "timm"),
        ('if hasattr(net, "encode_text"):\n    pass', "encode_text"),
        ("size = net.patch_embed.shape", "patch_embed"),
        ("y = net(pixel_values=x)", "pixel_values"),
        ('spec.removeprefix("hf/")', "hf/"),
        ('f"hf/{name}"', "hf/"),
        ('type(net).__module__.startswith("torchvision.")', "torchvision"),
        ('SIZES = {"id2label": 3}', "id2label"),
    ],
)
def test_what_is_about_a_library_is_seen(code: str, word: str) -> None:
    assert [*known_libraries(f"x = 1\n{code}")] == [(2, word)]


def test_prose_is_not_code() -> None:
    code = '"""timm"""\ndef f():\n    "transformers"\n    return "a timm name, hf/ID or openclip/NAME"  # torchvision\n'
    assert not [*known_libraries(code)]
