"""The options that commands share, each declared once, and their values; importing this does not import torch.

A group of options is a frozen dataclass. A command under `@grouped` takes the group as one parameter, and Typer sees
its fields. In every command the options stand in this order: which model, which methods, metrics and target, what is
the command's own, which images, how it is computed, where the results go.
"""

from __future__ import annotations

import re
import sys
import warnings
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from vitreous._support.files import FIGURES
from vitreous.cli.values import USUAL, parse_bands, parse_formats, parse_size
from vitreous.errors import ModelWarning, OptionError

if TYPE_CHECKING:
    from vitreous.models.model import Model
    from vitreous.registry import Declared, Method

OUT = Path("vitreous-out")
OLDER = {"methods": "method", "metrics": "metric"}  # spellings of options that are still understood
Settings = dict[str, dict[str, Any]]  # options of methods and metrics by name

# ------------------------------------------------------------------------------------------------------------ images

Images = Annotated[
    list[str],
    typer.Argument(
        help="Image files, folders or patterns; of a model of videos: GIFs, films, or folders of frames.",
        metavar="IMAGE...",
    ),
]
DataSet = Annotated[
    str,
    typer.Argument(
        help="A folder of images or of class folders, a CSV (image, label, mask or box), tar shards or a Hugging Face "
        "data set on disk.",
        metavar="DATA",
    ),
]

# ------------------------------------------------------------------------------------------------------------- models

MODEL = "timm name, hf/ID, torchvision/NAME, openclip/NAME, a folder or a file; default: the embedded model."
WEIGHTS = "Checkpoint: a file, FILE#NAME for one network of several in it (w.pth#model_ema), a folder, or random."
ModelName = Annotated[str | None, typer.Option("--model", "-m", help=MODEL)]
ModelNames = Annotated[list[str] | None, typer.Option("--model", "-m", help=f"{MODEL} May be repeated.")]
WeightsFile = Annotated[str | None, typer.Option("--weights", "-w", help=WEIGHTS)]
WeightsFiles = Annotated[list[str] | None, typer.Option("--weights", "-w", help=f"{WEIGHTS} One for each --model.")]
TrustPickle = Annotated[
    bool, typer.Option("--trust-pickle", help="Run the code in a network pickled as a whole: torch.save(model).")
]
ImageSize = Annotated[str | None, typer.Option("--img-size", help="Another input size: 384 or 224x448.")]
BANDS = "Channels of the images that figures show: one, or three as red, green and blue; from 0: 3,2,1."
Bands = Annotated[str | None, typer.Option("--channels", "--bands", help=BANDS)]
BandsOnly = Annotated[str | None, typer.Option("--bands", help=BANDS)]  # where --channels are those of a head
Device = Annotated[
    str | None, typer.Option("--device", help="cpu, cuda, cuda:1 or mps; default: the GPU if there is one.")
]
LabelsFile = Annotated[Path | None, typer.Option("--labels", help="Class names: one a line, or JSON.")]
ProbeFile = Annotated[
    Path | None,
    typer.Option("--probe", help="A file of vitreous probe train: use its classes instead of the model's own."),
]
OutputIs = Annotated[
    str,
    typer.Option(
        "--output-is",
        help="What the output means: logits, sigmoid (each class by itself), softmax (already probabilities) "
        "or value (a regression).",
        metavar="MEANING",
    ),
]
Memory = Annotated[
    str | None, typer.Option("--memory", help="Use about this much memory: 4GB, 512MiB; default: half of what is free.")
]

# --------------------------------------------------------------------------------- methods, metrics and their options

METHOD: dict[str, Any] = {"help": "Methods, separated by commas, or all; see: vitreous methods."}
METHOD_NAMES = ("--method", "-x")
TARGET = (
    "What to explain: a class, top-1, a-b, concept:NAME, latent:NAME#17 or text:WORDS; of labelled data also label."
)
MethodsOrDefault = Annotated[str | None, typer.Option(*METHOD_NAMES, **METHOD)]
OneOrMoreMethods = Annotated[
    str | None, typer.Option(*METHOD_NAMES, **METHOD, show_default="the best quick map for a class")
]
MethodRows = Annotated[
    str | None,
    typer.Option(
        *METHOD_NAMES,
        help="Methods, separated by commas, or all; each may have options of its own: gae,gae:start_layer=2.",
    ),
]
MetricNames = Annotated[
    str | None,
    typer.Option(
        "--metric",
        help="Metrics or families of them, separated by commas, or all; each may have options: srg,srg:of=logit.",
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", help="An option of a method or metric: rollout.discard=0.9. May be repeated."),
]
Target = Annotated[str | None, typer.Option("--target", "-t", help=TARGET)]
Targets = Annotated[str | None, typer.Option("--target", "-t", help=f"{TARGET} Several are separated by commas.")]
Masks = Annotated[Path | None, typer.Option("--masks", help="A folder with a mask for each image, of the same name.")]
INPUTS = "An .npz of what the network gets beside the images: arrays by name, one row for each image or one for all."
Inputs = Annotated[Path | None, typer.Option("--inputs", help=INPUTS)]
LikeImage = Annotated[Path | None, typer.Option("--like", help="Another image: why are the two alike? A map for each.")]
Limit = Annotated[int | None, typer.Option("--limit", help="Use only the first N images.", min=1)]
Sample = Annotated[int | None, typer.Option("--sample", help="Use only N images, chosen at random.", min=1)]
Seed = Annotated[int, typer.Option("--seed", help="Seed of all random choices: images, noise, intervals.", min=0)]

# ------------------------------------------------------------------------------------------------------------- results

BATCH = typer.Option("--batch", help="Images at a time; a study without it takes what memory allows.", min=1)
FOLDER = typer.Option("--out", "-o", help="Folder for the results.")
OutFolder = Annotated[Path, FOLDER]
OutIfAny = Annotated[Path | None, FOLDER]
FILE = typer.Option("--out", "-o", help="File to write.")
OutFile = Annotated[Path, FILE]
OutFileIfAny = Annotated[Path | None, FILE]
Format = Annotated[
    str | None,
    typer.Option(
        "--format",
        show_default=USUAL,
        help="What to write, separated by commas: png, svg or pdf (the figure), npz (the numbers), gif (of videos: a "
        "film); or none.",
        metavar="KINDS",
    ),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace other results of vitreous; without it, the new ones get new names.")
]
Replace = Annotated[
    bool, typer.Option("--overwrite", help="Replace another one that the file holds; without it, that is refused.")
]
Frames = Annotated[
    int | None,
    typer.Option(
        "--frames", min=1, help="Of a model of videos: how many frames to sample; without it, as it was built."
    ),
]
Cells = Annotated[bool, typer.Option("--cells", help="Show the true patches, not a smooth map.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of text.")]


# --------------------------------------------------------------------------------------------------- groups of options


@dataclass(frozen=True)
class Backbone:
    """The network and its device."""

    model: ModelName = None
    weights: WeightsFile = None
    img_size: ImageSize = None
    bands: Bands = None
    device: Device = None
    trust_pickle: TrustPickle = False

    def load(self) -> Model:
        more: dict[str, Any] = {"bands": self.bands, "trust_pickle": self.trust_pickle}
        return refuse_videos(load_model(self.model, self.weights, self.device, self.img_size, **more))


@dataclass(frozen=True)
class Source(Backbone):
    """The model, its device and how much memory it may use."""

    labels: LabelsFile = None
    probe: ProbeFile = None
    output_is: OutputIs = "auto"
    memory: Memory = None

    def load(self) -> Model:
        return refuse_videos(self.load_any())

    def load_any(self) -> Model:
        """Load a model of images or of videos."""
        more = self.labels, self.probe, self.bands, self.output_is, self.trust_pickle
        return load_model(self.model, self.weights, self.device, self.img_size, *more)

    def limited(self) -> AbstractContextManager[None]:
        """Apply the memory limit within this context."""
        from vitreous._support.memory import limit_memory

        return limit_memory(self.memory)


@dataclass(frozen=True)
class SourceOfHead(Source):
    """The same for a command whose --channels are those of an attention head."""

    bands: BandsOnly = None


@dataclass(frozen=True)
class Choice:
    """The choice of images of a data set, and what the network gets beside them."""

    inputs: Inputs = None
    limit: Limit = None
    sample: Sample = None
    seed: Seed = 0


@dataclass(frozen=True)
class Beside:
    """What the network gets beside the images, or another image that they are compared with."""

    inputs: Inputs = None
    like: LikeImage = None


@dataclass(frozen=True)
class Place:
    """Where results go, what is written of them, and whether they may replace others."""

    out: OutFolder = OUT
    format: Format = None
    overwrite: Overwrite = False
    as_json: AsJson = False

    films: ClassVar[bool] = False  # whether a film may be written

    @property
    def formats(self) -> tuple[str, ...]:
        """What is written; with --out FILE.png, unless the numbers are asked for, only the figure."""
        one = self.out.suffix.lower() in (*FIGURES, ".gif") and not self.out.is_dir()
        return parse_formats(self.format or ("png" if one else USUAL), self.films)


@dataclass(frozen=True)
class PlaceIfAny:
    """The same for a report that need not be written, or has a place of its own."""

    out: OutIfAny = None
    overwrite: Overwrite = False
    as_json: AsJson = False


@dataclass(frozen=True)
class Limited:
    """How many images are used."""

    limit: Limit = None


@dataclass(frozen=True)
class PlaceOfImages(Place, Limited):
    """The same after the number of images: the fields of the last class come first."""


@dataclass(frozen=True)
class PlaceOfMaps(PlaceOfImages):
    """The same for maps, of which a film may be written."""

    films: ClassVar[bool] = True


@dataclass(frozen=True)
class Saliency:
    """How the saliency of a class is computed and compared with attention."""

    samples: Annotated[int, typer.Option(help="Noisy copies of each image for the saliency map.")] = 16
    sigma: Annotated[float, typer.Option(help="Noise, as a share of the image's range of values.")] = 0.15
    space: Annotated[str, typer.Option(help="Where attention and saliency are compared: patch or pixel.")] = "patch"


# ------------------------------------------------------------------------------------------- values of options


def spelling(word: str) -> str:
    """An option's name as it is spelled now; older spellings are in no help."""
    return OLDER.get(word, word)


def parse_settings(given: list[str], metrics: bool = False) -> Settings:
    """Parse ["rollout.discard=0.9"] to {"rollout": {"discard": 0.9}}; `metrics`: also accept options of metrics."""
    from vitreous.registry import METHODS, METRICS

    settings: Settings = {}
    for text in given:
        found = re.fullmatch(r"\s*([\w-]+)\.([\w-]+)\s*=(.*)", text)
        if found is None:
            raise OptionError(f"--set {text}: write method.option=value, e.g. --set rollout.discard=0.9")
        name, option = found[1].replace("-", "_"), found[2].replace("-", "_")
        known: Declared = METRICS[name] if metrics and name in METRICS else METHODS[name]
        value = known.read(option, found[3].strip())
        known.check({option: value})
        settings.setdefault(name, {})[option] = value
    return settings


def pick_methods(text: str) -> tuple[list[Method], bool]:
    """The named methods without duplicates, and whether the text was "all"."""
    from vitreous.registry import METHODS

    if text.strip() == "all":
        return list(METHODS.values()), True
    names = [name.strip().replace("-", "_") for name in text.split(",") if name.strip()]
    if not names:
        raise OptionError("--method: name at least one; see: vitreous methods")
    return [METHODS[name] for name in dict.fromkeys(names)], False


def refuse_videos(model: Model) -> Model:
    from vitreous.trace.apply import of_images

    return of_images(model, "this command works")


def load_model(
    spec: str | None,
    weights: str | None,
    device: str | None,
    img_size: str | None,
    labels: Path | None = None,
    probe: Path | None = None,
    bands: str | None = None,
    output: str = "auto",
    trust_pickle: bool = False,
) -> Model:
    from vitreous.models.load import is_here, load

    if weights is None and not is_here(spec) and sys.stderr.isatty():
        typer.secho(f"loading {spec}, which is downloaded on first use …", err=True, dim=True)
    size, shown = parse_size(img_size), parse_bands(bands)
    more: dict[str, Any] = {"labels": labels, "probe": probe, "bands": shown, "output": output}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ModelWarning)  # said below
        model = load(spec, weights, device, img_size=size, trust_pickle=trust_pickle, **more)
    for note in model.notes:
        typer.secho(f"note: {note}", err=True)
    if model.device.type != "cpu" or sys.stderr.isatty():
        typer.secho(f"{model.name} runs on {model.device}", err=True, dim=True)
    return model
