"""Where things lie."""

from pathlib import Path

DOCS = Path(__file__).parents[1]
ROOT = DOCS.parent
SOURCE = ROOT / "src" / "vitreous"
PHOTOS = SOURCE / "assets" / "photos"
CACHE = ROOT / ".cache" / "docs"
