"""Images of any number of channels: found from the network, read from files and arrays, shown by chosen bands."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from conftest import Run, off
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

import vitreous
from vitreous import Model
from vitreous.errors import InputError, ModelError, OptionError
from vitreous.evaluation.study.run import run_study
from vitreous.images import pictures
from vitreous.images.bands import Bands, check_bands
from vitreous.images.preprocess import scaled
from vitreous.models.libraries import huggingface
from vitreous.models.probe.evaluate import evaluate as evaluate_probe
from vitreous.models.probe.train import train

SIDE = 64
MAPS = ["gae", "rollout", "token_ablation", "attn_lrp"]


def network(channels: int, name: str = "vit_tiny_patch16_224") -> Any:
    torch.manual_seed(0)
    shape: dict[str, int] = {"embed_dim": 32, "depth": 2, "num_heads": 2} if name.startswith("vit") else {}
    return timm.create_model(name, img_size=SIDE, num_classes=5, in_chans=channels, **shape).eval()


def like(net: Any, channels: int, weight: Tensor) -> Any:
    """The same network with another first convolution."""
    other = network(channels)
    other.load_state_dict({**net.state_dict(), "patch_embed.proj.weight": weight})
    return other


def values(channels: int, high: int = 80, wide: int = 100, seed: int = 0) -> np.ndarray:
    """Smooth values in 0…1 that differ from channel to channel, [Y X C]."""
    coarse = torch.rand(1, channels, 4, 5, generator=torch.Generator().manual_seed(seed))
    return F.interpolate(coarse, (high, wide), mode="bilinear")[0].permute(1, 2, 0).numpy()


@pytest.fixture(scope="module")
def thirteen() -> Model:
    return Model(network(13), labels=list("abcde"), bands=(3, 2, 1))


@pytest.fixture(scope="module")
def grey() -> Model:
    return Model(network(1), labels=list("abcde"))


# ------------------------------------------------------------------------------------------------- how many there are


class Cut(nn.Module):
    """Patches cut by reshaping and embedded by a linear layer: nothing tells channels from pixels."""

    def __init__(self, channels: int, side: int, states: bool) -> None:
        super().__init__()
        self.side = side
        if states:
            self.patch_size = side
        self.embed = nn.Linear(channels * side * side, 32)
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        patches: Tensor = F.unfold(x, self.side, stride=self.side).mT
        return self.out(self.body(self.embed(patches)).mean(1))


@pytest.mark.parametrize("channels", [1, 4, 13])
def test_the_count_comes_from_the_first_convolution(channels: int) -> None:
    model = Model(network(channels))
    assert model.channels == channels == model.preprocess.channels
    assert model.size == (SIDE, SIDE) and model.layout.grid == (4, 4)


def test_the_count_comes_from_a_linear_layer_a_configuration_or_the_user() -> None:
    assert Model(Cut(5, 8, states=True)).channels == 5
    assert Model(Cut(5, 8, states=False)).channels == 3, "nothing tells it"
    assert Model(Cut(5, 8, states=False), channels=5).channels == 5
    assert Model(nn.Linear(2, 2)).channels == 3
    plain = nn.Linear(2, 2)
    plain.config = SimpleNamespace(vision_config=SimpleNamespace(num_channels=6))  # type: ignore[assignment]
    assert huggingface.channels(plain) == 6


def test_a_sample_is_believed_if_the_network_runs_on_it() -> None:
    model = Model(Cut(5, 8, states=False), classifier=True)
    found = vitreous.explain(model, torch.rand(2, 5, 32, 48), "gradient", 1)
    assert found.map.shape == (2, 32, 48) and model.channels == 5 == model.preprocess.channels
    assert model.layout_at((32, 48)).grid == (4, 6)
    with pytest.raises(InputError, match=r"\(1, 4, 64, 64\) is not a batch of images of 13 channels; give \[B, 13, H"):
        vitreous.explain(Model(network(13)), torch.rand(1, 4, SIDE, SIDE))


def test_load_finds_the_count_in_the_weights(tmp_path: Path) -> None:
    net = network(4, "test_vit")
    save_file(net.state_dict(), tmp_path / "w.safetensors")
    model = vitreous.load("test_vit", tmp_path / "w.safetensors", "cpu", img_size=SIDE, bands=(3, 2, 1))
    assert model.channels == 4 and model.outputs is None and model.preprocess.bands == (3, 2, 1)
    x = torch.rand(1, 4, SIDE, SIDE)
    assert torch.equal(model.run(x), net(x))


# ------------------------------------------------------------------------------------------------------------ the maps


@pytest.mark.parametrize("method", [*MAPS, "occlusion", "integrated_gradients"])
def test_a_channel_of_zero_weights_changes_no_map(method: str) -> None:
    rgb = network(3)
    weight: Tensor = rgb.patch_embed.proj.weight.detach()
    four = like(rgb, 4, torch.cat([weight, torch.zeros_like(weight[:, :1])], 1))
    x = torch.randn(1, 4, SIDE, SIDE)
    maps = [vitreous.explain(Model(net), images, method, 2).map for net, images in ((rgb, x[:, :3]), (four, x))]
    assert off(maps[1], maps[0]) < 1e-5


def test_one_channel_with_the_sum_of_the_weights_is_grey_rgb(tmp_path: Path) -> None:
    rgb = network(3)
    one = like(rgb, 1, rgb.patch_embed.proj.weight.detach().sum(1, keepdim=True))
    x = torch.randn(1, 1, SIDE, SIDE)
    for method in MAPS:
        maps = [vitreous.explain(Model(net), x.expand(-1, n, -1, -1), method, 2).map for net, n in ((rgb, 3), (one, 1))]
        assert off(maps[1], maps[0]) < 1e-4, method
    Image.fromarray((values(1)[..., 0] * 255).astype(np.uint8)).save(tmp_path / "grey.png")
    inputs = [Model(net).prepare(tmp_path / "grey.png") for net in (one, rgb)]
    assert off(inputs[0].expand(-1, 3, -1, -1), inputs[1]) < 0.01, "the other rounds to 8 bits after resizing"


def test_gradient_is_autograd(thirteen: Model) -> None:
    x = torch.randn(2, 13, SIDE, SIDE, requires_grad=True)
    (expected,) = torch.autograd.grad(thirteen.net(x)[:, 3].sum(), [x])
    assert off(vitreous.explain(thirteen, x.detach(), "gradient", 3, reduce="sum").map, expected.sum(1)) < 1e-5


@pytest.mark.parametrize("options", [{"method": "rise", "masks": 8}, {"method": "smoothgrad", "samples": 2}])
def test_methods_with_noise_and_masks(thirteen: Model, options: dict[str, Any]) -> None:
    found = vitreous.explain(thirteen, torch.randn(1, 13, SIDE, SIDE), target=1, **options)
    assert found.map.isfinite().all() and found.map.std() > 0


def test_metrics_fill_every_channel(thirteen: Model) -> None:
    images = torch.randn(1, 13, SIDE, SIDE)
    for metric in ("deletion", "road"):
        assert vitreous.evaluate(thirteen, images, "gae", metric, 1).value.isfinite().all()


@pytest.mark.parametrize("canvas", ["fourier", "pixel"])
def test_maximize(thirteen: Model, grey: Model, canvas: str) -> None:
    still: dict[str, Any] = {"jitter": 0, "scale": 0.0, "rotate": 0.0, "noise": 0.0, "colour": 0.0}
    views = vitreous.maximize(thirteen, "class:1", steps=1, canvas=canvas)
    assert views.activation.isfinite().all()
    for model, count in ((thirteen, 13), (grey, 1)):
        found = vitreous.maximize(model, "class:1", steps=3, canvas=canvas, copies=1, tv=0.0, continuity=0.0, **still)
        assert found.images.shape == (1, count, SIDE, SIDE) and found.final > found.start
        shown = np.asarray(found.picture())
        bands = (3, 2, 1) if count == 13 else (0, 0, 0)
        assert np.array_equal(shown, (found.images[0, list(bands)] * 255).round().permute(1, 2, 0).numpy())


# --------------------------------------------------------------------------------------------------- files and arrays


def test_resizing_is_bicubic_with_antialiasing() -> None:
    x = values(4, 96, 144)
    steps = scaled((32, 32), (0.5,), (0.25,), 4)
    whole = torch.from_numpy(x).permute(2, 0, 1)[None]
    expected = F.interpolate(whole, (32, 48), mode="bicubic", antialias=True)[0, :, :, 8:40]
    assert off(steps(Bands(x)), (expected - 0.5) / 0.25) < 1e-4
    assert np.allclose(steps.box((144, 96)), (24, 0, 120, 96), atol=0.2)


def test_mean_and_deviation_of_the_model() -> None:
    assert scaled((8, 8), (0.1, 0.2, 0.6), (1.0, 2.0, 3.0), 2).mean == pytest.approx((0.3, 0.3))
    assert scaled((8, 8), (0.1, 0.2), (1.0, 2.0), 2).std == (1.0, 2.0)
    told = {
        "size": {"height": 9, "width": 9},
        "image_mean": [0.5, 0.1],
        "image_std": [0.5, 1],
        "rescale_factor": 1 / 51,
    }
    processor = SimpleNamespace(image_mean=0, to_dict=lambda: told)
    steps = huggingface.of_bands(nn.Conv2d(2, 1, 1), processor, (16, 16))
    made = steps(Bands(np.full((8, 24, 2), 51, np.uint8)))  # 51 / 51 = 1
    assert torch.allclose(made.mean((1, 2)), torch.tensor([1.0, 0.9]), atol=1e-5)
    assert np.allclose(steps.box((24, 8)), (0, 0, 24, 8)), "squeezed, not cropped"


def saved(folder: Path, channels: int) -> dict[str, Path]:
    """The same image in files of all kinds."""
    x = values(channels)
    deep = (x * 65535).round().astype(np.uint16)
    np.save(folder / "last.npy", x)
    np.save(folder / "first.npy", np.asfortranarray(deep.transpose(2, 0, 1)))
    np.savez_compressed(folder / "one.npz", x.astype(np.float64))
    np.savez(folder / "named.npz", other=np.zeros(3), image=deep)
    if channels == 1:
        np.save(folder / "flat.npy", x[..., 0])
        Image.fromarray(deep[..., 0]).save(folder / "deep.png")
        Image.fromarray(deep[..., 0]).save(folder / "deep.tif")
        Image.fromarray(x[..., 0]).save(folder / "float.tif")
    return {file.name: file for file in folder.iterdir()}


@pytest.mark.parametrize("channels", [1, 4, 13])
def test_all_files_of_one_image_are_the_same_input(tmp_path: Path, channels: int) -> None:
    model, files = Model(network(channels)), saved(tmp_path, channels)
    expected = model.prepare(values(channels))
    assert expected.shape == (1, channels, SIDE, SIDE)
    for name, file in files.items():
        assert off(model.prepare(file), expected) < 1e-4, name
        assert pictures.read(file, channels=channels).image.size == (100, 80)
    batch = np.stack([values(channels), values(channels, seed=1)])
    assert off(model.prepare(batch)[:1], expected) < 1e-6 and len(model.prepare(batch)) == 2
    assert vitreous.explain(model, list(files.values())[:2], "gae").overlay(index=1).mode == "RGB"


def test_the_scale_of_the_values(grey: Model) -> None:
    for array in (np.full((9, 9), 51, np.uint8), np.full((9, 9), 13107, ">u2"), np.full((9, 9), 0.2, np.float16)):
        assert torch.allclose(grey.prepare(array), torch.tensor((0.2 - 0.5) / 0.5), atol=1e-3)
    assert len(grey.prepare(np.zeros((3, 40, 50), np.uint8))) == 3, "a batch of grey images"
    with pytest.raises(InputError, match=r"image 0: an array of shape \[40, 50, 3\] is not an image of 1 channel"):
        grey.prepare(np.zeros((40, 50, 3), np.uint8))
    assert grey.prepare(np.full((9, 9), 3.0)).mean() == pytest.approx(5.0), "floats are taken as they are"


def test_colours_for_one_channel_and_transparency_for_four(grey: Model, tmp_path: Path) -> None:
    photo = Image.fromarray((values(3) * 255).astype(np.uint8))
    photo.save(tmp_path / "photo.png")
    found = pictures.open_file(tmp_path / "photo.png", 1)
    assert "its colours are turned to grey" in str(found.note)
    assert off(grey.prepare(photo), grey.prepare(np.asarray(photo.convert("L")))) < 1e-6
    photo.convert("L").convert("RGB").save(tmp_path / "same.png")
    assert pictures.open_file(tmp_path / "same.png", 1).note is None
    rgba = (values(4) * 255).astype(np.uint8)
    Image.fromarray(rgba).save(tmp_path / "four.png")
    four = Model(network(4))
    assert torch.equal(four.prepare(tmp_path / "four.png"), four.prepare(rgba))
    with pytest.raises(InputError, match=r"photo.png: the model takes 4 channels, this image has 3; .*\.npy$"):
        four.prepare(tmp_path / "photo.png")


def bad(kind: str) -> np.ndarray:
    x = values(4)
    holes = x.copy()
    holes[3, 4, 1] = np.nan
    shapes = {"ambiguous": np.zeros((4, 80, 4)), "other": x[..., :3], "flat": x[..., 0], "row": np.zeros(9)}
    kinds = {"int16": x.astype(np.int16), "complex": x.astype(np.complex64), "objects": np.array([[{}] * 9] * 9)}
    return {"nan": holes, "small": x[:5], "bool": x > 0, **shapes, **kinds}[kind]


SAID = {
    "nan": "contains NaN or infinite values; replace them first",
    "ambiguous": "may be its first or its last axis; crop or pad it to another height or width than 4",
    "other": r"shape \[80, 100, 3\] is not an image of 4 channels; give \[Y, X, 4\] or \[4, Y, X\]",
    "flat": r"shape \[80, 100\] is not an image of 4 channels",
    "row": r"shape \[9\] is not an image",
    "int16": "which values of int16 are black and white; give uint8, uint16, or floats",
    "bool": "which values of bool are black and white",
    "complex": "array of complex64 is not an image",
    "objects": "array of object is not an image; give uint8",
    "small": "100×5 pixels are too few",
}


@pytest.mark.parametrize("kind", SAID)
@pytest.mark.parametrize("ending", ["npy", "npz"])
def test_arrays_that_are_no_image(tmp_path: Path, kind: str, ending: str) -> None:
    file = tmp_path / f"bad.{ending}"
    (np.save if ending == "npy" else np.savez)(file, bad(kind))
    with pytest.raises(InputError, match=SAID[kind]) as caught:
        pictures.open_file(file, 4)
    assert str(caught.value).startswith(f"{file}: ") and "\n" not in str(caught.value)


def test_damaged_arrays(tmp_path: Path) -> None:
    whole, said = io.BytesIO(), []
    np.save(whole, values(4))
    random = np.random.default_rng(0)
    for ending in ("npy", "npz"):
        for length in (0, 3, 20, 90, 200, 5000):
            (tmp_path / f"x.{ending}").write_bytes(whole.getvalue()[:length])
            with pytest.raises(InputError) as caught:
                pictures.open_file(tmp_path / f"x.{ending}", 4)
            said.append(str(caught.value))
    for _ in range(40):
        data = np.frombuffer(whole.getvalue(), np.uint8).copy()
        data[random.integers(0, 128, 4)] = random.integers(0, 256, 4)
        (tmp_path / "y.npy").write_bytes(data.tobytes())
        try:
            pictures.open_file(tmp_path / "y.npy", 4)
        except InputError as error:
            said.append(str(error))
    assert not any("\n" in line for line in said)
    np.savez(tmp_path / "two.npz", a=values(4), b=values(4))
    with pytest.raises(InputError, match=r"two.npz: holds a, b; name the array of the image 'image'"):
        pictures.open_file(tmp_path / "two.npz", 4)


def test_an_array_that_would_fill_the_memory_is_not_read(tmp_path: Path) -> None:
    from numpy.lib import format as npy

    with (tmp_path / "huge.npy").open("wb") as file:
        npy.write_array_header_1_0(file, {"descr": "<f8", "fortran_order": False, "shape": (10**6, 10**6, 4)})
    with pytest.raises(InputError, match="numbers are too many for an image; shrink it first"):
        pictures.open_file(tmp_path / "huge.npy", 4)


def test_tiff_with_several_deep_channels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(network(4))
    monkeypatch.setitem(sys.modules, "tifffile", None)
    Image.fromarray((values(3) * 255).astype(np.uint8)).save(tmp_path / "three.tif")
    with pytest.raises(InputError, match=r"pip install 'vitreous\[tiff\]', or save it as .npy"):
        model.prepare(tmp_path / "three.tif")
    monkeypatch.undo()
    tifffile = pytest.importorskip("tifffile", reason="needs vitreous[tiff]")
    tifffile.imwrite(tmp_path / "float.tif", values(4), photometric="minisblack", planarconfig="contig")
    tifffile.imwrite(
        tmp_path / "deep.tif", (values(4).transpose(2, 0, 1) * 65535).astype(np.uint16), photometric="minisblack"
    )
    tifffile.imwrite(tmp_path / "rgba.tif", (values(4) * 65535).astype(np.uint16), photometric="rgb")
    tifffile.imwrite(tmp_path / "rgb.tif", values(3), photometric="rgb")
    three = Model(network(3))
    assert off(three.prepare(tmp_path / "rgb.tif"), three.prepare((values(3) * 255).astype(np.uint8))) < 0.02
    for name in ("float", "deep", "rgba"):
        assert off(model.prepare(tmp_path / f"{name}.tif"), model.prepare(values(4))) < 1e-4, name


def test_arrays_for_three_channels(tmp_path: Path) -> None:
    model, x = Model(network(3)), values(3)
    eight = (x * 255).round().astype(np.uint8)
    np.save(tmp_path / "eight.npy", eight)
    np.save(tmp_path / "float.npy", x)
    np.save(tmp_path / "deep.npy", (x * 65535).astype(np.uint16))
    np.save(tmp_path / "large.npy", x * 255)
    expected = model.prepare(eight)
    assert torch.equal(model.prepare(tmp_path / "eight.npy"), expected)
    for name in ("float", "deep"):
        assert off(model.prepare(tmp_path / f"{name}.npy"), expected) < 0.02
    with pytest.raises(InputError, match=r"values in 0…1, these reach 25\d"):
        model.prepare(tmp_path / "large.npy")


def test_arrays_in_a_folder_count_where_no_images_are_beside_them(tmp_path: Path) -> None:
    for name in ("a/x.npy", "a/y.npz", "b/x.npy"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "b" / "x.png").touch()
    found = [file.relative_to(tmp_path).as_posix() for file in pictures.find(tmp_path)]
    assert found == ["a/x.npy", "a/y.npz", "b/x.png"]


def test_own_preprocessing_takes_an_array_or_a_grey_image() -> None:
    def own(array: np.ndarray) -> Tensor:
        assert array.dtype == np.float32 and array.shape[2] == 13
        return F.interpolate(torch.from_numpy(array).permute(2, 0, 1)[None], SIDE)[0] * 4 - 1

    model = Model(network(13), own)
    assert np.allclose(model.preprocess.mean, 0.25) and np.allclose(model.preprocess.std, 0.25)
    assert off(model.prepare(values(13)), own(values(13))[None]) < 1e-6

    def of_image(image: Image.Image) -> Tensor:
        small = image.resize((SIDE, SIDE))
        return torch.from_numpy(np.asarray(small, np.float32))[None] / 255

    eight = (values(1)[..., 0] * 255).astype(np.uint8)
    assert torch.equal(Model(network(1), of_image).prepare(eight)[0], of_image(Image.fromarray(eight)))
    with pytest.raises(ModelError, match=r"must turn an array \[H, W, 4\] into a float tensor \[4, H, W\]"):
        _ = Model(network(4), lambda array: torch.zeros(3, 8, 8)).size
    unknown = Model(Cut(5, 8, states=False), lambda image: torch.zeros(3, SIDE, SIDE), classifier=True)
    assert unknown.size == (SIDE, SIDE)
    with pytest.raises(
        ModelError, match=r"given for 3 channels, the images have 5; .*Model\(net, preprocess, channels=5"
    ):
        vitreous.explain(unknown, torch.rand(1, 5, SIDE, SIDE), "gradient", 1).seen()


# ------------------------------------------------------------------------------------------------------- what is shown


def test_chosen_bands_are_shown(thirteen: Model) -> None:
    eight = np.zeros((SIDE, SIDE, 13), np.uint8)
    eight[..., 3], eight[..., 2], eight[..., 1] = 200, 100, 50
    for images in (eight, thirteen.prepare(eight)):
        shown = vitreous.explain(thirteen, images, "gae").seen()
        assert np.abs(np.asarray(shown).astype(int) - (200, 100, 50)).max() <= 1
    one = Model(thirteen.net, bands=2)
    assert np.asarray(one.preprocess.view(Bands(eight)))[5, 5].tolist() == [100, 100, 100]
    first = Model(thirteen.net).preprocess.view(Bands(eight))
    assert np.asarray(first)[5, 5].tolist() == [0, 50, 100]
    swapped = Model(network(3), bands=(2, 1, 0)).preprocess.view(Image.new("RGB", (99, 99), (1, 2, 3)))
    assert swapped.getpixel((9, 9)) == (3, 2, 1)


def test_deep_values_are_stretched_between_their_percentiles() -> None:
    ramp = np.broadcast_to(np.linspace(1000, 3000, 101, dtype=np.float32), (50, 101))
    shown = np.asarray(Bands(ramp[..., None]).shown()).astype(int)
    assert shown.shape == (50, 101, 3) and shown.min() == 0 and shown.max() == 255
    assert abs(shown[0, 50, 0] - 127) <= 1 and shown[0, 2].max() == 0 and shown[0, 98].min() == 255
    flat = np.asarray(Bands(np.full((9, 9, 2), 7.0, np.float32)).shown())
    assert flat.max() == 0


def test_a_map_is_drawn_on_any_image_that_is_given(thirteen: Model, tmp_path: Path) -> None:
    found = vitreous.explain(thirteen, values(13), "gae")
    np.save(tmp_path / "x.npy", values(13))
    assert found.overlay(tmp_path / "x.npy").size == found.overlay().size
    assert found.overlay(Image.new("RGB", (100, 80))).size == found.overlay().size


@pytest.mark.parametrize("bands", [(1, 2), (0, 1, 13), (0, 1, -1), "012", (True, 1, 2), 1.5])
def test_bands_that_are_not_there(bands: Any) -> None:
    with pytest.raises(OptionError, match=r"give one channel or three of this model's 13 \(0 to 12\)"):
        check_bands(bands, 13)


# --------------------------------------------------------------------------------- the command line, studies and probes


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("weights") / "four.safetensors"
    save_file(network(4, "test_vit").state_dict(), file)
    return file


def test_explain_on_the_command_line(run: Run, weights: Path, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    files = saved(tmp_path / "in", 4)
    model = ["-m", "test_vit", "-w", weights, "--img-size", SIDE]
    ran = run("explain", files["first.npy"], *model, "-x", "gradient", "--channels", "3,2,1", "-o", "out")
    assert ran.code == 0, ran.err
    assert (tmp_path / "out" / "first.png").is_file()
    own = run("explain", "in/one.npz", *model, "-x", "gradient", "-o", "in")
    assert own.code == 0 and np.load(files["one.npz"]).files == ["arr_0"], "the image is not overwritten"
    wrong = {"3,2": "write one channel number or three", "7": "this model's 4 (0 to 3)", "a": "write one channel"}
    for text, said in wrong.items():
        assert said in run("explain", files["last.npy"], *model, "--channels", text).error
    np.save(tmp_path / "objects.npy", np.array([[{}] * 9] * 9))
    assert "array of object is not an image" in run("explain", "objects.npy", *model).error


def test_deep_grey_files_on_the_command_line(run: Run, tmp_path: Path) -> None:
    save_file(network(1, "test_vit").state_dict(), tmp_path / "one.safetensors")
    (tmp_path / "in").mkdir()
    for name in ("last.npy", "first.npy", "one.npz", "named.npz", "flat.npy"):
        saved(tmp_path / "in", 1)[name].unlink()
    ran = run("explain", "in", "-m", "test_vit", "-w", "one.safetensors", "--img-size", SIDE, "-x", "gradient")
    assert ran.code == 0, ran.err
    made = sorted(file.name for file in (tmp_path / "vitreous-out").glob("*.png"))
    assert made == ["deep.png", "deep_2.png", "float.png"]


def classes(root: Path) -> Path:
    for i in range(8):
        (root / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
        np.save(root / "ab"[i % 2] / f"{i}.npy", values(4, seed=i))
    return root


def test_a_study_and_a_probe_of_arrays(tmp_path: Path) -> None:
    data, model = classes(tmp_path / "data"), Model(network(4), labels=list("abcde"), bands=(3, 2, 1))
    study = run_study("maps", data, model, tmp_path / "study", methods="gae", target="label")
    table = study.to_arrow().to_pylist()
    assert len(table) == 8 and not study.failed()
    report = train(model, data, tmp_path / "probe.safetensors", epochs=2, batch=4, validation=0.25)
    assert report.learned == 6 and report.validated == 2 and not report.skipped
    probed = vitreous.models.probe.attach.attach(model, tmp_path / "probe.safetensors")
    assert probed.channels == 4 and probed.bands == (3, 2, 1)
    assert evaluate_probe(probed, data).images == 8
    assert vitreous.explain(probed, data / "a" / "0.npy", "gae").map.shape == (1, 4, 4)


# ------------------------------------------------------------------------------------------------------------ the page


def test_the_page_takes_arrays_and_refuses_samples() -> None:
    pytest.importorskip("fastapi", reason="needs vitreous[web]")
    from starlette.testclient import TestClient

    from vitreous.web.app import create_app
    from vitreous.web.engine import Engine, Source

    models = [Model(network(count), labels=list("abcde"), name=f"m{count}") for count in (13, 1, 3)]
    engine = Engine([(model, Source()) for model in models])
    engine.warm()
    client = TestClient(create_app(engine), base_url="http://localhost:8000")
    told = client.get("/api/info").json()
    assert [one["grid"] for one in told["models"]] == [[4, 4]] * 3
    refused = client.post("/api/predict", json={"model": "m13", "image": "sample:cat"})
    assert refused.status_code in (415, 422) and "13 channels" in refused.json()["detail"]
    assert client.post("/api/predict", json={"model": "m1", "image": "sample:cat"}).status_code == 200

    def send(name: str, content: bytes) -> Any:
        return client.post("/api/images", files={"file": (name, content)})

    held = io.BytesIO()
    np.save(held, values(13))
    sent = send("x.npy", held.getvalue())
    assert sent.status_code == 201 and (sent.json()["width"], sent.json()["height"]) == (100, 80)
    seen = client.post("/api/predict", json={"model": "m13", "image": sent.json()["id"]}).json()
    best = models[0].net(models[0].prepare(values(13))).softmax(-1).max().item()
    assert seen["classes"][0]["probability"] == pytest.approx(best, abs=1e-4)
    assert client.get(f"/api/images/{sent.json()['id']}/view?model=m13").headers["content-type"] == "image/webp"
    other = client.post("/api/predict", json={"model": "m1", "image": sent.json()["id"]})
    assert other.status_code == 415 and "m1 takes images of 1 channel," in other.json()["detail"]
    grey = io.BytesIO()
    Image.fromarray((values(1)[..., 0] * 65535).astype(np.uint16)).save(grey, "TIFF")
    sent = send("x.tif", grey.getvalue()).json()
    for name in ("m1", "m3"):
        assert client.post("/api/predict", json={"model": name, "image": sent["id"]}).status_code == 200
    assert send("x.npy", b"\x93NUMPY garbage").status_code == 415
    engine.close()
