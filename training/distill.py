"""Distil DeiT-Tiny into a ViT-Tiny/16 that starts from random weights, on a folder of unlabelled photographs.

The student learns, on heavily augmented and mixed crops,

    loss = KL(teacher's classes || student's classes)
         + weight * mean over blocks of  w_l * |h_l - t_l|^2 / var(t_l)

with h_l and t_l their residual streams after block l, so that it agrees with the teacher not only in what it
says but also in how it gets there.  In the last part of the run, every third step hides a third of the
patches from the student (never from the teacher), so that removing tokens, as explanation methods do, stays
in distribution.

    python training/distill.py IMAGES --teacher teacher.safetensors --out student.safetensors --minutes 7

Stop it at any time: the same command continues from the checkpoint beside the output file.
Axes: B images, L blocks, N tokens, D width, P patches.
"""

from __future__ import annotations

import argparse
import copy
import csv
import math
import os
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

ARCHITECTURE = "deit_tiny_patch16_224"  # of both student and teacher: 12 blocks, 3 heads, width 192
SIZE, PATCHES = 224, 196
POOL_SIDE = 192  # training photographs are held in memory as squares of this side
EVAL_BATCH = 64
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp"}

FEWER_PATCHES = 132  # two thirds of them
DROPPING_STARTS = 0.55  # fractions of the whole run
HIDDEN_FADES = 0.70
AVERAGE_EVERY = 4  # steps between two updates of the averaged weights
SAVE_EVERY = 60.0  # seconds


class UsageError(Exception):
    """Something the user can put right; shown in one line, exit code 2."""


@dataclass(frozen=True)
class Recipe:
    """Everything that must stay the same when a run is continued."""

    epochs: float | None
    minutes: float | None
    batch: int
    lr: float
    weight_decay: float
    hidden: float
    seed: int


# --------------------------------------------------------------------------------------------------- pictures


def find_images(folder: Path) -> list[Path]:
    """All pictures below a folder, in a fixed order."""
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder")
    files = sorted(p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
    if not files:
        raise UsageError(f"no images under {folder} (looked for {', '.join(sorted(SUFFIXES))})")
    return files


def decode(path: Path, side: int) -> np.ndarray | None:
    """The centre square of a picture as uint8 [3 side side], or None where the file cannot be read."""
    try:
        with Image.open(path) as file:
            image = file.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):  # what Pillow raises
        return None
    scale = side / min(image.size)
    width, height = (max(side, round(length * scale)) for length in image.size)
    image = image.resize((width, height), Image.Resampling.BICUBIC)
    left, top = (width - side) // 2, (height - side) // 2
    square = image.crop((left, top, left + side, top + side))
    return np.asarray(square, np.uint8).transpose(2, 0, 1)


def load_images(paths: Iterable[Path], side: int) -> tuple[Tensor, list[bool]]:
    """Pictures as one uint8 tensor [B 3 side side], and which of the files could be read."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # Pillow decodes and resizes without the interpreter lock
        squares = list(pool.map(lambda path: decode(path, side), paths))
    readable = [square is not None for square in squares]
    if not any(readable):
        raise UsageError("none of the images can be read")
    return torch.from_numpy(np.stack([square for square in squares if square is not None])), readable


class Labelled(NamedTuple):
    images: Tensor  # uint8 [B 3 224 224]
    classes: Tensor  # int64 [B]


def load_labelled(folder: Path, labels: Path) -> Labelled:
    """Pictures named in a CSV file with the columns `name` (with or without suffix) and `imagenet_index`."""
    files = {key: path for path in find_images(folder) for key in (path.name, path.stem)}
    try:
        with labels.open(newline="", encoding="utf-8") as lines:
            rows = [(row["name"], int(row["imagenet_index"])) for row in csv.DictReader(lines)]
    except OSError as error:
        raise UsageError(f"cannot read {labels}: {error.strerror}") from error
    except (KeyError, ValueError) as error:
        raise UsageError(f"{labels} needs the columns name and imagenet_index (a number)") from error
    if not rows:
        raise UsageError(f"{labels} names no pictures")
    missing = [name for name, _ in rows if name not in files]
    if missing:
        raise UsageError(f"{labels} names {missing[0]}, which is not under {folder}")
    images, readable = load_images([files[name] for name, _ in rows], SIZE)
    classes = [index for (_, index), ok in zip(rows, readable, strict=True) if ok]
    return Labelled(images, torch.tensor(classes))


def normalise(images: Tensor) -> Tensor:
    """From 0…1 to the range the model was trained on."""
    mean = torch.tensor(MEAN, device=images.device, dtype=images.dtype).view(1, 3, 1, 1)
    std = torch.tensor(STD, device=images.device, dtype=images.dtype).view(1, 3, 1, 1)
    return (images - mean) / std


def random_crops(images: Tensor, draw: Callable[..., Tensor]) -> Tensor:
    """Crops of 20 to 100 % of the area, half of them mirrored: [B 3 s s] -> [B 3 224 224]."""
    count = len(images)
    area = 0.2 + 0.8 * draw(count)
    aspect = torch.exp((2 * draw(count) - 1) * math.log(4 / 3))
    width, height = (area * aspect).sqrt().clamp(max=1), (area / aspect).sqrt().clamp(max=1)
    mirror = torch.where(draw(count) < 0.5, -1.0, 1.0)
    window = torch.zeros(count, 2, 3, device=images.device)  # affine map from crop to picture
    window[:, 0, 0], window[:, 0, 2] = width * mirror, (2 * draw(count) - 1) * (1 - width)
    window[:, 1, 1], window[:, 1, 2] = height, (2 * draw(count) - 1) * (1 - height)
    grid = F.affine_grid(window, [count, 3, SIZE, SIZE], align_corners=False).to(images.dtype)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="reflection", align_corners=False)


def random_colours(images: Tensor, draw: Callable[..., Tensor]) -> Tensor:
    """Random contrast, brightness (± 25 %) and saturation (± 30 %)."""

    def factor(strength: float) -> Tensor:
        return (1 + (2 * draw(len(images), 1, 1, 1) - 1) * strength).to(images.dtype)

    mean = images.mean((1, 2, 3), keepdim=True)
    images = ((images - mean) * factor(0.25) + mean) * factor(0.25)
    grey = images.mean(1, keepdim=True)
    return ((images - grey) * factor(0.3) + grey).clamp(0, 1)


def mixup(images: Tensor, draw: Callable[..., Tensor]) -> Tensor:
    """Blend half of the pictures with another one of the batch; the teacher sees, and labels, the blend."""
    share = torch.where(draw(len(images), 1, 1, 1) < 0.5, 1.0, draw(len(images), 1, 1, 1)).to(images.dtype)
    return images * share + images.flip(0) * (1 - share)


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """uint8 squares [B 3 s s] to training inputs [B 3 224 224]; half precision on a GPU."""

    def draw(*shape: int) -> Tensor:
        return torch.rand(*shape, device=images.device, generator=generator)

    pixels = images.to(torch.float16 if images.is_cuda else torch.float32) / 255
    return mixup(normalise(random_colours(random_crops(pixels, draw), draw)), draw)


# ------------------------------------------------------------------------------------------------------ model


def load_teacher(path: Path) -> nn.Module:
    """DeiT-Tiny from a safetensors file with timm's names."""
    try:
        weights = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UsageError(f"cannot read the teacher {path}: {error}") from error
    teacher = timm.create_model(ARCHITECTURE)
    expected = {name: tuple(value.shape) for name, value in teacher.state_dict().items()}
    found = {name: tuple(value.shape) for name, value in weights.items()}
    wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if wrong:
        name = wrong[0]
        raise UsageError(
            f"{path} is not a {ARCHITECTURE}: {len(wrong)} tensors differ, first {name}, "
            f"whose shape is {found.get(name, 'missing')} instead of {expected.get(name, 'none')}"
        )
    teacher.load_state_dict({name: value.float() for name, value in weights.items()})
    return teacher.eval().requires_grad_(False)


def forward(net: Any, images: Tensor, keep: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Logits [B 1000] and the residual stream after every block [L B N D], given the patches `keep` [B P]."""
    patches = net.patch_embed(images)  # [B 196 D]
    tokens = torch.cat([net.cls_token.expand(len(patches), -1, -1), patches], 1) + net.pos_embed  # [B 197 D]
    if keep is not None:
        index = keep[:, :, None].expand(-1, -1, tokens.shape[-1]) + 1  # after the class token
        tokens = torch.cat([tokens[:, :1], tokens.gather(1, index)], 1)  # [B 1+P D]
    stream = []
    for block in net.blocks:
        tokens = block(tokens)
        stream.append(tokens)
    return net.head(net.norm(tokens)[:, 0]), torch.stack(stream)


def random_patches(count: int, patches: int, generator: torch.Generator) -> Tensor | None:
    """Indices of the patches to keep [B P], or None for all of them."""
    if patches == PATCHES:
        return None
    order = torch.rand(count, PATCHES, device=generator.device, generator=generator).argsort(1)
    return order[:, :patches].contiguous()


# --------------------------------------------------------------------------------------------------- schedule


def learning_rate(step: int, total: int, peak: float) -> float:
    """Linear warm-up over the first 4 % of the steps, then a cosine down to zero."""
    warm = max(1, total // 25)
    if step < warm:
        return peak * (step + 1) / warm
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warm) / (total - warm))) + 1e-6


def kept_patches(step: int, total: int) -> int:
    """How many patches the student sees at this step."""
    return FEWER_PATCHES if step >= DROPPING_STARTS * total and step % 3 == 2 else PATCHES


def hidden_weight(step: int, total: int, weight: float) -> float:
    """Weight of the residual-stream term: late in the run the classes matter more."""
    return weight if step < HIDDEN_FADES * total else 0.3 * weight


def stream_distance(student: Tensor, teacher: Tensor) -> Tensor:
    """Relative squared error of the residual stream [L B N D], mean over blocks; late blocks weigh more."""
    if student.shape != teacher.shape:  # patches were dropped: compare the class token only
        student, teacher = student[:, :, :1], teacher[:, :, :1]
    student, teacher = student.float(), teacher.float()
    error = (student - teacher).square().mean((1, 2, 3)) / teacher.var((1, 2, 3))  # [L]
    return (error * torch.linspace(0.5, 1.5, len(error), device=error.device)).mean()


# --------------------------------------------------------------------------------------------------- training


class Losses(NamedTuple):
    classes: Tensor
    hidden: Tensor


class Distiller:
    """Student, averaged student, teacher and optimiser; one call of `step` is one update."""

    def __init__(self, images: Tensor, teacher: nn.Module, recipe: Recipe, compiled: bool = False) -> None:
        self.device = images.device
        self.images, self.recipe, self.teacher = images, recipe, teacher.to(self.device)
        torch.manual_seed(recipe.seed)
        self.student = timm.create_model(ARCHITECTURE).to(self.device).train()
        self.average = copy.deepcopy(self.student).eval().requires_grad_(False)
        self.optimiser = self._optimiser()
        self.forward = torch.compile(forward, dynamic=False) if compiled else forward
        self.generator = torch.Generator(self.device)
        self.done = 0
        self.total = 0

    def _optimiser(self) -> torch.optim.AdamW:
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in self.student.named_parameters():
            decays = parameter.ndim > 1 and name not in ("pos_embed", "cls_token")
            (matrices if decays else others).append(parameter)
        groups = [
            {"params": matrices, "weight_decay": self.recipe.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        fused = self.device.type == "cuda"
        return torch.optim.AdamW(groups, lr=self.recipe.lr, betas=(0.9, 0.98), fused=fused)

    def step(self, lr: float, patches: int, weight: float, number: int) -> Losses:
        """One update. Its random choices follow from the seed and its number, also in a continued run."""
        self.generator.manual_seed(self.recipe.seed * 1_000_003 + number)
        batch, cuda = self.recipe.batch, self.device.type == "cuda"
        chosen = torch.randint(len(self.images), (batch,), device=self.device, generator=self.generator)
        inputs = augment(self.images[chosen], self.generator)
        keep = random_patches(batch, patches, self.generator)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=cuda):
            with torch.no_grad():
                wanted, wanted_stream = self.forward(self.teacher, inputs)
            logits, stream = self.forward(self.student, inputs, keep)
        log_p, log_q = logits.float().log_softmax(-1), wanted.float().log_softmax(-1)
        classes = F.kl_div(log_p, log_q, log_target=True, reduction="batchmean")
        hidden = stream_distance(stream, wanted_stream)
        self._update(classes + weight * hidden, lr)
        return Losses(classes.detach(), hidden.detach())

    def _update(self, loss: Tensor, lr: float) -> None:
        for group in self.optimiser.param_groups:
            group["lr"] = lr
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.student.parameters(), 1.0)
        self.optimiser.step()

    def advance(self) -> Losses:
        """The next step of the schedule, with the averaged weights following."""
        step, total = self.done, self.total
        losses = self.step(
            learning_rate(step, total, self.recipe.lr),
            kept_patches(step, total),
            hidden_weight(step, total, self.recipe.hidden),
            step,
        )
        if step % AVERAGE_EVERY == 0:
            self._follow(step / AVERAGE_EVERY)
        self.done += 1
        return losses

    @torch.no_grad()
    def _follow(self, updates: float) -> None:
        decay = min(0.998, (1 + updates) / (10 + updates))
        for mean, value in zip(self.average.parameters(), self.student.parameters(), strict=True):
            mean.lerp_(value, 1 - decay)

    def seconds_per_step(self, patches: int) -> float:
        """Measured on steps with learning rate 0, which leave the weights as they are."""
        cuda = self.device.type == "cuda"
        warm, timed = (4, 10) if cuda else (1, 1)
        started = 0.0
        for number in range(warm + timed):
            if number == warm:
                started = self._clock()
            self.step(0.0, patches, self.recipe.hidden, number)
        elapsed = self._clock() - started
        self.optimiser.state.clear()
        return elapsed / timed

    def _clock(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def plan(self) -> None:
        """Fix the number of steps: from the epochs, or from the minutes and the speed of this machine."""
        if self.recipe.minutes is None:
            self.total = math.ceil((self.recipe.epochs or 0) * len(self.images) / self.recipe.batch)
        else:
            fewer = (1 - DROPPING_STARTS) / 3
            mean = (1 - fewer) * self.seconds_per_step(PATCHES) + fewer * self.seconds_per_step(FEWER_PATCHES)
            self.total = int(self.recipe.minutes * 60 / mean)
        self.total = max(2, self.total)

    def save(self, path: Path) -> None:
        """Write the checkpoint whole or not at all."""
        state = {
            "settings": self.settings,
            "done": self.done,
            "total": self.total,
            "student": self.student.state_dict(),
            "average": self.average.state_dict(),
            "optimiser": self.optimiser.state_dict(),
        }
        partial = path.with_name(path.name + ".part")
        torch.save(state, partial)
        partial.replace(path)

    def restore(self, path: Path) -> None:
        """Continue from a checkpoint made with the same settings and pictures."""
        state = torch.load(path, map_location=self.device, weights_only=True)
        before = state["settings"]
        for name, value in self.settings.items():
            if before[name] != value:
                change = f"{name} = {before[name]}, now it is {value}"
                raise UsageError(f"{path} was made with {change}: delete it to start afresh")
        self.done, self.total = state["done"], state["total"]
        self.student.load_state_dict(state["student"])
        self.average.load_state_dict(state["average"])
        self.optimiser.load_state_dict(state["optimiser"])

    @property
    def settings(self) -> dict[str, Any]:
        return {**asdict(self.recipe), "images": len(self.images)}


class Scores(NamedTuple):
    top1: float
    top5: float
    agreement: float  # with the teacher's first choice
    teacher_top1: float

    def __str__(self) -> str:
        return (
            f"top-1 {self.top1:.1%}  top-5 {self.top5:.1%}  same as teacher {self.agreement:.1%}  "
            f"(teacher top-1 {self.teacher_top1:.1%})"
        )


@torch.inference_mode()
def evaluate(distiller: Distiller, pictures: Labelled, patches: int = PATCHES) -> Scores:
    """Accuracy of the averaged student, with only some random patches of each picture if asked."""
    device, counts = distiller.device, torch.zeros(4, dtype=torch.float64)
    generator = torch.Generator(device).manual_seed(0)
    for start in range(0, len(pictures.classes), EVAL_BATCH):
        inputs = normalise(pictures.images[start : start + EVAL_BATCH].to(device).float() / 255)
        classes = pictures.classes[start : start + EVAL_BATCH].to(device)
        keep = random_patches(len(inputs), patches, generator)
        best = forward(distiller.average, inputs, keep)[0].topk(5, 1).indices  # [B 5]
        wanted = forward(distiller.teacher, inputs)[0].argmax(1)  # [B]
        hits = best == classes[:, None]
        answers = (hits[:, 0], hits.any(1), best[:, 0] == wanted, wanted == classes)
        counts += torch.stack([answer.sum() for answer in answers]).cpu()
    return Scores(*(counts / len(pictures.classes)).tolist())


def save_student(net: nn.Module, path: Path) -> None:
    """Weights in float16 under timm's names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: value.half().cpu().contiguous() for name, value in net.state_dict().items()}, path)


def report(distiller: Distiller, losses: Losses, started: float, pictures: Labelled | None) -> None:
    """One progress line; a loss that is not a number ends the run."""
    classes, hidden = losses.classes.item(), losses.hidden.item()
    if not math.isfinite(classes + hidden):
        raise UsageError(f"the loss is not finite at step {distiller.done}: try a lower --lr")
    lr = distiller.optimiser.param_groups[0]["lr"]
    line = f"step {distiller.done}/{distiller.total}  kl {classes:.3f}  hidden {hidden:.3f}  lr {lr:.2e}"
    score = f"  {evaluate(distiller, pictures)}" if pictures else ""
    print(f"{line}  {time.perf_counter() - started:.0f} s{score}", flush=True)


def train(distiller: Distiller, checkpoint: Path, stop_after: int | None, pictures: Labelled | None) -> None:
    """Run the schedule to its end, or `stop_after` steps of it."""
    end = distiller.total if stop_after is None else min(distiller.total, distiller.done + stop_after)
    started = saved = time.perf_counter()
    while distiller.done < end:
        losses = distiller.advance()
        if distiller.done == end or time.perf_counter() - saved > SAVE_EVERY:
            report(distiller, losses, started, pictures)
            distiller.save(checkpoint)
            saved = time.perf_counter()


# ----------------------------------------------------------------------------------------------- command line


def parse(arguments: list[str] | None) -> argparse.Namespace:
    summary = "Distil DeiT-Tiny into a ViT-Tiny/16 on a folder of unlabelled photographs."
    parser = argparse.ArgumentParser(prog="distill.py", description=summary)
    add = parser.add_argument
    add("images", type=Path, help="folder of photographs, searched recursively; no labels needed")
    add("--teacher", type=Path, required=True, help=f"safetensors file of timm's {ARCHITECTURE}")
    add("--out", type=Path, required=True, help="safetensors file to write (float16)")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--epochs", type=float, help="passes over the photographs (default: 76)")
    length.add_argument("--minutes", type=float, help="as many steps as fit into this time on this machine")
    add("--eval", type=Path, help="folder of pictures for measuring accuracy during training")
    add("--labels", type=Path, help="CSV file for --eval with the columns name, imagenet_index")
    add("--batch", type=int, default=1024, help="pictures per step (default: %(default)s)")
    add("--lr", type=float, default=1.2e-3, help="peak learning rate (default: %(default)s)")
    add("--weight-decay", type=float, default=0.02, help="of matrices (default: %(default)s)")
    add("--hidden", type=float, default=2.0, help="weight of the residual-stream term (default: %(default)s)")
    add("--seed", type=int, default=0, help="of weights, crops and patches (default: %(default)s)")
    add("--checkpoint", type=Path, help="continued where it exists (default: OUT with the suffix .ckpt)")
    add("--stop-after", type=int, metavar="STEPS", help="stop early; the same command goes on from there")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    add("--eager", action="store_true", help="do not compile the model on a GPU")
    return parser.parse_args(arguments)


def check(options: argparse.Namespace) -> None:
    if (options.eval is None) != (options.labels is None):
        raise UsageError("--eval and --labels belong together")
    for name in ("batch", "epochs", "minutes", "stop_after"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            raise UsageError(f"--{name.replace('_', '-')} must be positive, not {value}")


def run(options: argparse.Namespace) -> None:
    check(options)
    files = find_images(options.images)
    teacher = load_teacher(options.teacher)
    pictures = load_labelled(options.eval, options.labels) if options.eval else None
    images, _ = load_images(files, POOL_SIDE)
    print(f"{len(images)} images, {len(files) - len(images)} unreadable files left out", flush=True)

    epochs = 76.0 if options.epochs is None and options.minutes is None else options.epochs
    recipe = Recipe(
        epochs, options.minutes, options.batch, options.lr, options.weight_decay, options.hidden, options.seed
    )
    device = torch.device(options.device)
    torch.set_float32_matmul_precision("high")
    compiled = device.type == "cuda" and not options.eager
    distiller = Distiller(images.to(device), teacher, recipe, compiled)
    checkpoint = options.checkpoint or options.out.with_suffix(".ckpt")
    if checkpoint.exists():
        distiller.restore(checkpoint)
        print(f"continuing at step {distiller.done} of {distiller.total}", flush=True)
    else:
        checkpoint.parent.mkdir(parents=True, exist_ok=True)
        distiller.plan()
        epochs = distiller.total * recipe.batch / len(images)
        print(f"{distiller.total} steps, {epochs:.1f} epochs", flush=True)

    train(distiller, checkpoint, options.stop_after, pictures)
    save_student(distiller.average, options.out)
    print(f"wrote {options.out} at step {distiller.done} of {distiller.total}", flush=True)
    if pictures:
        for patches in (PATCHES, FEWER_PATCHES, PATCHES // 2, PATCHES // 4):
            print(f"{patches:3d} of {PATCHES} patches: {evaluate(distiller, pictures, patches)}", flush=True)


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
