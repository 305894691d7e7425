"""The Inside tab: which heads look where the class is, queries and keys, layer by layer."""

from __future__ import annotations

from typing import Annotated

import torch
from fastapi import APIRouter
from fastapi.responses import Response
from jaxtyping import Float, UInt8
from pydantic import BaseModel, Field
from torch import Tensor

from vitreous.methods.attention.head_similarity import class_saliency, similarities
from vitreous.registry import METHODS
from vitreous.trace.apply import refuse
from vitreous.trace.tokens import one_head, projections
from vitreous.trace.trace import Trace
from vitreous.types import Heads, Keys
from vitreous.web import schema
from vitreous.web.attention import Head, Token, looked, query
from vitreous.web.clips import only_images
from vitreous.web.common import BINARY, JOB, Client, ImageQuery, Layer, ModelQuery, Served, each_number, numbers
from vitreous.web.jobs import Job
from vitreous.web.targets import expect, heading, resolve, settle

router = APIRouter()


class InsideAsked(schema.OfImage):
    target: schema.TargetText = "top-1"
    samples: Annotated[int, Field(ge=1, le=64)] = 16


class InsideMeta(BaseModel):
    """The SSE event `inside`."""

    target: str
    title: str
    scores: list[list[schema.Number]]  # CASS of each layer's heads


@router.post("/inside", status_code=202, responses=JOB)
async def inside(engine: Served, client: Client, asked: InsideAsked) -> schema.Started:
    """CASS: how much each head's attention resembles the saliency of the target."""
    served = engine.find(asked.model)
    only_images(served.model, "inside")
    engine.expect(asked.image)
    await expect(engine, served, asked.image, [asked.target])

    def work(job: Job) -> None:
        trace = engine.trace(served, asked.image).fork()
        refuse(trace, METHODS["cass_attention"])
        target = settle(resolve(engine, served, trace, asked.target), trace)
        with torch.no_grad():
            phi = class_saliency(trace, target, space="patch", samples=asked.samples, sigma=0.15, seed=0)
            scores = similarities(trace, phi, "patch")[0]  # [L H]
        told = InsideMeta(
            target=str(asked.target), title=heading(target, trace), scores=[each_number(row) for row in scores]
        )
        job.tell("inside", told.model_dump(mode="json"))

    return schema.Started(job=engine.start(client, served, work).id)


@router.get("/inside/layers", response_class=Response, responses=BINARY)
async def layers(engine: Served, image: ImageQuery, model: ModelQuery = None) -> Response:
    """The read-out's attention in each layer, heads averaged."""

    def work(trace: Trace) -> Response:
        rows = torch.cat([trace.read_layer(layer).mean(1) for layer in trace.attention])  # [L M]
        return numbers(trace.map(rows), shape=(len(rows), *trace.layout.grid), lasting=True)

    return await looked(engine, model, image, work, "inside")


@router.get("/inside/qk", response_class=Response, responses=BINARY)
async def qk(
    engine: Served,
    image: ImageQuery,
    model: ModelQuery = None,
    layer: Layer = -1,
    head: Head = "0",
    token: Token = "readout",
) -> Response:
    """q·k of one query before the softmax, and the queries and keys of all patches as colours."""

    def work(trace: Trace) -> Response:
        seen = one_head(trace.layer(layer), head)
        q, k, scale = projections(trace, seen)
        scores = trace.map(dots(q, k, scale, query(trace, token)))[0]
        colours = [components(trace.to_patches(t.mean(1))[0]) for t in (q, k)]
        return numbers(scores, *colours, shape=trace.layout.grid, lasting=True)

    return await looked(engine, model, image, work, "inside")


def dots(q: Heads, k: Keys, scale: float, weights: Float[Tensor, "1 N"]) -> Float[Tensor, "1 M"]:
    """s·(Σᵢ wᵢ qᵢ)·kⱼ, the mean of the heads."""
    asked = torch.einsum("bn,bhnd->bhd", weights.to(q), q)
    return torch.einsum("bhd,bhmd->bhm", asked * scale, k).mean(1)


def components(vectors: Float[Tensor, "h w d"]) -> UInt8[Tensor, "h w 3"]:
    """The three main directions of the vectors as red, green and blue, each over its range of 1 … 99 %."""
    h, w, d = vectors.shape
    flat = vectors.reshape(h * w, d).float()
    flat = flat - flat.mean(0)
    axes = torch.linalg.eigh(flat.mT @ flat).eigenvectors.flip(1)[:, :3]  # [d 3]
    axes = axes * torch.where(axes.sum(0) < 0, -1.0, 1.0)
    shown = torch.nn.functional.pad(flat @ axes, (0, 3 - axes.shape[1]))  # [n 3]
    ends = torch.quantile(shown, torch.tensor([0.01, 0.99], device=shown.device), dim=0)
    scaled = ((shown - ends[0]) / (ends[1] - ends[0]).clamp_min(1e-12)).clamp(0, 1)
    return (scaled * 255).round().to(torch.uint8).reshape(h, w, 3)
