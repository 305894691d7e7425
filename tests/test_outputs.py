"""What the output of a network means: logits, a sigmoid for each class, probabilities already, or values."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zoo
from torch import Tensor, nn

import vitreous
from vitreous import Class, Model, Trace
from vitreous.errors import ModelError, TargetError
from vitreous.models.output import Meaning
from vitreous.plot.figure import explanation_figure

IMAGES = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(3))
MAPS = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(4))
GRADED = {"token_deletion": {}, "deletion": {}, "insertion": {}, "saco": {"groups": 4}, "srg": {}, "road": {}}


def vit(classes: int = 5, sharp: float = 8.0) -> Any:
    torch.manual_seed(0)
    net = zoo.timm("vit_tiny_patch16_224", num_classes=classes, depth=2)().eval()
    if classes:
        net.head.weight.data.normal_(std=sharp / 32**0.5)
    net.cls_token.data.normal_(std=0.3)
    return net


def measured(model: Model, metric: str, **options: Any) -> Tensor:
    return vitreous.evaluate(model, IMAGES, MAPS, metric, target=0, **options).value


def hidden(net: nn.Module, gone: Tensor, score: Callable[[Tensor], Tensor]) -> Tensor:
    """The score of each image with some of its patches [B 16] in its mean colour."""
    pixels = gone.view(2, 1, 4, 4).repeat_interleave(16, 2).repeat_interleave(16, 3)
    return score(net(torch.where(pixels, IMAGES.mean((2, 3), keepdim=True), IMAGES)))


def without(net: Any, keep: Tensor, score: Callable[[Tensor], Tensor]) -> Tensor:
    """The score of each image with only some of its patch tokens [B k]."""
    x = net.pos_embed + torch.cat([net.cls_token.expand(2, -1, -1), net.patch_embed(IMAGES)], 1)
    kept = torch.cat([torch.zeros(2, 1, dtype=torch.long), keep + 1], 1)
    x = x.gather(1, kept[..., None].expand(-1, -1, x.shape[-1]))
    return score(net.head(net.norm(net.blocks(x))[:, 0]))


def area(points: list[Tensor]) -> Tensor:
    curve = torch.stack(points, 1)
    return (curve[:, 1:] + curve[:, :-1]).sum(1) / 2 / (curve.shape[1] - 1)


@torch.no_grad()
def brute_force(net: Any, score: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """The metrics, from their definitions."""
    order = MAPS.flatten(1).argsort(1, descending=True)
    rank = order.argsort(1)
    groups = [(rank >= 4 * g) & (rank < 4 * g + 4) for g in range(4)]
    drops = [hidden(net, torch.zeros_like(groups[0]), score) - hidden(net, group, score) for group in groups]
    means = [(MAPS.flatten(1) * group).sum(1) / 4 for group in groups]
    pairs = [(means[i] - means[j], drops[i] >= drops[j]) for i in range(4) for j in range(i + 1, 4)]
    right = torch.stack([torch.where(good, apart, -apart) for apart, good in pairs]).sum(0)
    return {
        "token_deletion": area([without(net, order[:, 16 * step // 10 :], score) for step in range(10)]),
        "deletion": area([hidden(net, rank < count, score) for count in range(17)]),
        "insertion": area([hidden(net, rank >= count, score) for count in range(17)]),
        "saco": right / torch.stack([apart for apart, _ in pairs]).sum(0),
    }


def check(model: Model, net: Any, score: Callable[[Tensor], Tensor]) -> None:
    options: dict[str, Any] = {"insertion": {"fill": "mean"}, "saco": {"groups": 4}}
    for metric, expected in brute_force(net, score).items():
        torch.testing.assert_close(measured(model, metric, **options.get(metric, {})), expected, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------------------------------- values


def test_a_regression_is_measured_by_its_value() -> None:
    net = vit(1)
    model = Model(net)
    check(model, net, lambda output: output[:, 0])
    assert model.meaning is Meaning.VALUE and model.output == "auto"
    assert Trace(model, IMAGES).classifies  # top-1 is output 0
    best = vitreous.explain(model, IMAGES, "gradcam")
    assert best.targets == ("0", "0")
    assert torch.equal(best.map, vitreous.explain(model, IMAGES, "gradcam", 0).map)


def test_values_have_no_probability() -> None:
    model = Model(vit(3), output="value", name="ages")
    assert model.label(1) == "output 1"
    drops = [vitreous.explain(model, IMAGES, "token_ablation", 0, of=of).map for of in ("probability", "logit")]
    assert drops[0].abs().max() > 0 and drops[0].equal(drops[1]), "a value has no probability and is measured itself"
    with pytest.raises(TargetError, match="class_contrast compares two classes; ages returns values"):
        vitreous.evaluate(model, IMAGES, "gradcam", "class_contrast")
    output = model.run(IMAGES).detach()
    assert Class(1).title(model, output, 0) == f"output 1 {float(output[0, 1]):.4g}"
    assert Model(vit(3), labels=["age", "height", "weight"], output="value").label(1) == "height"


def test_labels_of_data_do_not_number_the_values(tmp_path: Path, cat: Path) -> None:
    for name in ("0", "1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cat.jpg").write_bytes(cat.read_bytes())
    board = vitreous.run_leaderboard(Model(vit(1), name="age"), tmp_path, methods=["gradient"], metrics=["deletion"])
    assert set(board.targets.values()) == {"0"}
    assert any("age returns values" in note for note in board.data.notes)


# ------------------------------------------------------------------------------------------------------ probabilities


def test_a_network_may_end_in_its_softmax() -> None:
    net = vit()
    scores, ready = Model(net), Model(nn.Sequential(net, nn.Softmax(-1)))
    for metric, options in GRADED.items():
        one, other = (measured(model, metric, **options) for model in (scores, ready))
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
        assert one.std() > 1e-4
    one, other = (
        vitreous.explain(model, IMAGES, "token_ablation", 0, of="probability").map for model in (scores, ready)
    )
    torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    assert (scores.meaning, ready.meaning) == (Meaning.LOGITS, Meaning.SOFTMAX)
    titles = [Class(0).title(model, model.run(IMAGES).detach(), 0) for model in (scores, ready)]
    assert titles[0] == titles[1]


def test_each_class_may_have_a_sigmoid_of_its_own() -> None:
    net = vit()
    outside, inside = Model(net, output="sigmoid"), Model(nn.Sequential(net, nn.Sigmoid()))
    check(outside, net, lambda output: output[:, 0].sigmoid())
    for metric, options in GRADED.items():
        torch.testing.assert_close(measured(outside, metric, **options), measured(inside, metric, **options))
    assert (outside.meaning, inside.meaning) == (Meaning.SIGMOID, Meaning.SOFTMAX)
    assert Model(nn.Sequential(net, nn.Sigmoid()), output="softmax").layout_at((64, 64)).patches == 16
    output = net(IMAGES).detach()
    best = outside.meaning.best(output[0], 2)
    assert [number for number, _ in best] == output[0].topk(2).indices.tolist()
    assert [share for _, share in best] == pytest.approx(output[0].topk(2).values.sigmoid().tolist())


def test_one_logit_of_a_binary_classifier() -> None:
    net = vit(1)
    check(Model(net, classifier=True), net, lambda output: output[:, 0].sigmoid())
    for binary in (Model(net, classifier=True), Model(net, labels=["ill"])):
        assert Trace(binary, IMAGES).classifies and binary.meaning is Meaning.SIGMOID
        output = net(IMAGES).detach()
        assert Class(0).title(binary, output, 0).endswith(f" {float(output[0, 0].sigmoid()):.0%}")


def test_a_sigmoid_in_the_middle_is_none_at_the_end() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = vit()

        def forward(self, x: Tensor) -> Tensor:
            y = self.net(x)
            return y.sigmoid() * y.sigmoid()  # within 0 … 1, but nobody says that it is a probability

    model = Model(Gated(), classifier=True)
    assert model.layout_at((64, 64)) and model.meaning is Meaning.LOGITS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_probabilities_may_be_rounded(dtype: torch.dtype) -> None:
    model = Model(nn.Sequential(vit(1000), nn.Softmax(-1)).to(dtype))
    assert Trace(model, IMAGES).classifies and model.meaning is Meaning.SOFTMAX


@pytest.mark.parametrize(
    ("problem", "labels", "meaning"),
    [
        ("multi_label_classification", 5, Meaning.SIGMOID),
        ("regression", 3, Meaning.VALUE),
        ("single_label_classification", 1, Meaning.SIGMOID),
        (None, 5, Meaning.LOGITS),
        (None, 1, Meaning.VALUE),
    ],
)
def test_a_hugging_face_configuration_says_it(problem: str | None, labels: int, meaning: Meaning) -> None:
    net = zoo.hf("ViT", "ForImageClassification", "sdpa")()
    net.classifier = nn.Linear(32, labels)
    net.config.num_labels, net.config.problem_type = labels, problem
    model = Model(net.eval())
    assert Trace(model, IMAGES).classifies and model.meaning is meaning
    assert Model(net, output="logits").meaning is Meaning.LOGITS


# ------------------------------------------------------------------------------------------- figures, JSON and the page


def texts(figure: Any) -> list[str]:
    return [text.get_text() for text in figure.findobj(lambda artist: hasattr(artist, "get_text"))]


def test_a_figure_of_values_has_no_bars() -> None:
    made = vitreous.explain(Model(vit(1)), IMAGES[:1], "gradcam")
    figures = [
        explanation_figure([[made]], top=[("output 0", 0.4321)], values=values).figure for values in (False, True)
    ]
    assert "0.43" in texts(figures[0]) and "0.4321" in texts(figures[1])
    boxes = [len(figure.axes[0].patches) + len(figure.patches) for figure in figures]
    assert boxes[0] == boxes[1] + 1


def saved(folder: Path, problem: str, labels: int) -> Any:
    net = zoo.hf("ViT", "ForImageClassification", "sdpa")()
    net.classifier = nn.Linear(32, labels)
    net.config.num_labels, net.config.problem_type = labels, problem
    net.save_pretrained(folder)
    return net.eval()


def test_the_command_line_tells_values_and_probabilities(run: Any, cat: Path, tmp_path: Path) -> None:
    ages = saved(tmp_path / "ages", "regression", 1)
    tags = saved(tmp_path / "tags", "multi_label_classification", 4)
    said = {}
    for name, net in (("ages", ages), ("tags", tags)):
        asked = ["explain", cat, "--model", f"hf/{tmp_path / name}", "--method", "gradcam", "--out", name]
        (image,) = json.loads(run(*asked, "--json").out)["images"]
        model = Model(net)
        said[name] = image["top"], model.run(model.prepare(cat))[0].detach()
    top, output = said["ages"]
    assert top == [{"output": 0, "label": "output 0", "value": pytest.approx(float(output[0]), rel=1e-4)}]
    top, output = said["tags"]
    assert [one["probability"] for one in top] == pytest.approx(output.sigmoid().sort(descending=True).values.tolist())
    text = run("explain", cat, "--model", f"hf/{tmp_path / 'ages'}", "--method", "gradcam", "--out", "text").out
    assert "output 0" in text and "%" not in text
    asked = ["explain", cat, "--model", f"hf/{tmp_path / 'tags'}", "--method", "gradcam", "--out", "as"]
    (image,) = json.loads(run(*asked, "--json", "--output-is", "logits").out)["images"]
    assert sum(one["probability"] for one in image["top"]) == pytest.approx(1)
    assert "choose auto, logits, sigmoid, softmax or value" in run(*asked, "--output-is", "foo").error


def test_the_page_tells_values() -> None:
    pytest.importorskip("fastapi", reason="the page needs pip install 'vitreous[web]'")
    from vitreous.web.common import best

    model = Model(vit(2), output="value")
    output = model.run(IMAGES)[0].detach()
    told = best(model, output, 5)
    assert [(one.value, one.probability) for one in told] == [(float(v), None) for v in output.sort(descending=True)[0]]
    told = best(Model(vit(2)), output, 1)
    assert told[0].value is None and told[0].probability == pytest.approx(float(output.softmax(-1).max()))


# -------------------------------------------------------------------------------------------------- is it a classifier?


class Similar(nn.Module):
    """A backbone and similarities to fixed vectors: a cosine or a zero-shot classifier."""

    def __init__(self, unit: bool, trained: bool, normal: bool = True) -> None:
        super().__init__()
        self.backbone, self.normal, self.unit = vit(0), normal, unit
        rows = torch.randn(5, 32)
        self.rows = nn.Parameter(rows) if trained else nn.Buffer(F.normalize(rows, dim=-1) if unit else rows)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        z = self.backbone(x)
        z = z / z.norm(dim=-1, keepdim=True) if self.normal else z
        if isinstance(self.rows, nn.Parameter):
            return self.scale * F.linear(z, F.normalize(self.rows, dim=-1) if self.unit else self.rows)
        return self.scale.exp() * z @ self.rows.T


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("trained", [False, True])
def test_similarities_to_unit_vectors_are_classes(trained: bool, frozen: bool) -> None:
    net = Similar(unit=True, trained=trained).eval().requires_grad_(not frozen)
    model = Model(net)
    assert Trace(model, IMAGES).classifies and model.meaning is Meaning.LOGITS
    assert vitreous.explain(nn.DataParallel(net), IMAGES, "gradcam", 0).map.shape == (2, 4, 4)


@pytest.mark.parametrize(("unit", "normal"), [(False, True), (True, False)])
def test_a_projection_is_no_classifier_unless_told(unit: bool, normal: bool) -> None:
    net = Similar(unit, trained=False, normal=normal).eval()
    with pytest.raises(TargetError, match=r"has no classifier.*Model\(net, classifier=True\)"):
        vitreous.explain(net, IMAGES, "gradcam", 0)
    with pytest.raises(TargetError, match=r"no score to measure.*Model\(net, classifier=True\)"):
        vitreous.evaluate(net, IMAGES, "attention", "deletion")
    told = Model(net, classifier=True)
    check_map = vitreous.explain(told, IMAGES, "gradcam", 0).map
    assert check_map.abs().max() > 0 and told.meaning is Meaning.LOGITS
    assert torch.equal(check_map, vitreous.explain(Model(net, output="logits"), IMAGES, "gradcam", 0).map)


class Adapted(nn.Module):
    """Behaves as an adapter of PEFT does: everything but the class is that of the network inside."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.base_model, self.peft_config = net, {"default": None}

    def get_base_model(self) -> nn.Module:
        return self.base_model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "base_model":
                raise
            return getattr(self.base_model, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model(*args, **kwargs)


def test_an_adapted_classifier_is_a_classifier() -> None:
    net = zoo.hf(
        "ViT", "ForImageClassification", "sdpa", id2label={i: f"kind {i}" for i in range(zoo.CLASSES)}
    )().eval()
    plain, adapted = Model(net), Model(Adapted(net))
    assert adapted.labels == plain.labels and len(plain.labels) == zoo.CLASSES
    one, other = (vitreous.explain(model, IMAGES, "gae", 0).map for model in (plain, adapted))
    torch.testing.assert_close(one, other)
    assert Model(Adapted(zoo.hf("ViT", "Model", "sdpa")())).classifier is False


def test_lora() -> None:
    peft = pytest.importorskip("peft", reason="needs pip install peft")
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj", "query", "value"])
    net = zoo.hf("ViT", "ForImageClassification", "sdpa")().eval()
    plain = vitreous.explain(net, IMAGES, "gae", 0).map
    torch.testing.assert_close(vitreous.explain(peft.get_peft_model(net, config), IMAGES, "gae", 0).map, plain)
    timm = peft.get_peft_model(vit(), peft.LoraConfig(target_modules=["qkv"]))
    assert Trace(Model(timm), IMAGES).classifies


# ------------------------------------------------------------------------------------------------------------- refusals


def test_an_unknown_meaning_is_refused() -> None:
    for make in (lambda: Model(vit(), output="foo"), lambda: vitreous.load(output="foo")):
        with pytest.raises(ModelError, match=r"output='foo'.*choose auto, logits, sigmoid, softmax or value"):
            make()
    with pytest.raises(ModelError, match="classifier=False says that the output is an embedding"):
        Model(vit(), classifier=False, output="logits")


def test_probabilities_that_do_not_sum_to_one_are_refused() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = vit()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x).softmax(-1) / 2

    with pytest.raises(ModelError, match=r"output='softmax': the outputs of half sum to 0\.5, not to 1") as refused:
        vitreous.explain(Model(Half(), output="softmax", name="half"), IMAGES, "gradcam", 0)
    assert "\n" not in str(refused.value) and "'value'" in str(refused.value)
