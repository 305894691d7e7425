"""MkDocs hook: adds the pages and pictures that are made from the code, and the documents that lie elsewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from _make import cache, coverage, declared, drawing, figures, gallery, links, notebook, reference
from _make.places import DOCS
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from vitreous import METHODS, METRICS

WIDE = ("results.md",)  # pages with wide tables


def on_config(config: MkDocsConfig) -> None:
    """Write the generated pages into the navigation."""
    costs = [{"Costs": "benchmarks.md"}, *({file.stem: f"costs/{file.stem}.md"} for file in links.COSTS)]
    lists = {
        "methods/*": declared.nav_of("Methods", METHODS),
        "metrics/*": declared.nav_of("Metrics", METRICS),
        "costs/*": costs,
    }
    there = {*links.included()}
    config.nav = filled(config.nav, lists, there)


def filled(nav: list[Any], lists: dict[str, list[Any]], there: set[str]) -> list[Any]:
    """The navigation with lists in place of their names, without documents that do not exist yet."""
    found = []
    for entry in nav:
        ((title, inner),) = entry.items()
        if isinstance(inner, list):
            found.append({title: filled(inner, lists, there)})
        elif inner in lists:
            found.append({title: lists[inner]})
        elif inner not in links.INCLUDED or inner in there:
            found.append(entry)
    return found


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """All pages first: making them draws the pictures."""
    torch.set_num_threads(1)  # more would wait for each other wherever the machine has other work
    drawing.draw_all()
    pages = {
        **declared.all_pages(),
        **links.included(),
        "gallery.md": gallery.page(),
        "cli.md": reference.cli_page(),
        "api.md": reference.api_page(),
        "tutorial.md": tutorial(),
    }
    figures.home_figure()
    gallery.home()
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    made = cache.folder()
    for file in sorted(f for f in made.rglob("*") if f.suffix in (".webp", ".png") and "half-" not in f.name):
        files.append(File.generated(config, file.relative_to(made).as_posix(), abs_src_path=str(file)))
    return files


def tutorial() -> str:
    """The notebook with all that it shows."""
    pictures = cache.folder() / "tutorial"

    def make() -> str:
        pictures.mkdir(exist_ok=True)
        text = notebook.to_markdown(DOCS / "tutorial.ipynb", pictures, "tutorial")
        return text.replace("\n\n## ", "\n\n[Download it as a notebook](tutorial.ipynb)\n\n## ", 1)

    return cache.kept_text(f"tutorial-{cache.digest(DOCS / 'tutorial.ipynb')}.md", make)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Tables and rows made by code, drawings in the colours of the page, links beyond this folder."""
    if "<!-- home -->" in markdown:
        markdown = markdown.replace("<!-- home -->", gallery.home())
    if "<!-- coverage -->" in markdown:
        markdown = markdown.replace("<!-- coverage -->", cache.kept_text("coverage.md", coverage.table))
    markdown = re.sub(r"!\[([^\]]*)\]\((figures/[\w-]+\.svg)\)", lambda found: within(DOCS / found[2]), markdown)
    if page.file.src_uri in WIDE:
        page.meta["hide"] = ["navigation"]
    source = DOCS / page.file.src_uri
    return links.relink(markdown, source, page.file.src_uri) if source.exists() else markdown


def within(file: Path) -> str:
    """An SVG within the page, so that it has the page's colours."""
    return f'<div class="drawing">{file.read_text(encoding="utf-8")}</div>'
