"""How much every method's map changes when the same network is written differently: the table in docs/.

    python benchmarks/reparametrisation.py [IMAGES …] [--weights FILE] [--images 4] [--only gae,cdam] [--single]

One row for each method, costly ones with cheap options, and one for each of their variants. The network runs in double
precision, so that what is left is no rounding; --single shows what rounding adds.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import torch

import vitreous
from vitreous.errors import VitreousError, one_line
from vitreous.metrics.sanity.copies import copy_of
from vitreous.metrics.sanity.reparametrisation import by_order, by_values, rewrite
from vitreous.metrics.sanity.rewriting import Rewriting
from vitreous.trace.target import Class

VARIED = ("baseline", "rules", "split", "table", "tokens", "variant", "weighting", "weights", "wrt")
KINDS = ("shift", "gain")
HEAD = "| method | options | shift, order | shift, values | gain, order | gain, values |\n|---|---|---|---|---|---|"


def rows(only: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every method as it is, with each other word of options that make another map of it, and as advise tries it."""
    for name, method in vitreous.METHODS.items():
        if only and name not in only:
            continue
        yield name, {}
        for option, field in method.options.model_fields.items():
            words = [word for word in get_args(field.annotation) if isinstance(word, str)]
            if option in VARIED:
                yield from ((name, {option: word}) for word in words if word != field.default)
        yield from ((name, dict(own)) for own in method.tried if len(own) > 1 or not {*own} & {*VARIED})


def written(value: float) -> str:
    return "0" if abs(value) < 5e-4 else f"{value:.3f}" if value < 10 else f"{value:.0f}"


def line(models: Sequence[vitreous.Model], images: torch.Tensor, classes: list[int], name: str, own: Any) -> str:
    """One row: the network as it is beside its rewritings, mean over the images."""
    method = vitreous.METHODS[name]
    told = f"| `{name}` | {', '.join(f'`{key}={value}`' for key, value in own.items())} |"
    try:
        target = classes if method.targeted else None
        maps = [vitreous.explain(one, images, name, target, **{**method.cheap, **own}).map for one in models]
    except VitreousError as error:
        return f"{told} {one_line(error, 90)} | | | |"
    found = [compare(maps[0], other) for other in maps[1:] for compare in (by_order, by_values)]
    return f"{told} {' | '.join(written(float(each.mean())) for each in found)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", nargs="*", help="default: the packaged photographs")
    parser.add_argument("--weights", help="a DeiT-Tiny checkpoint; default: the embedded model")
    parser.add_argument("--images", type=int, default=4, help="use only the first N images")
    parser.add_argument("--only", default="", help="methods, separated by commas")
    parser.add_argument("--single", action="store_true", help="in single precision")
    given = parser.parse_args()
    model = vitreous.load("deit_tiny_patch16_224" if given.weights else None, weights=given.weights)
    if not given.single:
        model.module.double()
    packaged = sorted((Path(vitreous.__file__).parent / "assets" / "photos").glob("*.jpg"))
    images = model.prepare((given.photos or packaged)[: given.images])
    with torch.no_grad():
        classes = model.run(images).argmax(1).tolist()
    models = [model]
    for kind in KINDS:
        models.append(copy_of(model))
        done = rewrite(models[-1], images, Class(tuple(classes)), Rewriting(kind, 1.0, 0))
        off = (models[-1].run(images) - model.run(images)).abs().max() / model.run(images).abs().max()
        print(f"{kind}: {len(done)} norms rewritten, the outputs differ by {float(off):.0e} of the largest")
    print(f"{model.name}, {len(images)} images, {model.dtype}\n\n{HEAD}", flush=True)
    for name, own in rows(list(filter(None, given.only.split(",")))):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            print(line(models, images, classes, name, own), flush=True)


if __name__ == "__main__":
    main()
