"""A study as one page, and its figures as files."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitreous._support.arrays import plain
from vitreous._support.files import write_whole
from vitreous._support.marks import FORMAT, KEY, identity_of
from vitreous.evaluation.report.files import parquet
from vitreous.evaluation.report.page import inline_svg, whole_page
from vitreous.evaluation.study.findings import joined_frames
from vitreous.plot.figure import save_figure

if TYPE_CHECKING:
    from vitreous.evaluation.study.findings import Chart, Findings
    from vitreous.evaluation.study.read import Study

FIGURES = "figures"
WRITTEN = ("findings.json", "report.html", "clusters.parquet", FIGURES)
INCH = 120  # pixels of an inch of a figure
FAILURES, LISTED = 50, 1000  # that are named on the page, and in findings.json


def write_report(study: Study, out: Path | None = None, found: dict[str, Findings] | None = None) -> list[Path]:
    """Write every figure as PNG and SVG, findings.json and, last, report.html."""
    folder = study.folder if out is None else out
    found = study.findings() if found is None else found
    written, drawn = [], dict[tuple[str, str], dict[str, Any]]()
    for model, one in found.items():
        for chart in one.charts:
            figure = chart.draw()
            name = file_name(chart, model if len(found) > 1 else "")
            for ending in (".png", ".svg"):
                written.append(folder / FIGURES / f"{name}{ending}")
                save_figure(figure, written[-1])
            wide = round(INCH * figure.get_figwidth())
            drawn[model, chart.name] = {"wide": wide, "drawn": inline_svg(figure, chart.title)}
    for name in dict.fromkeys(name for one in found.values() for name in one.frames):
        written.append(folder / f"{name}.parquet")
        write_whole(written[-1], parquet(joined_frames(found, name)))
    told = json.dumps(as_json(study, found), indent=2, ensure_ascii=False)
    write_whole(folder / "findings.json", told.encode())
    write_whole(folder / "report.html", page(study, found, drawn).encode())
    return [*written, folder / "findings.json", folder / "report.html"]


def file_name(chart: Chart, model: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in f"{model}-{chart.name}".lstrip("-"))


def as_json(study: Study, found: dict[str, Findings]) -> dict[str, Any]:
    """Everything the page says, as JSON; of many failures, the first and their number."""
    failed = study.failed()
    return {
        KEY: FORMAT,
        "identity": identity(study),
        "study": study.manifest,
        "finished": study.finished,
        "failed": dict(islice(failed.items(), LISTED)),
        "images_failed": len(failed),
        "models": {
            name: {"lead": one.lead, "told": list(one.told), "numbers": plain(one.numbers)}
            for name, one in found.items()
        },
    }


def identity(study: Study) -> str:
    """The same for every report of one study."""
    return identity_of({"report of": study.manifest["id"]})


def page(study: Study, found: dict[str, Findings], drawn: dict[tuple[str, str], dict[str, Any]]) -> str:
    """The whole page; it works offline."""
    failed = study.failed()
    about = [", ".join(study.models), str(study.manifest["source"]), f"{study.images} images"]
    if failed:
        about.append(f"{len(failed)} failed")
    unfinished = f"not finished: {study.progress} are done; this is what they tell"
    return whole_page(
        "study.html.j2",
        title=f"{study.kind.name}: {', '.join(study.models)}",
        kind=study.kind.name.capitalize(),
        summary=study.kind.summary,
        about=about,
        unfinished="" if study.finished else unfinished,
        models=[{"name": name, "found": one, "body": one.body and one.body()} for name, one in found.items()],
        drawn=drawn,
        failed=failed,
        most_failures=FAILURES,
        manifest=json.dumps(study.manifest, indent=2, ensure_ascii=False),
    )
