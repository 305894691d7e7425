"""The API's requests and responses. Every request is validated against these first."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from vitreous.web.place import Kind, Place

IMAGE = r"^(sample:[A-Za-z0-9_-]{1,64}|[0-9a-f]{32})$"
HEX = r"^[0-9a-f]{24}$"

ModelName = Annotated[str, Field(max_length=200, description="one of those named at start; nothing: the first")]
ImageId = Annotated[str, Field(pattern=IMAGE, description="of an upload, or sample:NAME", examples=["sample:cat"])]
MapId = Annotated[str, Field(pattern=HEX)]
TargetText = Annotated[
    str | Annotated[int, Field(ge=0, le=10**6)],
    Field(
        examples=["top-1"],
        description="282, tiger cat, top-1, dog-cat, neuron:17, concept:NAME-or-ID, text:a dog, latent:NAME#17, "
        "cat@x,y, cat@x0,y0,x1,y1, cat@predicted, cat@mask:ID, cat@query:17, word:3",
    ),
]
Number = float | None  # None: not a finite number


class Asked(BaseModel):
    """A request; unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Problem(BaseModel):
    """What went wrong (RFC 9457, application/problem+json)."""

    type: str
    title: str
    status: int
    detail: str


# -------------------------------------------------------------------------------------------------------------- info


class ModelInfo(BaseModel):
    name: str
    size: tuple[int, int]  # height, width of its input
    grid: tuple[int, int]
    patch: tuple[int, int] | None
    prefix: list[str]  # tokens before the patches: CLS, registers
    suffix: list[str]
    layers: int
    heads: list[int]  # of each layer; empty where attention cannot be followed
    classifies: bool
    classes: int
    form: Literal["vector", "dense", "detections", "words"]  # how its output is laid out
    aimed: list[str]  # the methods whose maps depend on the target
    output: Literal["logits", "sigmoid", "softmax", "value"]  # what the numbers of its output mean
    texts: bool  # takes text: targets
    kinds: dict[Kind, str | None]  # of targets: None, or why the model does not take them
    unsupported: dict[str, str]  # method: why
    first: list[str]  # the methods that the page begins with
    frames: int | None = None  # how many it takes; None: it takes images
    times: list[tuple[int, int]] = []  # the frames of each tubelet
    closed: dict[str, str] = {}  # view: why this model does not have it


class Sample(BaseModel):
    id: str
    name: str
    frames: int | None = None  # of a clip


class Example(Sample):
    concept: str


class LimitInfo(BaseModel):
    upload_bytes: int
    pixels: int
    methods: int
    targets: int
    maps: int
    models: int  # that the server holds at once
    sheet: int  # images of a comparison
    examples: int
    concepts: int
    formats: list[str]
    frames: int  # of one clip


class MethodInfo(BaseModel):
    name: str
    family: str
    summary: str
    formula: str
    cite: str
    signed: bool
    targeted: bool
    attention: bool
    tokens: bool
    level: bool
    control: bool
    colour: str  # of its lines in charts
    options: dict[str, Any]  # JSON schema of each


class MetricInfo(BaseModel):
    name: str
    family: str
    summary: str
    formula: str
    cite: str
    better: Literal["higher", "lower"]
    usable: bool  # can be asked of /api/curves
    options: dict[str, Any]


class Info(BaseModel):
    version: str
    models: list[ModelInfo]
    allowed: list[str] = []  # the models that may be added
    samples: list[Sample]
    clips: list[Sample] = []  # for models that take videos
    endings: list[str] = []  # of files that are read as clips
    examples: list[Example]  # packaged images of which a concept can be built
    limits: LimitInfo
    methods: list[MethodInfo]
    metrics: list[MetricInfo]


class Label(BaseModel):
    index: int
    label: str


class TargetMeaning(BaseModel):
    """What a target means for an image."""

    target: str  # as the library writes it: "282", "281-282"
    title: str  # for people: "tabby 61%"
    places: list[Place] = []  # where it is


class Chance(BaseModel):
    """A class and how probable it is (of an output for each place, its share of the image), or a regression's value."""

    index: int
    label: str
    probability: Number = None
    value: Number = None


# ------------------------------------------------------------------------------------------------------------ explain


class Uploaded(BaseModel):
    id: str
    name: str
    width: int
    height: int
    note: str | None = None  # what was done to it, where a user may wonder
    frames: int | None = None  # of a clip
    refused: dict[str, str] = {}  # model: why it cannot use it


class OfImage(Asked):
    """A model and an image."""

    model: ModelName | None = None
    image: ImageId


class PredictAsked(OfImage):
    top: Annotated[int, Field(ge=1, le=100)] = 5


class Prediction(BaseModel):
    classes: list[Chance]
    why: str | None = None  # why there are none
    seen: tuple[float, float, float, float] | None = None  # what the model sees: left, top, right, bottom, in pixels


class MethodAsked(Asked):
    name: Annotated[str, Field(max_length=100, examples=["cdam"])]
    options: Annotated[dict[str, Any], Field(max_length=32)] = {}


class ExplainAsked(OfImage):
    methods: Annotated[list[MethodAsked], Field(min_length=1, max_length=16)]
    targets: Annotated[list[TargetText], Field(min_length=1, max_length=8)] = ["top-1"]


class Started(BaseModel):
    job: str


class MapMeta(BaseModel):
    """The SSE event `map`."""

    id: str
    method: str
    options: dict[str, Any]  # those that differ from the default
    target: str | None  # as asked; None: the method does not depend on one
    resolved: str | None  # as the library writes it: "282"
    title: str | None  # for people: "tabby 61%"
    shape: tuple[int, int] | tuple[int, int, int]  # of a clip: tubelets or frames first
    times: list[tuple[int, int]] = []  # of a clip: the frames of each map, the end not included
    signed: bool
    level: bool
    control: bool
    min: Number
    max: Number
    limits: tuple[float, float]  # where the colours end
    seconds: float
    cached: bool
    notes: dict[str, Any]
    places: list[Place] = []  # where the target is


class MapsAsked(Asked):
    maps: Annotated[list[MapId], Field(min_length=1, max_length=48)]


class FigureAsked(MapsAsked):
    cells: bool = False


class Snippet(BaseModel):
    python: str
    cli: str


# ---------------------------------------------------------------------------------------------------------- attention


class Share(BaseModel):
    """Where the read-out of one layer looks, heads averaged; the sum is one."""

    cls: float
    registers: float
    patches: float


class AttentionInfo(BaseModel):
    layers: int
    heads: list[int]
    tokens: int
    grid: tuple[int, int]
    prefix: list[str]
    suffix: list[str]
    readout: str  # what the classifier reads: "CLS", "the mean of the patches", …
    share: list[Share]


class RolloutAsked(OfImage):
    discard: Annotated[float, Field(ge=0, lt=1)] = 0.0
    heads: Literal["mean", "min", "max"] = "mean"
    residual: Annotated[float, Field(ge=0, le=1)] = 0.5
    start_layer: Annotated[int, Field(ge=0, le=1000)] = 0


# ----------------------------------------------------------------------------------------------------------- concepts


class ConceptMade(BaseModel):
    id: str
    name: str
    model: str
    similarity: Literal["dot", "cosine", "l2"]
    examples: list[str]


# ------------------------------------------------------------------------------------------------------- faithfulness


class CurvesAsked(Asked):
    maps: Annotated[list[MapId], Field(min_length=1, max_length=16)]
    metric: Annotated[str, Field(max_length=100)] = "deletion"
    steps: Annotated[int, Field(ge=2, le=100)] | None = None  # None: the metric's own
    target: TargetText = "top-1"  # for maps that do not depend on one
    random: Annotated[int, Field(ge=0, le=20)] = 5  # random maps to compare with


class Band(BaseModel):
    """The same of random maps: mean, least and most at each point."""

    mean: list[Number]
    low: list[Number]
    high: list[Number]
    value: Number


class CurveMeta(BaseModel):
    """The SSE event `curve`."""

    map: str
    metric: str
    target: str
    title: str
    better: Literal["higher", "lower"]
    at: list[float] | None
    values: list[Number] | None
    value: Number
    random: Band | None
    order: list[int]  # patches, the most relevant first


class EraseAsked(OfImage):
    removed: Annotated[list[Annotated[int, Field(ge=0, le=10**6)]], Field(max_length=20_000)] = []
    classes: Annotated[list[Annotated[int, Field(ge=0, le=10**6)]], Field(max_length=20)] = []
    targets: Annotated[list[TargetText], Field(max_length=8)] = []


class TargetScore(BaseModel):
    target: str
    score: Number


class Erased(BaseModel):
    way: Literal["tokens", "pixels"]
    why: str | None  # why pixels
    top: list[Chance]
    classes: list[Chance]
    scores: list[TargetScore]
