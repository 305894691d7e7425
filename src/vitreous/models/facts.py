"""What was found out about a network by running it, so that it is found out once.

Every `Model` of one network shares the same `Facts`; they go when the network goes, or by `model.forget()`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torch import nn

T = TypeVar("T")


class Facts:
    """Answers by question, and the lock that lets one thread at a time run the network."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._answers: dict[Hashable, Any] = {}
        self._kinds: dict[Hashable, Facts] = {}

    def of_kind(self, kind: Hashable) -> Facts:
        """What was found out with inputs of one kind, or with other arguments as the image; under the same lock."""
        if not kind:
            return self
        found = self._kinds.setdefault(kind, Facts())
        found.lock = self.lock
        return found

    def find(self, question: Hashable, answer: Callable[[], T]) -> T:
        """The answer to a question; `answer` is called the first time."""
        if question not in self._answers:
            self._answers[question] = answer()
        return self._answers[question]  # type: ignore[no-any-return]

    def get(self, question: Hashable) -> Any:
        """An answer, or None where it is not known."""
        return self._answers.get(question)

    def knows(self, question: Hashable) -> bool:
        return question in self._answers

    def note(self, question: Hashable, answer: Any) -> None:
        """Remember an answer that came with another one."""
        self._answers[question] = answer

    def first(self, question: Hashable) -> bool:
        """Whether this is asked for the first time, by any thread."""
        mark = object()
        return self._answers.setdefault(question, mark) is mark

    def take(self, question: Hashable) -> Any:
        """An answer that is needed once, or None; it is forgotten."""
        return self._answers.pop(question, None)

    def forget(self) -> None:
        self._answers.clear()
        for kind in self._kinds.values():
            kind.forget()


_FACTS: WeakKeyDictionary[nn.Module, Facts] = WeakKeyDictionary()


def facts_of(net: nn.Module) -> Facts:
    """The facts of a network, the same for every `Model` of it."""
    return _FACTS.setdefault(net, Facts())
