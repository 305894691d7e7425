"""JUnit XML, as test runners of every kind read it: one test case for each limit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree as Tree

from vitreous._support.files import write_whole
from vitreous._support.words import number, share
from vitreous.evaluation.diff.limits import Check
from vitreous.evaluation.diff.pairs import Pair
from vitreous.evaluation.diff.told import part, plain

NAMED = 20  # images in the text of a failure


def write_junit(file: Path, title: str, done: Sequence[Check], pairs: Sequence[Pair], seconds: float) -> None:
    count = {verdict: sum(check.verdict == verdict for check in done) for verdict in ("failed", "not measured")}
    about = {"name": f"vitreous diff {title}", "tests": len(done), "failures": count["failed"], "errors": 0}
    about |= {"skipped": count["not measured"], "time": f"{seconds:.3f}"}
    suites = Tree.Element("testsuites")
    suite = Tree.SubElement(suites, "testsuite", {name: str(value) for name, value in about.items()})
    for check in done:
        case = Tree.SubElement(suite, "testcase", {"classname": "vitreous.diff", "name": check.name, "time": "0"})
        if check.verdict == "failed":
            Tree.SubElement(case, "failure", {"message": message(check)}).text = clean(worst(check, pairs))
        elif check.verdict == "not measured":
            Tree.SubElement(case, "skipped", {"message": "no image tells it"})
        else:
            Tree.SubElement(case, "system-out").text = message(check)
    Tree.indent(suites)
    write_whole(file, Tree.tostring(suites, encoding="utf-8", xml_declaration=True))


def message(check: Check) -> str:
    shown = plain(check.found) if check.least else part(check.found)
    limit = number(check.limit) if check.least else share(check.limit)
    return f"{check.what}: {shown}, limit {limit}, {check.found.count} images"


def worst(check: Check, pairs: Sequence[Pair]) -> str:
    """The images that speak against a check, the worst first."""
    lines = []
    for pair in against(check.name, pairs)[:NAMED]:
        answers = " → ".join(f"{name} {share(p)}" for name, p in zip(pair.answers, pair.shares))
        reason = f"distance {number(pair.distance)}, noise explains {number(pair.noisy)}"
        lines.append(f"{pair.image}: {answers}; {reason}, rank correlation {number(pair.correlation)}")
    return "\n".join(lines)


def against(name: str, pairs: Sequence[Pair]) -> list[Pair]:
    """The images that a check counts, the worst first."""
    if name == "max_flips":
        return sorted((pair for pair in pairs if not pair.same), key=lambda pair: -pair.distance)
    if name == "max_drop":
        lost = [pair for pair in pairs if pair.right is not None and pair.right[0] and not pair.right[1]]
        return sorted(lost, key=lambda pair: pair.aimed[1] - pair.aimed[0])
    if name == "max_moved":
        return sorted((pair for pair in pairs if pair.same and pair.moved), key=lambda pair: pair.noisy - pair.distance)
    return sorted(pairs, key=lambda pair: pair.correlation)


def clean(text: str) -> str:
    """Without the characters that XML cannot hold."""
    return "".join(c for c in text if c in "\n\t" or c >= " ")
