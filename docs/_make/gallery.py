"""All methods on one page, and what can be seen inside."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from _make import declared, figures, inside
from vitreous import METHODS

LEAD = """---
hide: [navigation]
---

# Gallery

The gallery shows every method with the embedded model on two packaged images, for the most likely class: *{cat}*
({cat_p:.2f}) and *{cup}* ({cup_p:.2f}). In signed maps orange is evidence for the class and blue evidence against it;
unsigned maps are bright where they are high; controls are grey. Each map has its own scale. Three slow methods ran with
fewer samples than by default, as their pages say."""
PHOTOS = (figures.CAT, figures.CUP)


def page() -> str:
    (cat, cat_p), (cup, cup_p) = (figures.best(photo)[0] for photo in PHOTOS)
    said = [LEAD.format(cat=cat, cat_p=cat_p, cup=cup, cup_p=cup_p)]
    for family, members in groupby(METHODS.values(), key=lambda one: one.family):
        cards = [pair(one.name) for one in members]
        said += [
            f"## {declared.family_name(family)}",
            '<div class="gallery pairs" markdown>\n' + "\n".join(cards) + "\n</div>",
        ]
    return "\n\n".join([*said, *looks()])


def home() -> str:
    """The first page's row: a photo and what a few methods say of it."""
    photo = figures.photo_thumbnail(figures.CAT)
    first = f'<figure markdown="span">\n![A cat](gallery/{photo.name})\n<figcaption>the image</figcaption>\n</figure>'
    cards = [declared.card(figures.thumbnail(name, figures.CAT), name, "", "") for name in figures.SHOWN]
    return declared.gallery([first, *cards])


def pair(name: str) -> str:
    """A method on both photos."""
    pictures = "\n".join(f"![{name} on {Path(p).stem}](gallery/{figures.thumbnail(name, p).name})" for p in PHOTOS)
    link = f"[`{name}`](methods/{name}.md)"
    return f'<figure markdown="span">\n{pictures}\n<figcaption markdown="span">{link}</figcaption>\n</figure>'


def looks() -> list[str]:
    """Pictures of `vitreous inspect` and `vitreous maximize`."""
    said = ["## Inside", "What [`vitreous inspect`](inspect.md) shows for the same image of a cat."]
    for name, words in inside.VIEWS.items():
        file = f"inside/{inside.view(name).name}"
        said += [f"### {name}", f"{words[0].upper()}{words[1:]}.", f"[![{words}]({file})]({file})"]
    said += [
        "## What a class looks like",
        "Images that [`vitreous maximize`](maximize.md) optimises from noise until the model sees a class in them.",
        f"![Images made for {', '.join(inside.UNITS)}](inside/{inside.dream().name})",
    ]
    return said
