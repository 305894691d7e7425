"""Documents that lie outside this folder, and links between all of them."""

from __future__ import annotations

import os
import re
from pathlib import Path

from _make.places import DOCS, ROOT

COSTS = sorted((ROOT / "benchmarks" / "results").glob("*.md"))
INCLUDED = {  # pages of the site that are other files of the repository
    "benchmarks.md": "benchmarks/README.md",
    "embedded-model.md": "src/vitreous/assets/README.md",
    "http-api.md": "src/vitreous/web/API.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    **{f"costs/{file.stem}.md": f"benchmarks/results/{file.name}" for file in COSTS},
}
HOME = {"README.md": "index.md", **{source: page for page, source in INCLUDED.items()}}


def included() -> dict[str, str]:
    """Those that are there, with their links as the site needs them."""
    found = {page: ROOT / source for page, source in INCLUDED.items() if (ROOT / source).exists()}
    return {page: relink(file.read_text(encoding="utf-8"), file, page) for page, file in found.items()}


def relink(text: str, file: Path, page: str) -> str:
    """Links of a file to others of the repository, as links between pages; what is no page loses its link."""

    def lead(found: re.Match[str]) -> str:
        words, link, anchor = found[1], found[2], found[3] or ""
        if "://" in link or link.startswith("mailto:") or not link:
            return found[0]
        goal = (file.parent / link).resolve()
        if goal.is_relative_to(ROOT) and goal.relative_to(ROOT).as_posix() in HOME:
            target = HOME[goal.relative_to(ROOT).as_posix()]
        elif goal.is_relative_to(DOCS):
            target = goal.relative_to(DOCS).as_posix()
        else:
            return words
        return f"[{words}]({os.path.relpath(target, Path(page).parent or '.')}{anchor})"

    return re.sub(r"(?<!!)\[([^\]]+)\]\(([^)#\s]*)(#[^)\s]*)?\)", lead, text)
