"""Distil DeiT-Tiny into a ViT-Tiny/16 with four registers, on a folder of unlabelled images.

The student starts from random weights and goes through these stages:

    forced     every sublayer reads what the teacher's sublayer read and learns what it wrote
    whole      end to end: the teacher's classes and its residual stream
    dropped    the same, but half of the steps hide a third or half of the patches from the student
    registers  four registers take over what the teacher keeps in a few outlying patches
    mix        the weights before and after the registers stage, 15 : 85
    centre     the tokens that enter the last attention are centred; the function stays the same

    python training/distill.py IMAGES --teacher teacher.safetensors --out student.safetensors

Stop it at any time: the same command continues from the checkpoint beside the output file.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import losses
import torch
from evaluate import answers, top
from images import (
    Labelled,
    UsageError,
    augment,
    find_images,
    inputs,
    load_images,
    load_labelled,
    random_patches,
    usable,
)
from losses import Terms
from network import ViT, centre, load, mix, save
from recipe import STAGES, Recipe
from torch import Tensor, nn

POOL_SIDE = 176  # training images are held in memory as squares of this side
SAMPLE = 1024  # images from which the start of the registers and the mean token are taken
SAMPLE_BATCH = 64
CLIP = {"forced": 5.0, "whole": 1.0, "dropped": 1.0, "registers": 1.0}  # gradient norm
DECODER_RATE = 4.0  # times the student's learning rate
WEIGHT_DECAY = 0.02
AVERAGE_DECAY, AVERAGE_EVERY = 0.998, 4  # of the averaged weights; steps between two updates
TRAINED_SHARE = 0.85  # of the weights after the registers stage in the mix
SAVE_EVERY = 60.0  # seconds
PARTS = ("start", "student", "average", "decoders", "optimiser")  # of a checkpoint


class Distiller:
    """Student, averaged student, teacher and optimiser; one call of `advance` is one update."""

    def __init__(self, images: Tensor, teacher: ViT, recipe: Recipe, compiled: bool = False) -> None:
        self.images, self.recipe, self.compiled = images, recipe, compiled
        self.device = images.device
        self.teacher = teacher.to(self.device)
        self.generator = torch.Generator(self.device)
        self.done = 0
        self.current = ""  # stage for which the networks are compiled
        ready = partial(torch.compile, dynamic=False) if compiled else lambda function: function
        self.forced_terms = ready(losses.forced_terms)
        self.stream_terms = ready(losses.stream_terms)
        self.register_terms = ready(losses.register_terms)
        self.dropped_register_terms = ready(losses.dropped_register_terms)
        torch.manual_seed(recipe.seed)
        self.begin(ViT(teacher.dimensions))

    def begin(self, student: ViT) -> None:
        """Train this student from now on, with its own average and optimiser and, if it has registers, decoders."""
        self.student = student.to(self.device).train().requires_grad_(True)
        self.start, self.average = (copy.deepcopy(student).eval().requires_grad_(False) for _ in range(2))
        width = student.dimensions.width
        self.decoders = nn.ModuleList(nn.Linear(width, width) for _ in range(2 if student.registers else 0))
        self.decoders.to(self.device)
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in student.named_parameters():
            decays = parameter.ndim > 1 and not name.endswith(("_token", "pos_embed"))
            (matrices if decays else others).append(parameter)
        groups = [
            {"params": matrices, "weight_decay": WEIGHT_DECAY, "times": 1.0},
            {"params": others, "weight_decay": 0.0, "times": 1.0},
            {"params": list(self.decoders.parameters()), "weight_decay": 0.0, "times": DECODER_RATE},
        ]
        self.optimiser = torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=self.device.type == "cuda")

    def sample(self) -> Iterator[Tensor]:
        """The first training images, whole, as inputs in batches."""
        for batch in self.images[:SAMPLE].split(SAMPLE_BATCH):
            yield inputs(batch, self.student.dimensions.side)

    def enter(self, stage: str) -> None:
        """Prepare the student for the steps of a stage."""
        if stage == "registers" and not self.student.registers:
            torch.manual_seed(self.recipe.seed)
            self.begin(losses.add_registers(self.average, self.sample()))
        if self.compiled and self.current != stage:
            torch.compiler.reset()  # torch keeps only a few variants of a function, fewer than all stages need
            self.student.compile_blocks()
            self.teacher.compile_blocks()
        self.current = stage

    def terms(self, step: int) -> Terms:
        """The loss terms of a step. Its random choices follow from the seed and its number alone."""
        recipe, dimensions = self.recipe, self.student.dimensions
        self.generator.manual_seed(recipe.seed * 1_000_003 + step)
        count, removed = recipe.batch_size(step), recipe.removed(step)
        chosen = torch.randint(len(self.images), (count,), device=self.device, generator=self.generator)
        batch = augment(self.images[chosen], dimensions.side, self.generator)
        keep = None
        if removed is not None:
            kept = dimensions.patches - dimensions.patches // removed
            keep = random_patches(count, dimensions.patches, kept, self.generator)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            with torch.no_grad():
                wanted = self.teacher(batch)
            if recipe.stage(step)[0] == "forced":
                return self.forced_terms(*self.student.forced(batch, wanted.stream), wanted)
            given = self.student(batch, keep)
            if not self.student.registers:
                return self.stream_terms(given, wanted)
            if removed is not None:
                return self.dropped_register_terms(given, wanted, self.student.prefix)
            return self.register_terms(given, wanted, self.student.prefix, self.decoders)

    def advance(self) -> Terms:
        """Take the next step of the recipe."""
        step = self.done
        stage, number = self.recipe.stage(step)
        self.enter(stage)
        terms = self.terms(step)
        for group in self.optimiser.param_groups:
            group["lr"] = self.recipe.learning_rate(step) * group["times"]
        self.optimiser.zero_grad(set_to_none=True)
        losses.weighted(terms, self.recipe.weights(step)).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.student.parameters(), CLIP[stage])
        self.optimiser.step()
        if step % AVERAGE_EVERY == 0:
            self.follow((number if self.student.registers else step) / AVERAGE_EVERY)
        self.done += 1
        return {name: term.detach() for name, term in terms.items()}

    @torch.no_grad()
    def follow(self, updates: float) -> None:
        """Let the averaged weights follow the student's, faster in the beginning."""
        decay = min(AVERAGE_DECAY, (1 + updates) / (10 + updates))
        for mean, value in zip(self.average.parameters(), self.student.parameters(), strict=True):
            mean.lerp_(value, 1 - decay)

    def finished(self) -> ViT:
        """The network that is written: the average mixed with its start, then centred."""
        return centre(mix(self.start, self.average, TRAINED_SHARE), self.sample())

    @property
    def settings(self) -> dict[str, Any]:
        return {**asdict(self.recipe), "images": len(self.images)}

    def save(self, path: Path) -> None:
        """Write the checkpoint whole or not at all."""
        state = {part: getattr(self, part).state_dict() for part in PARTS}
        partial_file = path.with_name(path.name + ".part")
        torch.save({**state, "settings": self.settings, "done": self.done}, partial_file)
        partial_file.replace(path)

    def restore(self, path: Path) -> None:
        """Continue from a checkpoint made with the same settings and images."""
        state = torch.load(path, map_location=self.device, weights_only=True)
        for name, value in self.settings.items():
            before = state["settings"].get(name)
            if before != value:
                raise UsageError(f"{path} was made with {name} = {before}, not {value}: delete it to start afresh")
        if "reg_token" in state["student"]:
            self.begin(ViT(self.teacher.dimensions, registers=4))
        for part in PARTS:
            getattr(self, part).load_state_dict(state[part])
        self.done = state["done"]


def report(distiller: Distiller, terms: Terms, started: float, samples: Labelled | None) -> None:
    """Print a line of progress; a loss that is not finite ends the run."""
    if not all(term.isfinite() for term in terms.values()):
        raise UsageError(f"the loss is not finite at step {distiller.done}: try a lower --lr-scale")
    words = [f"step {distiller.done}/{distiller.recipe.total}", distiller.recipe.stage(distiller.done - 1)[0]]
    words += [f"{name} {term.item():.4f}" for name, term in terms.items()]
    words += [f"lr {distiller.optimiser.param_groups[0]['lr']:.2e}", f"{time.perf_counter() - started:.0f} s"]
    if samples is not None:
        found = answers(distiller.average, samples.images)
        words += [f"top-{count} {top(found, samples.classes, count)}" for count in (1, 5)]
    print("  ".join(words), flush=True)


def train(distiller: Distiller, checkpoint: Path, stop_after: int | None, samples: Labelled | None) -> None:
    """Follow the recipe to its end, or for `stop_after` steps."""
    recipe = distiller.recipe
    end = recipe.total if stop_after is None else min(recipe.total, distiller.done + stop_after)
    started = saved = time.perf_counter()
    while distiller.done < end:
        terms = distiller.advance()
        border = distiller.done == end or recipe.stage(distiller.done)[1] == 0
        if border or time.perf_counter() - saved > SAVE_EVERY:
            report(distiller, terms, started, samples)
            distiller.save(checkpoint)
            saved = time.perf_counter()


# ----------------------------------------------------------------------------------------------- command line


def parse(arguments: list[str] | None) -> argparse.Namespace:
    summary = "Distil DeiT-Tiny into a ViT-Tiny/16 with four registers, on a folder of unlabelled images."
    parser = argparse.ArgumentParser(prog="distill.py", description=summary)
    add = parser.add_argument
    add("images", type=Path, help="folder of images, searched recursively; no labels needed")
    add("--teacher", type=Path, required=True, help="safetensors file of timm's deit_tiny_patch16_224")
    add("--out", type=Path, required=True, help="safetensors file to write (float16)")
    for stage, steps in zip(STAGES, (10_000, 8_000, 4_000, 4_000), strict=True):
        add(f"--{stage}", type=int, metavar="STEPS", default=steps, help=f"{stage} stage (default: %(default)s steps)")
    add("--batch", type=int, default=1024, help="images per step, half of it when forced (default: %(default)s)")
    add("--lr-scale", type=float, default=1.0, help="factor on all learning rates (default: %(default)s)")
    add("--seed", type=int, default=0, help="of weights, crops and patches (default: %(default)s)")
    add("--samples", type=Path, help="folder of labelled images for measuring accuracy during training")
    add("--labels", type=Path, help="CSV file for --samples with the columns name, imagenet_index")
    add("--checkpoint", type=Path, help="continued where it exists (default: OUT with the suffix .ckpt)")
    add("--stop-after", type=int, metavar="STEPS", help="stop early; the same command goes on from there")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    add("--eager", action="store_true", help="do not compile the networks on a GPU")
    return parser.parse_args(arguments)


def check(options: argparse.Namespace) -> None:
    if (options.samples is None) != (options.labels is None):
        raise UsageError("--samples and --labels belong together")
    for name in (*STAGES, "batch", "lr_scale", "stop_after"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            raise UsageError(f"--{name.replace('_', '-')} must be positive, not {value}")


def run(options: argparse.Namespace) -> None:
    check(options)
    files = find_images(options.images)
    teacher = load(options.teacher)
    if teacher.registers:
        raise UsageError(f"{options.teacher} has registers: the teacher must be a plain DeiT")
    side = teacher.dimensions.side
    samples = load_labelled(options.samples, options.labels, side, side) if options.samples else None
    images, unreadable = load_images(files, POOL_SIDE, POOL_SIDE)
    if not len(images):
        raise UsageError(f"none of the {len(files)} images under {options.images} can be read")
    print(f"{len(images)} images, {len(unreadable)} unreadable files left out", flush=True)

    lengths = (getattr(options, stage) for stage in STAGES)
    recipe = Recipe(*lengths, options.batch, options.lr_scale, options.seed)
    device = usable(options.device)
    torch.set_float32_matmul_precision("high")
    distiller = Distiller(images.to(device), teacher, recipe, device.type == "cuda" and not options.eager)
    checkpoint = options.checkpoint or options.out.with_suffix(".ckpt")
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    if checkpoint.exists():
        distiller.restore(checkpoint)
        print(f"continuing at step {distiller.done} of {recipe.total}", flush=True)

    train(distiller, checkpoint, options.stop_after, samples)
    if distiller.done < recipe.total:
        print(f"stopped at step {distiller.done} of {recipe.total}: the same command continues", flush=True)
        return
    save(distiller.finished(), options.out)
    print(f"wrote {options.out}", flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0, or 2 with one line on standard error."""
    try:
        run(parse(arguments))
    except UsageError as error:
        print(f"distill.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
