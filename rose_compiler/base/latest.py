"""A table that keeps what was used last, and no more than so many entries."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

_LOCK = threading.RLock()


def latest(table: dict[K, V], key: K, make: Callable[[], V], most: int) -> V:
    """The entry of a table, made where there is none; it is then the one that was used last, and
    those that were used longest ago go where there are more than ``most``."""
    with _LOCK:
        found = table.pop(key) if key in table else make()
        table[key] = found
        while len(table) > most:
            del table[next(iter(table))]
    return found
