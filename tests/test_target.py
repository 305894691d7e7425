"""What users write, and what it means."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import zoo

import vitreous
from vitreous import Model, Trace
from vitreous.errors import TargetError
from vitreous.models.labels import find_exact, fitting, read_labels, suggest
from vitreous.trace.parse_target import parse
from vitreous.trace.target import Class, Contrast, Each, Neuron, Numbered, Target, Top

ASSETS = Path(vitreous.__file__).parent / "assets"
LABELS = ["tabby, tabby cat", "tiger cat", "Egyptian cat", "bull mastiff", "black-and-tan coonhound", "zebra", "lynx"]


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(zoo.network("timm ViT"), labels=LABELS, name="pets")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (3, Class(3)),
        ("3", Class(3)),
        ("zebra", Class(5)),
        ("ZEBRA", Class(5)),
        ("tabby cat", Class(0)),
        ("tabby, tabby cat", Class(0)),
        ("mastiff", Class(3)),
        ("egypt", Class(2)),
        ("top-1", Top(1)),
        ("top-3", Top(3)),
        ("top2", Top(2)),
        ("egyptian_CAT", Class(2)),
        ("Tiger-Cat", Class(1)),
        ("black and_tan  coonhound", Class(4)),
        ("tabby_cat-bull_mastiff", Contrast(Class(0), Class(3))),
        ("neuron:4", Neuron(4)),
        ("zebra-lynx", Contrast(Class(5), Class(6))),
        ("5-6", Contrast(Class(5), Class(6))),
        ("top-1-top-2", Contrast(Top(1), Top(2))),
        ("black-and-tan coonhound", Class(4)),
        ("black-and-tan coonhound-zebra", Contrast(Class(4), Class(5))),
        ("black-and", Class(4)),
        ("zebra - neuron:2", Contrast(Class(5), Neuron(2))),
        ([1, 2, 0], Class((1, 2, 0))),
        (["zebra", 2], Class((5, 2))),
        (torch.tensor([1, 2]), Class((1, 2))),
        (torch.tensor(4), Class(4)),
        ("1;2;0", Class((1, 2, 0))),
        (np.array([1, 2]), Class((1, 2))),
        (["5-6", "top-1", 3], Each((Contrast(Class(5), Class(6)), Top(1), Class(3)))),
        ("TOP-1", Top(1)),
        ("Neuron:4", Neuron(4)),
        (Top(2), Top(2)),
    ],
    ids=str,
)
def test_parse(model: Model, given: Any, expected: Any) -> None:
    target = parse(given, model, 7)
    assert target == expected
    assert parse(str(target), model, 7) == target, "storable as a string"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (7, "class 7 is out of range: the model has class 0 to 6"),
        (-1, "class -1 is out of range"),
        ("7", "class 7 is out of range"),
        (Class(9), "class 9 is out of range"),
        ("cat", r"'cat' fits 3 classes: tabby cat \(0\), tiger cat \(1\), Egyptian cat \(2\)"),
        ("zebbra", "unknown class 'zebbra'; did you mean zebra"),
        ("top-0", "top-0 is out of range"),
        ("top-8", "top-8 is out of range"),
        ("neuron:x", "'x' is not a number"),
        ("neuron:7", "neuron 7 is out of range"),
        ("text:", "is empty"),
        ("concept:none", "no concept 'none' here"),
        ("text:a dog", "has no text tower"),
        ("zebra-dog", "unknown class 'zebra-dog'"),
        ("zebra-cat", "unknown class 'zebra-cat'; did you mean"),
        ([], "is not a target"),
        (True, "is not a target"),
        (2.5, "is not a target"),
    ],
    ids=str,
)
def test_what_does_not_exist(model: Model, given: Any, said: str) -> None:
    with pytest.raises(TargetError, match=said):
        parse(given, model, 7)


IMAGENET = read_labels(ASSETS / "imagenet1k.txt")


@pytest.fixture(scope="module")
def imagenet() -> Model:
    return Model(zoo.network("timm ViT"), labels=IMAGENET, name="imagenet")


def test_cat_leads_with_cats_not_with_the_bullfrog(imagenet: Model) -> None:
    """Rana catesbeiana is a bullfrog, and a cockatoo is no cat: whole words come first."""
    with pytest.raises(TargetError) as caught:
        parse("cat", imagenet, 1000)
    said = str(caught.value)
    assert said.startswith("'cat' fits 7 classes: tabby cat (281), tiger cat (282), Persian cat (283), ")
    assert "frog" not in said and "cockatoo" not in said
    with pytest.raises(TargetError, match=r"unknown class 'zebra-cat'") as caught:
        parse("zebra-cat", imagenet, 1000)


def test_whole_words_come_before_beginnings_and_those_before_other_parts() -> None:
    names = ["bobcat", "cattle", "house cat", "polecats", "hat", "catfish, fish"]
    labels = dict(enumerate(names))
    assert [name for _, _, name in fitting("cat", labels)] == ["house cat", "cattle", "catfish", "bobcat", "polecats"]
    model = Model(zoo.network("timm ViT"), labels=names, name="names")
    assert parse("cat", model, 7) == Class(2), "the only one with the whole word"
    assert parse("bob", model, 7) == Class(0) and parse("lecat", model, 7) == Class(3)
    with pytest.raises(TargetError, match=r"'catt' fits|'ca' fits 2 classes: cattle \(1\), catfish \(5\)"):
        parse("ca", Model(zoo.network("timm ViT"), labels=["bobcat", "cattle", *"abc", "catfish"]), 7)


def test_suggestions_are_ranked_as_matches_are() -> None:
    assert suggest("cat", IMAGENET) == "; did you mean tabby cat, tiger cat or Persian cat?"
    assert suggest("tigre cat", IMAGENET).startswith("; did you mean tiger cat")
    assert suggest("qqqqqq", IMAGENET) == ""


def test_a_name_as_written_wins_over_one_that_only_reads_alike() -> None:
    model = Model(zoo.network("timm ViT"), labels=["a-b", "a b", "a", "b", "A_c", "c", "d"], name="alike")
    assert parse("a b", model, 7) == Class(1) and parse("A-B", model, 7) == Class(0)
    assert parse("a_b", model, 7) == Class(0), "the first that reads alike"
    assert parse("a-c", model, 7) == Contrast(Class(2), Class(5)), "a contrast of names as written"
    assert parse("a c", model, 7) == Class(4)


def test_every_class_of_imagenet_is_found_by_any_spelling(imagenet: Model) -> None:
    first = {}
    for number, label in IMAGENET.items():
        for name in label.split(","):
            first.setdefault(name.strip().lower(), number)
    for name, number in list(first.items())[::40]:
        assert find_exact(name.replace(" ", "_").upper(), IMAGENET) is not None
        assert parse(name, imagenet, 1000) == Class(number)


def test_an_unknown_label_is_refused(imagenet: Model) -> None:
    for given in ("wug", "not a class", "tabby cat dog", "--", "_", "cat;wug", ["wug", 1]):
        with pytest.raises(TargetError, match="unknown class"):
            parse(given, Model(zoo.network("timm ViT"), labels=["cat", "dog"], name="two"), 7)
    with pytest.raises(TargetError, match="unknown class 'Egyptian Mau'"):
        parse("Egyptian Mau", imagenet, 1000)


def test_the_server_refuses_an_unknown_label_as_a_target(model: Model) -> None:
    """JOURNEYS P1-10."""
    targets = pytest.importorskip("vitreous.web.targets", reason="the server needs vitreous[web]")
    engine, served = Mock(spec=targets.Engine, concepts={}), Mock(spec=targets.Served, model=model)
    served.name = "pets"
    for asked in ("wug", "zebra-wug", "wug-zebra", "wug - neuron:2", "concept:wug"):
        with pytest.raises(TargetError, match=r"unknown class|no concept"):
            targets.read(engine, served, asked, 7)
    assert targets.read(engine, served, "Tiger_Cat", 7) == Class(1)


def test_a_concept_is_found_by_any_spelling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Model) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "vitreous-concepts").mkdir()
    vitreous.Concept(torch.ones(32), name="Dark_Stripes").save("vitreous-concepts/Dark_Stripes.safetensors")
    assert str(parse("concept:dark stripes", model, 7)) == "concept:Dark_Stripes"
    with pytest.raises(TargetError, match="no concept 'stripes' here; did you mean Dark_Stripes"):
        parse("concept:stripes", model, 7)


def test_no_labels() -> None:
    with pytest.raises(TargetError, match="has no labels; give a class number"):
        parse("dog", zoo.model("timm ViT"), 7)


def test_scores() -> None:
    output = torch.tensor([[1.0, 5.0, 2.0], [9.0, 0.0, 4.0]])
    assert Class(2)(output, output).tolist() == [2, 4]
    assert Class((1, 0))(output, output).tolist() == [5, 9]
    assert Class((1, 0))(output.repeat_interleave(2, 0), output).tolist() == [5, 5, 9, 9]
    assert Top(1)(output, output).tolist() == [5, 9]
    assert Top(2)(output, output).tolist() == [2, 4]
    assert Contrast(Top(1), Class(0))(output, output).tolist() == [4, 0]
    assert Neuron(1)(output, output).tolist() == [5, 0]
    assert Top(2).fix(output) == Class((2, 2))
    assert Contrast(Top(1), Class(0)).fix(output) == Contrast(Class((1, 0)), Class(0))


def test_titles(model: Model) -> None:
    output = torch.zeros(2, 7)
    output[0, 5] = output[1, 1] = 3.0
    assert Top(1).title(model, output, 0) == "zebra 77%"
    assert Top(1).title(model, output, 1) == "tiger cat 77%"
    assert Class((5, 1)).title(model, output, 1) == "tiger cat 77%"
    assert Contrast(Class(5), Class(0)).title(model, output, 0) == "zebra 77% rather than tabby 4%"


def best_two(output: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
    """A target that is only a function."""
    return output.topk(2, -1).values.sum(-1)


@pytest.mark.parametrize("method", ["gradient", "smoothgrad", "cdam", "token_ablation", "transformer_attribution"])
def test_a_plain_function_is_a_target(model: Model, method: str) -> None:
    images, options = zoo.images("timm ViT"), {"samples": 2} if method == "smoothgrad" else {}

    class BestTwo(Target):
        def __call__(self, output: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
            return best_two(output, embedding)

        def __str__(self) -> str:
            return "best two"

    plain = vitreous.explain(model, images, method, best_two, **options)
    assert plain.target == str(best_two)
    own = vitreous.explain(model, images, method, BestTwo(), **options)
    assert own.target == "best two" and torch.equal(own.map, plain.map)
    each = vitreous.explain(model, images, method, [best_two] * 3, **options)
    assert torch.allclose(each.map, plain.map, atol=1e-6)


def test_a_plain_function_may_be_a_side_of_a_contrast(model: Model) -> None:
    images = zoo.images("timm ViT")
    both, one, other = (
        vitreous.explain(model, images, "cdam", target).map
        for target in (Contrast(best_two, Class(5)), best_two, Class(5))
    )
    assert torch.allclose(both, one - other, atol=1e-6)
    assert vitreous.evaluate(model, images, "gradient", "deletion", best_two, steps=3).curve is not None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (Class((0, 7)), "class 7 is out of range"),
        (Contrast(Class(0), Class(9)), "class 9 is out of range"),
        (Contrast(Top(8), Class(0)), "top-8 is out of range: pets has 7 outputs"),
        (Each((Class(1), Neuron(7))), "neuron 7 is out of range"),
        ([Class(1), Top(0)], "top-0 is out of range"),
        (Class, "is not a target"),
    ],
    ids=str,
)
def test_targets_that_are_objects_are_checked_as_strings_are(model: Model, given: Any, said: str) -> None:
    with pytest.raises(TargetError, match=said):
        parse(given, model, 7)


def test_what_targets_say_of_themselves() -> None:
    output = torch.tensor([[1.0, 5.0, 2.0], [9.0, 0.0, 4.0]])
    concept = vitreous.Concept(torch.ones(3), name="ones", model="of one model")
    contrast, each = Contrast(Top(1), concept), Each((Top(2), Neuron(0)))
    assert contrast.names_classes and each.names_classes and Class(1).names_classes
    assert not (concept.names_classes or Neuron(0).names_classes or Contrast(concept, Neuron(0)).names_classes)
    assert contrast.varies and each.varies and not (contrast.fix(output).varies or each.fix(output).varies)
    assert str(each.fix(output)) == "2;neuron:0" and each.fix(output).of_rows([1, 0, 0]).strings() == ["neuron:0;2;2"]
    assert str(contrast.fix(output)) == "1-concept:ones;0-concept:ones"
    assert [str(contrast.fix(output).of_image(i)) for i in range(2)] == ["1-concept:ones", "0-concept:ones"]
    assert Top(1).fix(output[:1]).single() == Class(1)
    assert Contrast(Class((1,)), Class(2)).single() == Contrast(Class(1), Class(2))
    assert Each((Class(1), concept)).for_any_model().targets[1].model is None  # type: ignore[attr-defined]
    assert concept.identity != vitreous.Concept(torch.zeros(3), name="ones").identity
    assert Contrast(Class(1), concept).identity == ("1", concept.identity)


def test_a_class_is_graded_by_its_probability_once() -> None:
    output = torch.tensor([[1.0, 5.0, 2.0], [9.0, 0.0, 4.0]])
    graded = Top(1).fix(output).graded()
    assert torch.equal(graded(output, output), output.softmax(-1).amax(-1)) and str(graded) == "1;0"
    assert graded.graded() is graded
    assert torch.equal(graded.of_rows([1, 1])(output[[1, 1]], output), output.softmax(-1).amax(-1)[[1, 1]])
    neuron = Neuron(1)
    assert neuron.graded() is neuron


def test_classes_whose_numbers_stay_on_the_gpu_go_with_their_images() -> None:
    output = torch.tensor([[1.0, 5.0, 2.0], [9.0, 0.0, 4.0]])
    rows, numbers = [1, 0, 1], (2, 0)
    ours, same = Numbered(torch.tensor(numbers)).of_rows(rows), Class(numbers).of_rows(rows)
    assert torch.equal(ours(output[rows], output), same(output[rows], output))
    alone = Numbered(torch.tensor([2]))
    assert alone.of_rows(rows) is alone


def test_a_concept_of_another_model_is_refused_in_a_contrast_too(model: Model) -> None:
    concept = vitreous.Concept(torch.ones(32), name="theirs", model="another")
    for given in (concept, Contrast(Class(0), concept), [concept, 1]):
        with pytest.raises(TargetError, match="concept 'theirs' was built on another model than pets"):
            parse(given, model, 7)


BACKBONES = ["HF CLIP vision sdpa", "HF SigLIP sdpa", "HF DINOv2 registers sdpa", "open_clip ViT-B-32"]


@pytest.mark.parametrize("name", BACKBONES)
@pytest.mark.parametrize("target", [None, "top-1", 3, [0, 1, 2], "top-1-top-2"])
def test_an_embedding_is_never_a_class(name: str, target: Any) -> None:
    for method in ("gae", "cdam", "gradient"):
        with pytest.raises(TargetError, match=r"has no classifier.*concept.*text.*probe"):
            vitreous.explain(zoo.model(name), zoo.images(name), method, target)
    assert vitreous.explain(zoo.model(name), zoo.images(name), "attention").target is None


def test_a_module_that_ends_in_a_linear_layer_classifies() -> None:
    assert Trace(Model(zoo.network("hand-written")), zoo.images("hand-written")).classifies

    class Tokens(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = zoo.network("timm ViT")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net.forward_features(x)[:, 0]

    images = zoo.images("timm ViT")
    assert not Trace(Model(Tokens()), images).classifies
    assert Trace(Model(Tokens(), classifier=True), images).classifies


def test_per_image_targets(model: Model) -> None:
    images = zoo.images("timm ViT")
    each = vitreous.explain(model, images, "cdam", ["zebra", 0, "tiger cat"])
    assert each.target == "5;0;1"
    for i, target in enumerate((5, 0, 1)):
        assert torch.allclose(each.map[i], vitreous.explain(model, images[i], "cdam", target).map[0], atol=1e-6)
    with pytest.raises(TargetError, match="2 targets for 3 images"):
        vitreous.explain(model, images, "cdam", [1, 2])


@pytest.mark.slow
def test_text_targets_of_open_clip() -> None:
    """A tiny CLIP with the real vocabulary: the score is the cosine with the text's own embedding."""
    open_clip = pytest.importorskip("open_clip", reason="the text tower is open_clip's: pip install 'vitreous[clip]'")
    torch.manual_seed(0)
    tower = {"image_size": 64, "layers": 2, "width": 32, "head_width": 16, "patch_size": 16}
    text = {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1}
    net = open_clip.CLIP(embed_dim=16, vision_cfg=tower, text_cfg=text).eval()
    clip, images = Model(net), zoo.images("timm ViT")
    target = parse("text:a photo of a dog", clip, 16)
    assert str(target) == "text:a photo of a dog"
    with torch.no_grad():
        z = net.encode_image(images)
        t = net.encode_text(open_clip.get_tokenizer("ViT-B-32")(["a photo of a dog"], context_length=16))
    assert torch.allclose(Trace(clip, images).score(target), torch.cosine_similarity(z, t), atol=1e-5)
    dog, cat, both = (
        vitreous.explain(clip, images, "cdam", t).map for t in ("text:a dog", "text:a cat", "text:a dog-text:a cat")
    )
    assert not torch.equal(dog, cat)
    assert torch.allclose(both, dog - cat, atol=1e-6)
    assert vitreous.explain(clip, images, "gae", "text:a dog").map.abs().max() > 0
    with pytest.raises(TargetError, match="no classifier"):
        vitreous.explain(clip, images, "cdam")


def test_text_targets_of_hf_clip(tmp_path: Any) -> None:
    """A tiny CLIPModel saved with a tokenizer, loaded by its folder."""
    import json

    transformers = pytest.importorskip("transformers", reason="the text tower is its own: pip install 'vitreous[hf]'")
    torch.manual_seed(0)
    words = [
        "<|startoftext|>",
        "<|endoftext|>",
        *"abcdefghijklmnopqrstuvwxyz",
        *(c + "</w>" for c in "abcdefghijklmnopqrstuvwxyz"),
    ]
    (tmp_path / "vocab.json").write_text(json.dumps({w: i for i, w in enumerate(words)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = transformers.CLIPTokenizer(
        str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"), model_max_length=16
    )
    part = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.CLIPConfig(
        vision_config={**part, "image_size": 64, "patch_size": 16},
        text_config={
            **part,
            "vocab_size": len(words),
            "max_position_embeddings": 16,
            "eos_token_id": 1,
            "bos_token_id": 0,
        },
        projection_dim=16,
    )
    net = transformers.CLIPModel(config).eval()
    net.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    clip = vitreous.load(f"hf/{tmp_path}")
    images = zoo.images("timm ViT")
    one, other = (vitreous.explain(clip, images, "cdam", f"text:{t}").map for t in ("a dog", "the cat"))
    assert one.shape == (3, 4, 4)
    assert not torch.equal(one, other)


def test_a_list_may_hold_any_targets_and_its_string_comes_back(model: Model) -> None:
    images = torch.cat([zoo.images("timm ViT")] * 6)  # more than one batch
    kinds = ["top-2", "zebra-lynx", "neuron:3"] * 6
    ours = vitreous.explain(model, images, "cdam", kinds)
    second = Trace(model, images[:1]).output.topk(2).indices[0, 1].item()
    assert ours.target is not None and ours.target.startswith(f"{second};5-6;neuron:3;")
    for i, target in enumerate((second, "5-6", "neuron:3")):
        assert torch.allclose(ours.map[i], vitreous.explain(model, images[i], "cdam", target).map[0], atol=1e-6)
    assert torch.allclose(vitreous.explain(model, images, "cdam", ours.target).map, ours.map, atol=1e-6)
    numbers = np.arange(18) % 7
    assert vitreous.explain(model, images, "cdam", numbers).target == ";".join(map(str, numbers))
    concept = vitreous.Concept(torch.randn(32, generator=torch.Generator().manual_seed(0)))
    for method, options in (("smoothgrad", {"samples": 2}), ("cdam", {"variant": "smooth", "samples": 3})):
        mixed = vitreous.explain(model, images[:2], method, [concept, "zebra"], **options).map
        alone = vitreous.explain(model, images[:1], method, concept, **options).map
        assert torch.allclose(mixed[0], alone[0], rtol=1e-3, atol=1e-6)


def test_a_contrast_with_the_best_class_is_stored_image_by_image() -> None:
    output = torch.tensor([[1.0, 5.0, 2.0], [9.0, 0.0, 4.0]])
    assert str(Contrast(Top(1), Class(2)).fix(output)) == "1-2;0-2"


def test_a_text_for_each_image_stays_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured again from the attribution, each image is asked its own text; a text may hold any sign."""
    model, images = zoo.model("open_clip ViT-B-32"), zoo.images("open_clip ViT-B-32")[:2]

    def embed(model: Model, prompt: str) -> torch.Tensor:
        return torch.randn(16, generator=torch.Generator().manual_seed(len(prompt)))

    monkeypatch.setattr("vitreous.trace.parse_target.embed_text", embed)
    texts = ["text:a dog; brown", "text:a cat"]
    found = vitreous.explain(model, images, "gradient", texts)
    assert found.targets == ("text:a dog; brown", "text:a cat")
    assert [one.targets for one in found] == [(texts[0],), (texts[1],)]
    ours, expected = (
        vitreous.evaluate(model, images, given, "deletion", target, steps=3).curve
        for given, target in ((found, None), (found.map, texts))
    )
    assert torch.allclose(ours, expected, atol=1e-5)
