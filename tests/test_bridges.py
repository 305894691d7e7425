"""captum objects as methods, and methods as captum and Quantus call them: stand-ins, and the real ones if installed."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from conftest import off
from PIL import Image
from torch import Tensor, nn

import vitreous
from vitreous import METHODS, Class, Concept, Model, Trace, bridges, captum_style, from_captum, quantus_explain
from vitreous.errors import InputError, ModelError, OptionError, TargetError, Unsupported
from vitreous.metrics.sanity.parameter_randomisation import copy_of

NAME = "timm ViT"
PEERS = {"captum", "quantus", "lightning", "pytorch_lightning", "transformers", "wandb", "mlflow", "fiftyone"}
CONCEPT = Concept(torch.linspace(-1, 2, 32).sin(), "cosine")


# ------------------------------------------------------------------------------------------------ stand-ins for captum


class PlainGradient:
    """As captum's Saliency: the gradient of one output, or of the only one."""

    def __init__(self, forward_func: Callable[..., Any]) -> None:
        self.forward_func = forward_func

    def attribute(self, inputs: Tensor, target: int | None = None, scale: float = 1.0) -> Tensor:
        out = self.forward_func(inputs)
        assert out.ndim == 1 or target is not None, "no target"
        (grad,) = torch.autograd.grad((out if target is None else out[:, target]).sum(), inputs)
        return scale * grad


class LayerProduct:
    """As captum's LayerGradientXActivation."""

    def __init__(self, forward_func: Callable[..., Any], layer: nn.Module) -> None:
        self.forward_func, self.layer = forward_func, layer

    def attribute(self, inputs: Tensor, target: int | None = None) -> tuple[Tensor]:
        kept: list[Tensor] = []
        hook = self.layer.register_forward_hook(lambda module, args, out: kept.append(out))
        try:
            out = self.forward_func(inputs)
        finally:
            hook.remove()
        (grad,) = torch.autograd.grad((out if target is None else out[:, target]).sum(), kept[0])
        return (grad * kept[0],)


class Tunnel:
    """As captum's NoiseTunnel: the mean over noise of another object, with random numbers of torch and NumPy."""

    def __init__(self, attribution_method: PlainGradient) -> None:
        self.attribution_method = attribution_method
        self.forward_func = attribution_method.forward_func

    def attribute(self, inputs: Tensor, target: int | None = None) -> Tensor:
        noisy = inputs.repeat(3, 1, 1, 1) + 0.1 * torch.randn(3, *inputs.shape[1:]) * np.random.rand()
        found = self.attribution_method.attribute(noisy, target)
        return found.mean(0, keepdim=True)


class Kept:
    """As captum's GuidedBackprop and DeepLift: it runs its own network."""

    def __init__(self, model: nn.Module) -> None:
        self.forward_func = self.model = model

    def attribute(self, inputs: Tensor, target: int) -> Tensor:
        (grad,) = torch.autograd.grad(self.model(inputs)[:, target].sum(), inputs)
        return grad


class Shaped:
    """Returns what it is told to."""

    def __init__(self, forward_func: Callable[..., Any], found: Any) -> None:
        self.forward_func, self.found = forward_func, found

    def attribute(self, inputs: Tensor, target: int | None = None) -> Any:
        return self.found


def net() -> nn.Module:
    return zoo.network(NAME)


def images(count: int = 2) -> Tensor:
    return zoo.images(NAME, count)


def gradient(target: Any, reduce: str = "sum", model: Model | None = None) -> Tensor:
    return vitreous.explain(model or zoo.model(NAME), images(), "gradient", target, reduce=reduce).map


# ------------------------------------------------------------------------------------------------- captum as a method


@pytest.mark.parametrize("target", [3, [3, 1], "top-2", "3-1", CONCEPT, "neuron:2"], ids=str)
def test_any_target(target: Any) -> None:
    method = from_captum(PlainGradient(net()))
    made = vitreous.explain(zoo.model(NAME), images(), method, target)
    assert off(made.map, gradient(target)) < 1e-5
    assert (
        made.method == "captum_plain_gradient"
        and made.signed
        and made.provenance["notes"] == {"captum": "PlainGradient"}
    )
    assert tuple(made.targets) == tuple(vitreous.explain(zoo.model(NAME), images(), "gradient", target).targets)


def test_channels_arguments_and_names() -> None:
    method = from_captum(PlainGradient(net()), "mine", reduce="abs-mean", scale=-2.0)
    made = vitreous.explain(zoo.model(NAME), images(), method, 3)
    assert made.method == "mine" and not made.signed
    assert off(made.map, 2 * gradient(3, "abs-mean")) < 1e-5
    most = from_captum(PlainGradient(net()), reduce="max-abs")
    assert off(vitreous.explain(zoo.model(NAME), images(), most, 3).map, gradient(3, "max-abs")) < 1e-5
    assert repr(method) == "vitreous.from_captum(PlainGradient(…), name='mine')"
    assert method == method and method != most and len({method, most}) == 2
    assert "mine" not in METHODS, "it is a method of its owner only"


def test_networks_of_all_libraries() -> None:
    """The object's network may return anything that vitreous reads: an object of transformers, a tuple."""
    for name in ("HF ViT eager", "open_clip ViT-B-32", "sequence first"):
        model, x = zoo.model(name), zoo.images(name, 2)
        target = 1 if model.classifier is not False else "neuron:1"
        made = vitreous.explain(model, x, from_captum(PlainGradient(model.net)), target)
        assert off(made.map, vitreous.explain(model, x, "gradient", target, reduce="sum").map) < 1e-5


def test_an_image_has_its_own_noise() -> None:
    """The same every time and in every batch; the generators of the caller are as before."""
    method, model = from_captum(Tunnel(PlainGradient(net()))), zoo.model(NAME)
    state, others = torch.random.get_rng_state(), np.random.get_state()[1].tolist()
    maps = vitreous.explain(model, images(), method, 3).map
    assert torch.equal(torch.random.get_rng_state(), state) and np.random.get_state()[1].tolist() == others
    assert off(vitreous.explain(model, images()[1:], method, 3).map, maps[1:]) < 1e-5
    assert off(Trace(model, images()).explain(method, 3).map, maps) < 1e-5
    assert off(maps, gradient(3)) > 1e-3, "there is noise"
    text = CONCEPT
    assert off(vitreous.explain(model, images(), method, text).map, maps) > 0.1, "its inner object follows the target"


@pytest.mark.parametrize("name", [NAME, "sequence first"])
def test_tokens_of_a_layer(name: str) -> None:
    network, model, x = zoo.network(name), zoo.model(name), zoo.images(name, 2)
    layer = network.blocks[1] if name == NAME else network.body.layers[1]
    made = vitreous.explain(model, x, from_captum(LayerProduct(network, layer)), 3).map
    kept: list[Tensor] = []
    hook = layer.register_forward_hook(lambda module, args, out: kept.append(out))
    (grad,) = torch.autograd.grad(network(x)[:, 3].sum(), kept[0])
    hook.remove()
    expected = (grad * kept[0]).sum(-1).detach()
    expected = (expected if name == NAME else expected.T)[:, 1:].reshape(2, 4, 4)
    assert off(made, expected) < 1e-5


def test_feature_maps_are_grids_of_their_own() -> None:
    found = torch.arange(12.0).reshape(1, 3, 2, 2)
    made = vitreous.explain(zoo.model(NAME), images(1), from_captum(Shaped(net(), (found,))), 1)
    assert torch.equal(made.map, found.sum(1)) and made.resize(8).map.shape == (1, 8, 8)


def test_an_object_that_runs_the_network_itself() -> None:
    method, model = from_captum(Kept(net())), zoo.model(NAME)
    assert off(vitreous.explain(model, images(), method, [3, 1]).map, gradient([3, 1])) < 1e-5
    with pytest.raises(TargetError, match="Kept runs the network by itself, so it takes a class, not neuron:2"):
        vitreous.explain(model, images(), method, "neuron:2")


def test_an_object_of_a_function() -> None:
    def sharper(x: Tensor) -> Tensor:
        return 2 * net()(x)

    with pytest.raises(OptionError, match=r"was made on a function; say of which network: from_captum\(…, model=net\)"):
        from_captum(PlainGradient(sharper))
    for given in (net(), zoo.model(NAME)):
        method = from_captum(PlainGradient(sharper), model=given)
        assert off(vitreous.explain(zoo.model(NAME), images(), method, 3).map, 2 * gradient(3)) < 1e-5
    with pytest.raises(TargetError, match="it takes a class"):
        vitreous.explain(zoo.model(NAME), images(), method, "neuron:2")
    with pytest.raises(ModelError, match="made on a function, which is not that of a copy of"):
        vitreous.explain(copy_of(zoo.model(NAME)), images(), method, 3)


# ------------------------------------------------------------------------------------------------------------ measuring


def test_it_is_measured_as_any_method() -> None:
    model, method = zoo.model(NAME), from_captum(PlainGradient(net()))
    ours = vitreous.evaluate(model, images(), vitreous.methods.gradient(reduce="sum"), "token_deletion", 3, steps=3)
    assert vitreous.evaluate(model, images(), method, "token_deletion", 3, steps=3).value == pytest.approx(ours.value)


@pytest.mark.parametrize(
    "make", [PlainGradient, Kept, lambda n: Tunnel(PlainGradient(n)), lambda n: LayerProduct(n, n.blocks[1])]
)
def test_it_follows_to_copies_of_its_network(make: Callable[[nn.Module], Any]) -> None:
    """Where weights are shuffled, the object's layer and model are those of the shuffled copy."""
    model, method = zoo.model(NAME), from_captum(make(net()))
    before = vitreous.explain(model, images(), method, 3).map
    score = vitreous.evaluate(model, images(), method, "parameter_randomisation", 3, stages=1)
    assert max(score.value) < 0.9, "another map"
    twin = copy_of(model)
    assert off(vitreous.explain(twin, images(), method, 3).map, before) < 1e-5
    assert off(vitreous.explain(model, images(), method, 3).map, before) < 1e-6


def folder_of(folder: Path) -> Path:
    for i in range(2):
        Image.fromarray(np.random.default_rng(i).integers(0, 255, (64, 64, 3), np.uint8)).save(folder / f"{i}.png")
    return folder


def test_leaderboards(tmp_path: Path) -> None:
    model = zoo.model(NAME)
    mine = [from_captum(PlainGradient(net())), from_captum(PlainGradient(net()), "mine", reduce="abs-mean")]
    board = vitreous.run_leaderboard(model, folder_of(tmp_path), [*mine, "gradient"], ["sparsity", "srg"])
    assert set(board.plan.methods) == {"random", "centre", "captum_plain_gradient", "mine", "gradient"}
    board.save(tmp_path / "board")
    assert "captum_plain_gradient" in (tmp_path / "board" / "leaderboard.csv").read_text()
    with pytest.raises(OptionError, match=r"two methods are called captum_plain_gradient; give each a name"):
        vitreous.run_leaderboard(model, tmp_path, [mine[0], from_captum(PlainGradient(net()))], ["sparsity"])


# ------------------------------------------------------------------------------------------------------------- refusals


def test_wrong_objects_and_names() -> None:
    for wrong in (net(), "gae", None):
        with pytest.raises(OptionError, match=r"from_captum takes a captum object, e\.g\. IntegratedGradients\(net\)"):
            from_captum(wrong)
    with pytest.raises(OptionError, match="reduce takes sum, abs-mean or max-abs, not 'mean'"):
        from_captum(PlainGradient(net()), reduce="mean")
    for name, why in (("gae", "is a method of vitreous"), ("two words", "is not a name in Python")):
        with pytest.raises(OptionError, match=why):
            from_captum(PlainGradient(net()), name)
    with pytest.raises(ModelError, match="PlainGradient was made on another network than timm-deit-distilled"):
        vitreous.explain(zoo.model("timm DeiT distilled"), images(), from_captum(PlainGradient(net())), 3)
    with pytest.raises(OptionError, match=r"has its own options; give steps there"):
        vitreous.explain(zoo.model(NAME), images(), from_captum(PlainGradient(net())), 3, steps=3)


@pytest.mark.parametrize("found", [torch.zeros(1, 7), torch.zeros(1, 5, 32), (torch.zeros(1, 3, 4, 4),) * 2, None])
def test_what_is_no_map(found: Any) -> None:
    with pytest.raises(Unsupported, match=r"Shaped returns .* for an image, not values of pixels"):
        vitreous.explain(zoo.model(NAME), images(1), from_captum(Shaped(net(), found)), 1)


def test_what_fails_is_told() -> None:
    with pytest.raises(Unsupported, match=r"PlainGradient of captum fails on timm-vit \(TypeError: .*n_steps"):
        vitreous.explain(zoo.model(NAME), images(1), from_captum(PlainGradient(net()), n_steps=3), 1)


def test_studies_keep_names(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"a study keeps methods by their names, and vitreous\.from_captum\("):
        vitreous.run_study(
            "leaderboard",
            folder_of(tmp_path),
            zoo.model(NAME),
            tmp_path / "s",
            methods=[from_captum(PlainGradient(net()))],
        )


def test_nothing_is_imported() -> None:
    rooms = sorted(Path(bridges.__file__).parent.glob("*.py"))
    assert len(rooms) > 6
    for file in rooms:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        named = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        named |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not {name.partition(".")[0] for name in named} & PEERS, file.name


# -------------------------------------------------------------------------------------------------- methods for others


def test_captum_style() -> None:
    model, x = zoo.model(NAME), images()
    made = captum_style(net(), "gae").attribute(x, target=torch.tensor([3, 1]))
    expected = vitreous.explain(model, x, "gae", [3, 1]).resize((64, 64)).map
    assert made.shape == x.shape and made.dtype == x.dtype and off(made.sum(1), expected) < 1e-5
    (one,) = captum_style(model, vitreous.methods.gae(start_layer=1)).attribute((x,), target=3)
    assert off(one.sum(1), vitreous.explain(model, x, "gae", 3, start_layer=1).resize(64).map) < 1e-5
    pixels = captum_style(model, "gradient", reduce="sum").attribute(x, 3)
    assert off(pixels.sum(1), gradient(3)) < 1e-5, "a map of pixels stays as it is"
    assert captum_style(model).forward_func(x).shape == (2, zoo.CLASSES)
    for wrong in ((x, x), x[0], "photo.jpg"):
        with pytest.raises(InputError, match="one batch of preprocessed images"):
            captum_style(model).attribute(wrong)


def test_there_and_back() -> None:
    """A method of vitreous in captum's clothes is a method again."""
    method = from_captum(captum_style(net(), "gradient", reduce="sum"), model=net())
    assert off(vitreous.explain(zoo.model(NAME), images(), method, 3).map, gradient(3)) < 1e-5


def test_quantus_explain() -> None:
    x, y = images().numpy(), np.array([3, 1])
    made = quantus_explain(net(), x, y, method="gae", start_layer=1, device="cpu")
    expected = vitreous.explain(zoo.model(NAME), images(), "gae", [3, 1], start_layer=1).resize(64).map
    assert made.shape == (2, 1, 64, 64) and made.dtype == np.float32 and off(made[:, 0], expected) < 1e-5
    top = quantus_explain(model=zoo.model(NAME), inputs=x.astype(np.float64), targets=None)
    assert off(top[:, 0], vitreous.explain(zoo.model(NAME), images()).resize(64).map) < 1e-5


# ------------------------------------------------------------------------------------------------- the peers themselves

REAL: dict[str, Callable[[Any, nn.Module], tuple[Any, dict[str, Any]]]] = {
    "Saliency": lambda attr, n: (attr.Saliency(n), {"abs": False}),
    "IntegratedGradients": lambda attr, n: (attr.IntegratedGradients(n), {"n_steps": 4}),
    "Occlusion": lambda attr, n: (attr.Occlusion(n), {"sliding_window_shapes": (3, 16, 16), "strides": (3, 16, 16)}),
    "NoiseTunnel": lambda attr, n: (attr.NoiseTunnel(attr.Saliency(n)), {"nt_samples": 3}),
    "LayerGradCam": lambda attr, n: (attr.LayerGradCam(n, n.patch_embed.proj), {}),
    "LayerActivation": lambda attr, n: (attr.LayerGradientXActivation(n, n.blocks[1]), {}),
    "GuidedBackprop": lambda attr, n: (attr.GuidedBackprop(n), {}),
    "ShapleyValueSampling": lambda attr, n: (
        attr.ShapleyValueSampling(n),
        {
            "n_samples": 2,
            "feature_mask": torch.arange(16).reshape(4, 4).repeat_interleave(16, 0).repeat_interleave(16, 1),
        },
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", REAL)
def test_objects_of_captum(kind: str) -> None:
    attr = pytest.importorskip("captum.attr", reason="this needs pip install 'vitreous[bench]'")
    made, arguments = REAL[kind](attr, net())
    method, model = from_captum(made, **arguments), zoo.model(NAME)
    maps = vitreous.explain(model, images(), method, [3, 1]).map
    assert maps.shape[0] == 2 and maps.flatten(1).std(1).min() > 0
    assert off(vitreous.explain(model, images()[1:], method, 1).map, maps[1:]) < 1e-4, "batch-invariant"
    if kind == "Saliency":
        assert off(maps, gradient([3, 1])) < 1e-5
    if kind != "GuidedBackprop":
        assert vitreous.explain(model, images(1), method, CONCEPT).map.std() > 0
    if kind not in ("NoiseTunnel", "ShapleyValueSampling"):
        torch.manual_seed(0)
        theirs = made.attribute(images()[:1], target=Class(3).index, **arguments).detach()
        theirs = theirs.sum(-1)[:, 1:].reshape(1, 4, 4) if theirs.ndim == 3 else theirs.sum(1)
        assert off(maps[:1], theirs) < 1e-4, "as captum itself"


@pytest.mark.filterwarnings("ignore")
def test_a_metric_of_captum() -> None:
    metrics = pytest.importorskip("captum.metrics", reason="this needs pip install 'vitreous[bench]'")
    found = metrics.sensitivity_max(captum_style(net(), "gae").attribute, images(), target=3, n_perturb_samples=2)
    assert found.shape == (2,) and (found > 0).all()


@pytest.mark.filterwarnings("ignore")
def test_a_metric_of_quantus() -> None:
    quantus = pytest.importorskip("quantus", reason="this needs pip install 'vitreous[bench]'")
    metric = quantus.FaithfulnessCorrelation(nr_runs=4, subset_size=64, disable_warnings=True, return_aggregate=False)
    given = {"model": net().eval(), "x_batch": images().numpy(), "y_batch": np.array([3, 1]), "device": "cpu"}
    found = metric(**given, explain_func=quantus_explain, explain_func_kwargs={"method": "gae", "start_layer": 1})
    assert len(found) == 2 and np.isfinite(found).all()
