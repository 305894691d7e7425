"""`vitreous.view`: the page in a notebook."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from vitreous._support.arrays import plain
from vitreous._support.optional import needs
from vitreous.attribution import Attribution
from vitreous.declaration import ConfiguredMethod
from vitreous.errors import InputError, OptionError
from vitreous.images import pictures
from vitreous.models.model import Model
from vitreous.notebook.address import address, text
from vitreous.registry import METHODS
from vitreous.trace.apply import as_model, of_images

if TYPE_CHECKING:
    from vitreous.notebook.widget import View

HEIGHT = 640  # pixels of a model's view
TABS = ("explain", "compare", "attention", "concepts", "faithfulness", "inside", "features")


def view(
    model: Any,
    image: Any = None,
    *,
    methods: str | ConfiguredMethod | Sequence[str | ConfiguredMethod] | None = None,
    targets: Any = None,
    tab: str = "explain",
    height: int | None = None,
) -> View:
    """The page of `vitreous serve` as a widget of a notebook; the kernel answers it, and no port is opened.

    `model`: a `Model`, whatever `vitreous.load` takes, a list of them; or maps, an `Attribution` or a list of several
    of the same images, which need no model. `image`: one or several, paths, PIL images or uint8 arrays; None: the
    packaged photos. `methods`: names or configured methods. `targets`: as `explain` takes them, one or a list. `tab`:
    the view that is opened. `height`: in pixels. The widget's `address` is what it shows; set it to show that again.
    """
    maps = maps_in(model)
    if maps:
        if image is not None or methods is not None or targets is not None or tab != "explain":
            raise OptionError("maps are viewed as they are; image, methods, targets and tab are for a model")
        return view_maps(maps, height)
    if tab not in TABS:
        raise OptionError(f"tab={tab!r}: there are {', '.join(TABS)}")
    models = [as_model(one) for one in (model if isinstance(model, list | tuple) else [model])]
    return view_models(models, listed_images(image, models), chosen(methods, targets, tab), height or HEIGHT)


def view_models(models: list[Model], images: list[Any], first: list[tuple[str, str]], height: int) -> View:
    needed()
    from vitreous.notebook.live import Live, given
    from vitreous.notebook.widget import View
    from vitreous.web.app import inner_app

    engine = Live(models, given(images, models))
    names = ", ".join(path.name for path in list(engine.samples.values())[:3]) if images else "the packaged photos"
    place = [("model", next(iter(engine.models))), ("image", engine.first(next(iter(engine.models.values()))))]
    return View(
        inner_app(engine, alone=True),
        what=f"{', '.join(engine.models)} on {names}",
        address=address([*place, *first]),
        height=height,
        end=engine.close,
        maps=engine.maps_of,
    )


def view_maps(maps: list[Attribution], height: int | None) -> View:
    """Maps without their model."""
    needed()
    from vitreous.notebook.recorded import Recorded
    from vitreous.notebook.routes import application
    from vitreous.notebook.widget import View

    held = Recorded(maps)
    return View(
        application(held),
        what=", ".join(dict.fromkeys(repr(one).strip("<>") for one in maps)),
        address=address(held.address),
        height=height or min(900, 260 + 300 * len(held.rows)),
        end=held.jobs.clear,
        maps=lambda _: held.maps,
        still=held.still,
        recorded=True,
    )


def needed() -> None:
    needs("anywidget", "notebook")
    needs("fastapi", "web")


def maps_in(given: Any) -> list[Attribution]:
    """The attributions, if that is what is given."""
    if isinstance(given, Attribution):
        return [given]
    several = list(given) if isinstance(given, list | tuple) else []
    return several if several and all(isinstance(one, Attribution) for one in several) else []


def listed_images(image: Any, models: Sequence[Model]) -> list[Any]:
    if image is None:
        return []
    for model in models:
        of_images(model, "view(model, image) works")
    ready = isinstance(image, Tensor) and image.is_floating_point()
    found = [image] if ready else list(pictures.as_list(image, models[0].channels))
    if any(isinstance(one, Tensor) and one.is_floating_point() for one in found):
        raise InputError("a view shows images, not preprocessed tensors; give paths, PIL images or uint8 arrays")
    if not found:
        raise InputError("there are no images to view")
    return found


def chosen(methods: Any, targets: Any, tab: str) -> list[tuple[str, str]]:
    """Methods, targets and tab as parts of an address."""
    told = [("tab", tab)] if tab != "explain" else []
    for one in several(methods):
        if isinstance(one, ConfiguredMethod):
            told.append(("method", text(one.name, plain(one.options))))
        else:
            told.append(("method", METHODS[one].name))
    return [*told, *(("target", str(one)) for one in several(targets))]


def several(given: Any) -> list[Any]:
    if given is None:
        return []
    alone = isinstance(given, str | ConfiguredMethod) or not isinstance(given, Iterable)
    return [given] if alone else list(given)
