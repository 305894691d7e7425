"""See what a Vision Transformer looks at, and why.

import vitreous
model = vitreous.load()                                  # or any timm, Hugging Face, torchvision, open_clip model
vitreous.explain(model, "photo.jpg", "rollout").save("rollout.png")
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vitreous.version import VERSION as __version__

if TYPE_CHECKING:
    from vitreous import inspect as inspect
    from vitreous.activation.maximize import maximize as maximize
    from vitreous.activation.result import Maximized as Maximized
    from vitreous.advice import Advice as Advice
    from vitreous.advice import advise as advise
    from vitreous.api import explain as explain
    from vitreous.api import explain_targets as explain_targets
    from vitreous.attribution import Attribution as Attribution
    from vitreous.concept import Concept as Concept
    from vitreous.errors import VitreousError as VitreousError
    from vitreous.evaluation import Score as Score
    from vitreous.evaluation import evaluate as evaluate
    from vitreous.graphs import replay as replay
    from vitreous.head_similarity import cass as cass
    from vitreous.layout import Layout as Layout
    from vitreous.leaderboard import Leaderboard as Leaderboard
    from vitreous.leaderboard import run_leaderboard as run_leaderboard
    from vitreous.memory import limit_memory as limit_memory
    from vitreous.model import Model as Model
    from vitreous.progress import show_progress as show_progress
    from vitreous.registry import METHODS as METHODS
    from vitreous.registry import METRICS as METRICS
    from vitreous.registry import method as method
    from vitreous.registry import metric as metric
    from vitreous.sources import load as load
    from vitreous.study.opened import Study as Study
    from vitreous.study.opened import open_study as open_study
    from vitreous.study.run import run_study as run_study
    from vitreous.target import Class as Class
    from vitreous.target import Contrast as Contrast
    from vitreous.target import Neuron as Neuron
    from vitreous.target import Text as Text
    from vitreous.target import Top as Top
    from vitreous.trace import Trace as Trace

HOMES = {  # imported when they are first used, so that `import vitreous` is quick
    "Advice": "advice",
    "Attribution": "attribution",
    "Class": "target",
    "Concept": "concept",
    "Contrast": "target",
    "Layout": "layout",
    "Leaderboard": "leaderboard",
    "METHODS": "registry",
    "METRICS": "registry",
    "Maximized": "activation.result",
    "Model": "model",
    "Neuron": "target",
    "Score": "evaluation",
    "Study": "study.opened",
    "Text": "target",
    "Top": "target",
    "Trace": "trace",
    "VitreousError": "errors",
    "advise": "advice",
    "cass": "head_similarity",
    "evaluate": "evaluation",
    "explain": "api",
    "explain_targets": "api",
    "limit_memory": "memory",
    "replay": "graphs",
    "load": "sources",
    "maximize": "activation.maximize",
    "method": "registry",
    "metric": "registry",
    "open_study": "study.opened",
    "run_leaderboard": "leaderboard",
    "run_study": "study.run",
    "show_progress": "progress",
}
PARTS = ("inspect",)  # packages that are used by their name: vitreous.inspect.heads(…)
__all__ = ["__version__", *HOMES, *PARTS]


def __getattr__(name: str) -> Any:
    if name in PARTS:
        return import_module(f"vitreous.{name}")
    if name not in HOMES:
        raise AttributeError(f"module 'vitreous' has no attribute {name!r}")
    value = getattr(import_module(f"vitreous.{HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
