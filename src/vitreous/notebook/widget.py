"""The widget: a frame with the page, whose questions the kernel answers."""

from __future__ import annotations

import base64
from collections.abc import Callable
from functools import cache
from html import escape
from pathlib import Path
from threading import Lock
from typing import Any

import anywidget
import traitlets

from vitreous.attribution import Attribution
from vitreous.notebook.bridge import App, Bridge
from vitreous.web.bundle import document

ENTRY = "framed.js"
LEAST = 240  # pixels
GONE = "run this cell again to see it"


@cache
def page() -> bytes:
    return document(ENTRY).encode()


class View(anywidget.AnyWidget):
    """The page in a notebook. `address` is what it shows, as the page writes it behind `#`; set it to show that."""

    _esm = Path(__file__).parent / "widget.js"
    address = traitlets.Unicode("").tag(sync=True)
    height = traitlets.Int(600, min=LEAST).tag(sync=True)  # pixels
    recorded = traitlets.Bool(False, read_only=True).tag(sync=True)  # maps without their model

    def __init__(
        self,
        app: App,
        *,
        what: str,
        address: str,
        height: int,
        end: Callable[[], None],
        maps: Callable[[str], list[Attribution]],
        still: Callable[[], bytes] | None = None,
        recorded: bool = False,
    ) -> None:
        """`end` stops what answers; `maps(address)` gives the maps that are shown; `still` draws a figure of them."""
        self._what, self._ends, self._maps, self._still = what, end, maps, still
        self._sending = Lock()
        super().__init__(address=address, height=height)
        self.set_trait("recorded", recorded)
        self._bridge = Bridge(app, self._tell)
        self.on_msg(self._hear)

    def maps(self) -> list[Attribution]:
        """The maps that were computed for the image that is shown."""
        return self._maps(self.address)

    def close(self) -> None:
        """Remove the view from the notebook, end its jobs and free its memory."""
        if self._bridge.open:
            self._bridge.close(self._ends)
        super().close()

    def _hear(self, _: Any, told: dict[str, Any], buffers: list[Any]) -> None:
        if told.get("kind") == "open":
            self._tell({"kind": "page", "view": str(told.get("view"))}, [page()])
        else:
            self._bridge.hear(told, bytes(buffers[0]) if buffers else b"")

    def _tell(self, told: dict[str, Any], buffers: list[bytes]) -> None:
        with self._sending:
            self.send(told, buffers)

    def __repr__(self) -> str:
        return f"<View of {self._what}: shown in a notebook; outside of one, Attribution.save draws maps>"

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """The view, and what a notebook without kernel shows in its place: a figure, or a sentence."""
        found: tuple[dict[str, Any], dict[str, Any]] | None = super()._repr_mimebundle_(**kwargs)
        if found is not None:
            if self._still is None:
                found[0]["text/html"] = f"<p>A view of {escape(self._what)}: {GONE}.</p>"
            else:
                found[0]["image/png"] = base64.b64encode(self._still()).decode()
        return found
