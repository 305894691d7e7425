"""The Features tab: principal components of patch features as colours, and how similar patches are to one of them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from fastapi import APIRouter, Query
from fastapi.responses import Response
from jaxtyping import Float
from torch import Tensor

from vitreous.attribution import Attribution
from vitreous.capture.attention import widen
from vitreous.errors import OptionError
from vitreous.inspect.basis import Components, Covariance
from vitreous.models.layout import Layout
from vitreous.models.stages import covering
from vitreous.trace.features import final_norm, patch_features, width_of
from vitreous.web.clips import only_images
from vitreous.web.common import BINARY, ImageQuery, Layer, ModelQuery, Served, numbers
from vitreous.web.engine import Engine
from vitreous.web.engine import Served as ServedModel
from vitreous.web.exports import ZIP, Named, archive, name_of, views_of

router = APIRouter()
Patch = Annotated[int, Query(ge=0, le=10**6)]
Among = Annotated[Literal["image", "samples"], Query()]
Taken = Float[Tensor, "h w D"]


async def taken(engine: Engine, served: ServedModel, image: str, layer: int) -> Taken:
    """The features of an image after a layer, from the store or made now."""
    only_images(served.model, "features")
    found = engine.features.get((served.name, image, layer))
    return found if found is not None else await engine.ask(served, lambda: take(engine, served, image, layer))


def take(engine: Engine, served: ServedModel, image: str, layer: int) -> Taken:
    """After the final norm, if the model has one that fits, as `vitreous.inspect.features` does."""
    trace = engine.trace(served, image)
    found, norm = patch_features(trace, [layer])[layer], final_norm(trace)
    if norm is not None and width_of(norm) == found.shape[-1]:
        with torch.no_grad():
            found = norm(found)
    kept: Taken = widen(found[0].detach()).cpu()
    engine.features.put((served.name, image, layer), kept, kept.numel() * kept.element_size())
    return kept


async def based(engine: Engine, served: ServedModel, image: str, layer: int, among: str) -> tuple[Taken, Components]:
    """The features of an image, and a basis: its own, or that of the packaged photos, the same for all images."""
    own = await taken(engine, served, image, layer)
    photos = list(engine.samples) if among == "samples" and served.model.channels in (1, 3) else []
    some = [await taken(engine, served, one, layer) for one in photos] or [own]
    return own, await engine.read(lambda: basis_of(some))


def basis_of(features: list[Taken]) -> Components:
    sums = Covariance()
    rows = [one.flatten(0, 1) for one in features]
    for one in rows:
        sums.add(one)
    found = sums.components()
    return found.ending(np.concatenate([found.of(one).numpy() for one in rows]))


@router.get("/features", response_class=Response, responses=BINARY)
async def features(
    engine: Served, image: ImageQuery, model: ModelQuery = None, layer: Layer = -1, among: Among = "image"
) -> Response:
    """Three principal components as colours: the share of the variance along each, then red, green and blue."""
    own, basis = await based(engine, engine.find(model), image, layer, among)
    colours = torch.from_numpy(basis.colours(basis.of(own).numpy()))
    drawn = (colours * 255).round().to(torch.uint8)
    return numbers(torch.from_numpy(basis.share), drawn, shape=tuple(own.shape[:2]), extra=3, lasting=True)


@router.get("/features/similarity", response_class=Response, responses=BINARY)
async def similarity(
    engine: Served, image: ImageQuery, model: ModelQuery = None, layer: Layer = -1, patch: Patch = 0
) -> Response:
    """The cosine of the features of every patch with those of one."""
    served = engine.find(model)
    layout = (await engine.seen(served, image)).layout
    own = await taken(engine, served, image, layer)
    return numbers(cosines(own, place_of(layout, own, patch)), shape=tuple(own.shape[:2]), lasting=True)


def cosines(features: Taken, place: tuple[int, int]) -> Float[Tensor, "h w"]:
    unit = F.normalize(features, dim=-1)
    return unit @ unit[place]


def place_of(layout: Layout, features: Taken, patch: int) -> tuple[int, int]:
    """A patch of the model's grid on the grid of a layer, whose patches may be merged."""
    h, w = layout.grid
    if patch >= h * w:
        raise OptionError(f"patch {patch} is out of range: there are patches 0 to {h * w - 1}")
    row, column = (int(covering(fine, own)[i]) for i, fine, own in zip(divmod(patch, w), (h, w), features.shape[:2]))
    return max(row, 0), max(column, 0)


@router.get("/features/maps.npz", response_class=Response, responses=ZIP)
async def maps(
    engine: Served,
    image: ImageQuery,
    model: ModelQuery = None,
    layer: Layer = -1,
    among: Among = "image",
    patch: Patch = 0,
) -> Response:
    """All maps of the Features tab: the three components, and the similarity to a patch."""
    served, views = engine.find(model), views_of(engine, model, image)
    trace = await engine.seen(served, image)
    own, basis = await based(engine, served, image, layer, among)
    number = trace.layer_number(layer)

    def named(name: str, values: Tensor, **told: Any) -> Named:
        box = trace.layout.box(trace.size)
        options = {"layer": number, **told}
        found = Attribution(values[None].float(), name, options, (None,), served.name, True, views=views, box=box)
        return name_of(found, options), values.float().numpy(), found.provenance

    def work() -> Response:
        parts = basis.of(own)
        each = [named("component", parts[..., i], number=i, basis=among) for i in range(parts.shape[-1])]
        similar = cosines(own, place_of(trace.layout, own, patch))
        return archive([*each, named("similarity", similar, patch=patch)], "features")

    return await engine.read(work)
