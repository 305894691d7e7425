from __future__ import annotations

from vitreous.errors import TargetError
from vitreous.metrics.case import Case, Measured
from vitreous.metrics.correlation import correlation
from vitreous.models.output import Meaning
from vitreous.registry import metric
from vitreous.trace.apply import read_target
from vitreous.trace.target import Top, no_classifier


@metric(better="higher", cite="rebuffi2020there", again=True)
def class_contrast(case: Case) -> Measured:
    """How different the maps of an image's two best classes are; use it to find methods that ignore the class, which
    score 0.

    1 − |corr(s₁, s₂)|, s₁ and s₂ = the maps of the best and the second-best class, whatever the target
    """
    trace = case.trace
    if not trace.classifies:
        raise no_classifier(trace.model.name)
    if trace.output.shape[1] < 2:
        raise TargetError(f"class_contrast compares two classes; {trace.model.name} has one")
    if trace.model.meaning is Meaning.VALUE:
        raise TargetError(f"class_contrast compares two classes; {trace.model.name} returns values, not classes")
    best, second = (read_target(trace, Top(rank)).fix(trace.output) for rank in (1, 2))
    one = case.map if case.target == best else case.again(trace, best)
    return Measured(1 - correlation(one, case.again(trace, second)).abs())
