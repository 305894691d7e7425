"""A study as one page, and its figures as files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitreous._support.files import write_whole
from vitreous.attribution import plain
from vitreous.evaluation.report.page import inline_svg, shell, text
from vitreous.plot.figure import save_figure
from vitreous.version import VERSION

if TYPE_CHECKING:
    from vitreous.evaluation.study.findings import Chart, Findings, Table
    from vitreous.evaluation.study.read import Study

FIGURES = "figures"
INCH = 120  # pixels of an inch of a figure
FAILURES = 50  # that are named on the page


def write_report(study: Study, out: Path | None = None, found: dict[str, Findings] | None = None) -> list[Path]:
    """report.html, findings.json and every figure as PNG and SVG; the page last, for it is what people look at."""
    folder = study.folder if out is None else out
    found = study.findings() if found is None else found
    written, drawn = [], dict[tuple[str, str], str]()
    for model, one in found.items():
        for chart in one.charts:
            figure = chart.draw()
            name = file_name(chart, model if len(found) > 1 else "")
            for ending in (".png", ".svg"):
                written.append(folder / FIGURES / f"{name}{ending}")
                save_figure(figure, written[-1])
            wide = round(INCH * figure.get_figwidth())
            drawn[model, chart.name] = f'<div style="max-width:{wide}px">{inline_svg(figure, chart.title)}</div>'
    told = json.dumps(as_json(study, found), indent=2, ensure_ascii=False)
    write_whole(folder / "findings.json", told.encode())
    write_whole(folder / "report.html", page(study, found, drawn).encode())
    return [*written, folder / "findings.json", folder / "report.html"]


def file_name(chart: Chart, model: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in f"{model}-{chart.name}".lstrip("-"))


def as_json(study: Study, found: dict[str, Findings]) -> dict[str, Any]:
    """Everything that the page says, for programs."""
    return {
        "study": study.manifest,
        "finished": study.finished,
        "failed": study.failed(),
        "models": {
            name: {"lead": one.lead, "told": list(one.told), "numbers": plain(one.numbers)}
            for name, one in found.items()
        },
    }


def page(study: Study, found: dict[str, Findings], drawn: dict[tuple[str, str], str]) -> str:
    """The whole page; it asks nothing of the network."""
    failed = study.failed()
    parts = [head(study, failed)]
    for name, one in found.items():
        own = study.kind.body(study.of(name))
        parts.append(section(name, one, len(found) > 1, drawn) if own is None else own)
    parts += [troubles(failed), making(study), f"<footer>vitreous {text(VERSION)}</footer>"]
    return shell(f"{study.kind.name}: {', '.join(study.models)}", "\n".join(part for part in parts if part))


def head(study: Study, failed: dict[str, str]) -> str:
    told = [", ".join(study.models), str(study.manifest["source"]), f"{study.images} images"]
    if failed:
        told.append(f"{len(failed)} failed")
    warned = ""
    if not study.finished:
        said = f"not finished: {len(study.numbers)} of {len(study.mine)} shards are done; this is what they tell"
        warned = f"<p class=warn>{text(said)}</p>"
    return (
        f"<header><h1>{text(study.kind.name.capitalize())}</h1>\n<p class=quiet>{text(study.kind.summary)}</p>\n"
        f"<p class=quiet>{text(' · '.join(told))}</p>{warned}</header>"
    )


def section(name: str, found: Findings, several: bool, drawn: dict[tuple[str, str], str]) -> str:
    """One model: what is found, tables, charts."""
    title = f"<h2>{text(name)}</h2>\n" if several else ""
    said = "\n".join(f"<li>{text(one)}</li>" for one in found.told)
    listed = f"<ul>{said}</ul>" if said else ""
    tables = "\n".join(table(one) for one in found.tables)
    charts = "\n".join(figure(one, drawn[name, one.name]) for one in found.charts)
    return f"<section>{title}<p class=lead>{text(found.lead)}</p>\n{listed}\n{tables}\n{charts}</section>"


def table(one: Table) -> str:
    heads = "".join(f"<th scope=col{'' if i == 0 else ' class=number'}>{text(h)}" for i, h in enumerate(one.head))
    rows = "\n".join(
        "<tr>" + "".join(f"<td{'' if i == 0 else ' class=number'}>{text(cell)}" for i, cell in enumerate(row)) + "</tr>"
        for row in one.rows
    )
    about = f"<p class=quiet>{text(one.about)}</p>\n" if one.about else ""
    return (
        f"<h2>{text(one.title)}</h2>\n{about}<div class=scroll tabindex=0><table><thead><tr>{heads}</tr></thead>\n"
        f"<tbody>\n{rows}\n</tbody></table></div>"
    )


def figure(one: Chart, drawn: str) -> str:
    return (
        f"<h2>{text(one.title)}</h2>\n<figure class=chart><div class=scroll tabindex=0>"
        f"{drawn}</div><figcaption>{text(one.about)}</figcaption></figure>"
    )


def troubles(failed: dict[str, str]) -> str:
    """Pictures that could not be used, and why."""
    if not failed:
        return ""
    listed = [f"<li>{text(f'{image}: {reason}')}</li>" for image, reason in list(failed.items())[:FAILURES]]
    if len(failed) > FAILURES:
        listed.append(f"<li>… and {len(failed) - FAILURES} more, all in the table</li>")
    return f"<section><h2>What failed ({len(failed)})</h2>\n<ul>{''.join(listed)}</ul></section>"


def making(study: Study) -> str:
    """The manifest, whole."""
    told = json.dumps(study.manifest, indent=2, ensure_ascii=False)
    return (
        f"<section><h2>How it was made</h2>\n<pre>{text(told)}</pre>\n"
        "<p class=quiet>shards/: one Parquet file for each part; read them with vitreous.open_study. "
        "figures/: every chart as PNG and SVG. findings.json: the numbers.</p></section>"
    )
