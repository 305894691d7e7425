"""Ids of images, jobs, maps and concepts: in a team, the first two digits say which worker made them."""

from __future__ import annotations

import re
import secrets

KNOWN = re.compile(rb"(?<![0-9a-f])(?:[0-9a-f]{32}|[0-9a-f]{24})(?![0-9a-f])")
MOST_WORKERS = 64
_own: list[int] = []  # the number of this process, where it is a worker


def serve_as(worker: int) -> None:
    """From now on, ids of this process begin with its number."""
    _own[:] = [worker]


def stamped(number: str) -> str:
    return f"{_own[0]:02x}{number[2:]}" if _own else number


def fresh() -> str:
    """An id that nobody can guess."""
    return stamped(secrets.token_hex(12))


def workers_of(text: bytes, workers: int) -> list[tuple[int, bool]]:
    """The workers that made the ids in a request, in their order, and whether each id is an image's."""
    found = [(int(one[:2], 16), len(one) == 32) for one in KNOWN.findall(text)]
    return [(worker, image) for worker, image in found if worker < workers]
