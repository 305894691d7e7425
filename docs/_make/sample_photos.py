"""Make the collage and the examples of a concept that are in the package, from the packaged photographs.

    python docs/_make/sample_photos.py [FOLDER]

writes photos/cat_and_coffee.jpg and concepts/coffee/*.jpg into FOLDER, by default the assets of the package.
"""

from __future__ import annotations

import sys
from pathlib import Path

from PIL import Image, ImageEnhance, ImageOps

ASSETS = Path(__file__).parents[2] / "src" / "vitreous" / "assets"
SIDE = 448  # of the collage; the examples are half as wide
QUALITY = 88

Box = tuple[int, int, int, int]  # left, upper, right and lower edge in pixels of the photograph
WHOLE: Box = (75, 0, 374, 299)  # the cup with its saucer
CUP: Box = (110, 0, 334, 224)
CLOSE: Box = (125, 8, 317, 200)


def cat_and_coffee(cat: Image.Image, coffee: Image.Image) -> Image.Image:
    """Coffee above, cat below; each half is seven rows of the patches that a ViT-Tiny/16 sees."""
    both = Image.new("RGB", (SIDE, SIDE))
    both.paste(coffee.crop((0, 0, SIDE, SIDE // 2)), (0, 0))
    both.paste(cat.crop((0, 30, SIDE, 30 + SIDE // 2)), (0, SIDE // 2))
    return both


def cups(coffee: Image.Image) -> dict[str, Image.Image]:
    """The same cup in five ways, so that little but the cup is common to them all."""
    return {
        "whole": cut(coffee, WHOLE),
        "mirrored": ImageOps.mirror(cut(coffee, CUP)),
        "close": cut(coffee, CLOSE),
        "dark": ImageEnhance.Brightness(cut(coffee, CUP)).enhance(0.6),
        "grey": ImageOps.mirror(cut(coffee, WHOLE)).convert("L").convert("RGB"),
    }


def cut(photo: Image.Image, box: Box) -> Image.Image:
    return photo.resize((SIDE // 2, SIDE // 2), Image.Resampling.LANCZOS, box=box)


def make(folder: Path) -> list[Path]:
    """Write all pictures; returns their paths."""
    cat, coffee = (Image.open(ASSETS / "photos" / f"{name}.jpg") for name in ("cat", "coffee"))
    made = {"photos/cat_and_coffee": cat_and_coffee(cat, coffee)}
    made |= {f"concepts/coffee/{name}": picture for name, picture in cups(coffee).items()}
    files = [folder / f"{name}.jpg" for name in made]
    for file, picture in zip(files, made.values()):
        file.parent.mkdir(parents=True, exist_ok=True)
        picture.save(file, quality=QUALITY, optimize=True)
    return files


if __name__ == "__main__":
    make(Path(sys.argv[1]) if len(sys.argv) > 1 else ASSETS)
