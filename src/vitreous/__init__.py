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
    from vitreous._support.memory import limit_memory as limit_memory
    from vitreous._support.progress import show_progress as show_progress
    from vitreous.api import explain as explain
    from vitreous.api import explain_targets as explain_targets
    from vitreous.attribution import Attribution as Attribution
    from vitreous.errors import VitreousError as VitreousError
    from vitreous.evaluation.advice import Advice as Advice
    from vitreous.evaluation.advice import advise as advise
    from vitreous.evaluation.leaderboard import Leaderboard as Leaderboard
    from vitreous.evaluation.leaderboard import run_leaderboard as run_leaderboard
    from vitreous.evaluation.study.read import Study as Study
    from vitreous.evaluation.study.read import open_study as open_study
    from vitreous.evaluation.study.run import run_study as run_study
    from vitreous.inspect.maximize.maximize import maximize as maximize
    from vitreous.inspect.maximize.result import Maximized as Maximized
    from vitreous.methods.attention.head_similarity import cass as cass
    from vitreous.metrics.case import Score as Score
    from vitreous.metrics.case import evaluate as evaluate
    from vitreous.models.layout import Layout as Layout
    from vitreous.models.load import load as load
    from vitreous.models.model import Model as Model
    from vitreous.registry import METHODS as METHODS
    from vitreous.registry import METRICS as METRICS
    from vitreous.registry import method as method
    from vitreous.registry import metric as metric
    from vitreous.trace.concept import Concept as Concept
    from vitreous.trace.concept import Text as Text
    from vitreous.trace.cuda_graphs import replay as replay
    from vitreous.trace.target import Class as Class
    from vitreous.trace.target import Contrast as Contrast
    from vitreous.trace.target import Neuron as Neuron
    from vitreous.trace.target import Top as Top
    from vitreous.trace.trace import Trace as Trace

HOMES = {  # imported when they are first used, so that `import vitreous` is quick
    "Advice": "evaluation.advice",
    "Attribution": "attribution",
    "Class": "trace.target",
    "Concept": "trace.concept",
    "Contrast": "trace.target",
    "Layout": "models.layout",
    "Leaderboard": "evaluation.leaderboard",
    "METHODS": "registry",
    "METRICS": "registry",
    "Maximized": "inspect.maximize.result",
    "Model": "models.model",
    "Neuron": "trace.target",
    "Score": "metrics.case",
    "Study": "evaluation.study.read",
    "Text": "trace.concept",
    "Top": "trace.target",
    "Trace": "trace.trace",
    "VitreousError": "errors",
    "advise": "evaluation.advice",
    "cass": "methods.attention.head_similarity",
    "evaluate": "metrics.case",
    "explain": "api",
    "explain_targets": "api",
    "limit_memory": "_support.memory",
    "replay": "trace.cuda_graphs",
    "load": "models.load",
    "maximize": "inspect.maximize.maximize",
    "method": "registry",
    "metric": "registry",
    "open_study": "evaluation.study.read",
    "run_leaderboard": "evaluation.leaderboard",
    "run_study": "evaluation.study.run",
    "show_progress": "_support.progress",
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
