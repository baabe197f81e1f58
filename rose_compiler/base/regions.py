"""What a `with` statement has to do when its body raises, where the statement itself is compiled.

A captured program has no `finally`. A region keeps what is to be done while its body runs; who runs
the program asks for it where an exception leaves it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

_numbers = itertools.count()


class Region:
    """The `finally` of one `with` statement, as a function of values known when it is entered."""

    def __init__(self, last: Callable[..., Any]) -> None:
        self._last = last
        self._open: list[tuple[int, tuple[Any, ...]]] = []

    def open(self, *values: Any) -> None:
        """The body begins; ``values`` are what the `finally` will read."""
        self._open.append((next(_numbers), values))

    def close(self) -> None:
        """The body has ended, and the program itself does what follows."""
        self._open.pop()

    def pending(self) -> list[tuple[int, Callable[[], Any]]]:
        """What bodies that an exception left have still to do, with their order; asked once."""
        found, self._open = self._open, []
        return [(number, functools.partial(self._last, *values)) for number, values in found]


def unwind(regions: Iterable[Region]) -> None:
    """Do what is left of the statements that an exception leaves, the last one entered first.

    Raises:
        Exception: whatever that raises; later ones are done all the same.
    """
    found = sorted((p for r in regions for p in r.pending()), key=lambda p: p[0])
    _unwind([last for _, last in found])


def _unwind(lasts: list[Callable[[], Any]]) -> None:
    if not lasts:
        return
    try:
        lasts.pop()()
    finally:
        _unwind(lasts)
