"""Objects with numbers, and what code that ran names of them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from rose_compiler.frontend.host_calls import HostCalls
from rose_compiler.frontend.mentions import Mentions


class Thing:
    """Something with all kinds of numbers."""

    kind = 4

    def __init__(self) -> None:
        self.rate = 1
        self.mean = 2
        self.table = {"a": 3, "b": {"c": 4}, 7: 5}
        self.parts = [6, SimpleNamespace(rate=7)]
        self.inner = SimpleNamespace(deep=SimpleNamespace(rate=8))
        self.name = "x"
        self.long = list(range(1000))

    def rated(self) -> int:
        return self.rate


class Around:
    """Has the attributes of something else, too."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def mentioned(read: Callable[[Any], Any], thing: Any) -> Mentions:
    """What code that ran names."""
    with HostCalls() as calls:
        read(thing)
    return calls.mentions
