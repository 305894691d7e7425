"""The servers that published weights come from: whether one answers, asked once and quickly.

The clients of the hub retry for most of a minute before they give up. A server that does not answer a first short
question is not asked any more: only what lies in the local cache is used.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from vitreous.errors import ModelError, one_line

WAIT = 2.5  # seconds
LOCK = threading.RLock()


def silent(url: str) -> str | None:
    """Why a server cannot be used, or None if it answers; proxies and certificates are those of huggingface_hub."""
    from huggingface_hub import get_session

    answers: list[str | None] = []

    def ask() -> None:
        try:
            status = int(get_session().head(url, timeout=WAIT).status_code)
            answers.append(f"it answers {status}" if status >= 500 else None)
        except Exception as error:  # every client has its own kinds
            answers.append(one_line(error, 80))

    asking = threading.Thread(target=ask, daemon=True)  # looking a name up cannot be interrupted
    asking.start()
    asking.join(WAIT + 0.2)
    reason = answers[0] if answers else f"no answer within {WAIT:g} s"
    return None if reason is None else f"no connection to {url}: {reason}"


@contextmanager
def hub(repository: str | None = None, name: str = "") -> Iterator[str | None]:
    """Within this context the hub is used if it answers, else only the local cache; yields why it is not used.

    `repository`: raise at once if it is needed, for the model `name`, and nothing of it is in the cache.
    """
    from huggingface_hub import constants

    reason = None if constants.HF_HUB_OFFLINE else silent(str(constants.ENDPOINT))
    if reason is None:
        yield None
        return
    if repository is not None and not in_cache(repository):
        raise no_weights(name, reason)
    with LOCK:
        constants.HF_HUB_OFFLINE = True
        try:
            yield reason
        finally:
            constants.HF_HUB_OFFLINE = False


def refuse_silent(url: str, name: str) -> None:
    """Raise if weights must be downloaded from this address and its server does not answer."""
    import torch
    from huggingface_hub import constants

    file = Path(torch.hub.get_dir()) / "checkpoints" / Path(urlsplit(url).path).name
    if file.is_file() or constants.HF_HUB_OFFLINE:  # in this mode its client asks no one
        return
    reason = silent("{0.scheme}://{0.netloc}".format(urlsplit(url)))
    if reason is not None:
        raise no_weights(name, reason)


def no_weights(name: str, reason: str) -> ModelError:
    said = f"the weights of {name} could not be downloaded ({reason})"
    return ModelError(f"{said}; give a file with weights=…, or weights='random' for untrained ones")


def in_cache(repository: str) -> bool:
    """Whether any version of a repository lies in the local cache."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}" / "snapshots"
    return folder.is_dir() and any(folder.iterdir())


def cached(repository: str, names: Sequence[str]) -> tuple[Path, ...]:
    """The first of these files of a repository that lies in the local cache."""
    from huggingface_hub import try_to_load_from_cache

    found: list[Any] = [try_to_load_from_cache(repository, name) for name in names]
    return next(((Path(one),) for one in found if isinstance(one, str)), ())
