"""Which kinds of targets a model takes, and why not the others: the page, the API and the documentation read this."""

from __future__ import annotations

from vitreous.models.output import Form
from vitreous.trace.trace import Trace
from vitreous.web import abilities
from vitreous.web import engine as engines
from vitreous.web.latents import why_not
from vitreous.web.place import Kind

NONE_NAMED = "no latents were named at start: vitreous serve --latents FILE"
FORMS = {
    Form.VECTOR: "it has one output for the whole image",
    Form.DENSE: "it has an output for each place of the image",
    Form.DETECTIONS: "it is a detector",
    Form.WORDS: "it answers questions in words",
}


def kinds_of(engine: engines.Engine, served: engines.Served, trace: Trace) -> dict[Kind, str | None]:
    """For each kind of target None, or the reason why the model does not take it."""
    model, form = served.model, served.model.form
    whole = None if form is Form.VECTOR else FORMS[form]
    classes = FORMS[form] if form is Form.WORDS else None if trace.classifies else "this model has no classifier"
    texts = whole or (None if abilities.takes_text(model) else "this model has no text tower, as CLIP has")
    return {
        "classes": classes,
        "regions": None if form is Form.DENSE else no_regions(model.form),
        "boxes": None if form is Form.DETECTIONS else "this model is no detector",
        "words": None if form is Form.WORDS else "this model answers no questions",
        "texts": texts,
        "concepts": whole,
        "latents": no_latents(engine, served),
        "neurons": whole,
        "contrasts": None,
    }


def no_regions(form: Form) -> str:
    return f"{FORMS[form]}, not one for each place" if form is Form.VECTOR else FORMS[form]


def no_latents(engine: engines.Engine, served: engines.Served) -> str | None:
    """Why no latents are offered; None if some are."""
    if not engine.latents:
        return why_not(None, served.model) or NONE_NAMED
    found = [why_not(one, served.model) for one in engine.latents]
    return None if None in found else found[0]
