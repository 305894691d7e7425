"""The tokens that open a server, each with limits of its own.

A token is known by its SHA-256 alone where the file gives no more; only its name is ever shown or logged.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vitreous.errors import OptionError, VitreousError, one_line
from vitreous.web.limits import MB, Limits

LOG = logging.getLogger("vitreous.web")
SHORTEST = 16  # characters of a token
HASH = re.compile(r"[0-9a-f]{64}")


class Entry(BaseModel):
    """One `[[token]]` of the file."""

    model_config = ConfigDict(extra="forbid", strict=True)
    name: Annotated[str, Field(pattern=r"^[\w.-]{1,40}$")]
    token: str | None = None
    sha256: str | None = None
    rate: Annotated[float, Field(gt=0, le=10_000)] | None = None  # requests a second
    burst: Annotated[int, Field(ge=1, le=100_000)] | None = None
    jobs: Annotated[int, Field(ge=1, le=64)] | None = None  # waiting or running
    upload: Annotated[float, Field(gt=0, le=Limits.upload_bytes / MB)] | None = None  # MB
    expires: date | None = None  # the last day on which it opens the server


class File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    token: Annotated[list[Entry], Field(min_length=1, max_length=1000)]


@dataclass(frozen=True)
class Token:
    name: str
    digest: str = field(repr=False)
    cookie: str = field(repr=False)
    rate: float | None = None
    burst: int | None = None
    jobs: int | None = None
    upload_bytes: int | None = None
    expires: date | None = None

    @property
    def expired(self) -> bool:
        return self.expires is not None and datetime.now(UTC).date() > self.expires


class Tokens:
    """All tokens of a server; none at all: it is open to everybody who reaches it."""

    def __init__(self, single: str | None = None, file: Path | None = None, key: str | None = None) -> None:
        self.file, self.key = file, key or secrets.token_hex(32)
        self.single = [] if single is None else [Token("default", digest_of(single), sealed(single))]
        self.known = self.read()

    def read(self) -> list[Token]:
        return [*self.single, *(read(self.file, self.key) if self.file is not None else [])]

    def reload(self) -> None:
        """Read the file again; one that cannot be read changes nothing."""
        try:
            self.known = self.read()
            LOG.info("tokens", extra={"said": {"tokens": len(self.known)}})
        except VitreousError as error:
            LOG.error("the tokens stay as they were: %s", one_line(error))

    def __bool__(self) -> bool:
        return bool(self.known)

    def find(self, given: str) -> Token | None:
        return matching(((one, one.digest) for one in self.known), digest_of(given))

    def of_cookie(self, given: str) -> Token | None:
        return matching(((one, one.cookie) for one in self.known), given)


def matching(known: Iterable[tuple[Token, str]], given: str) -> Token | None:
    """Compare with every token in constant time."""
    found = None
    for token, wanted in known:
        if hmac.compare_digest(given.encode(), wanted.encode()) and not token.expired:
            found = token
    return found


def read(file: Path, key: str) -> list[Token]:
    try:
        entries = File.model_validate(tomllib.loads(file.read_text("utf-8"))).token
    except OSError as error:
        raise OptionError(f"--tokens {file}: cannot be read ({error.strerror or one_line(error)})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError):
        raise OptionError(f"--tokens {file}: is not TOML; write [[token]] with name = … and token = …") from None
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        where = " ".join(str(part + 1 if isinstance(part, int) else part) for part in first["loc"])
        raise OptionError(f"--tokens {file}: {where}: {first['msg']}") from None
    made = [token_of(entry, file, key) for entry in entries]
    for what, values in (("name", [one.name for one in made]), ("token", [one.digest for one in made])):
        if len({*values}) < len(values):
            raise OptionError(f"--tokens {file}: two entries have the same {what}")
    return made


def token_of(entry: Entry, file: Path, key: str) -> Token:
    said = f"--tokens {file}: {entry.name}"
    if (entry.token is None) == (entry.sha256 is None):
        raise OptionError(f"{said}: give token or sha256, one of them")
    if entry.token is not None:
        check_token(entry.token, said)
        digest, cookie = digest_of(entry.token), sealed(entry.token)
    else:
        digest = (entry.sha256 or "").lower()
        if not HASH.fullmatch(digest):
            raise OptionError(f"{said}: sha256 has 64 hexadecimal digits")
        cookie = hmac.new(key.encode(), digest.encode(), hashlib.sha256).hexdigest()  # the token itself is not known
    upload = None if entry.upload is None else int(entry.upload * MB)
    return Token(entry.name, digest, cookie, entry.rate, entry.burst, entry.jobs, upload, entry.expires)


def check_token(token: str, said: str) -> None:
    if len(token) < SHORTEST or not token.isascii():
        raise OptionError(f"{said} is too easy to guess; give at least {SHORTEST} ASCII letters and digits")


def digest_of(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def sealed(token: str) -> str:
    """The cookie's value, derived from the token."""
    return hmac.new(token.encode(), b"vitreous cookie", hashlib.sha256).hexdigest()
