"""Chains over rows of few elements, computed on Python numbers.

A Python number is a double. The sum, difference or product of two single-precision numbers, taken
in double precision and then rounded to single, is the single-precision result itself: 53 bits are
at least 2 * 24 + 2 (S. A. Figueroa, "When is double rounding innocuous?", SIGNUM Newsletter 30(3),
1995). Storing to an array of floats rounds.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from rose_compiler.base.recurrence import Link

#: Elements of a row up to which Python numbers are faster than a call of numpy a row.
FEW = 3

_OPERATORS = {"add": "+", "sub": "-", "mul": "*"}
_TINY = np.float32(1e-40)


def fits(links: Sequence[Link], size: int) -> bool:
    """Whether a chain is computed here: few elements, sums and products, no flush to zero."""
    if size > FEW or not links:
        return False
    if any(link.function not in (*_OPERATORS, "neg") for link in links):
        return False
    return bool(_TINY * np.float32(1) != 0)  # torch.set_flush_denormal holds for numpy, not here


def chain(
    links: Sequence[Link],
    others: list[list[Any]],
    varies: list[list[bool]],
    start: np.ndarray[Any, Any],
    out: np.ndarray[Any, Any],
    forward: bool,
) -> None:
    """Fill ``out``, shape (trips, *row), with the chain's values behind each trip."""
    count = len(out)
    size = out.size // count
    double = out.dtype == np.float64
    function = _function(tuple(_key(link, v) for link, v in zip(links, varies, strict=True)))
    columns: list[list[list[float]]] = []  # by operand, by element of a row
    for given, changes in zip(others, varies, strict=True):
        for each, change in zip(given, changes, strict=True):
            columns.append(_columns(each, change, out, count, size, forward))
    firsts = np.broadcast_to(start, out.shape[1:]).reshape(-1).tolist()
    code = "d" if double else "f"
    made = np.empty((size, count), out.dtype)
    for e in range(size):
        line = array(code, bytes(out.dtype.itemsize * count))
        function(firsts[e], line, array(code, (0.0,)), *(c[e] for c in columns))
        made[e] = np.frombuffer(line, out.dtype)
    series = made.T if forward else made.T[::-1]
    out[...] = series.reshape(out.shape)


def _columns(
    value: Any, change: bool, out: np.ndarray[Any, Any], count: int, size: int, forward: bool
) -> list[Any]:
    """An operand by element of a row: its values in order of trips, or the one value it has."""
    if not change:
        fixed: list[Any] = np.broadcast_to(value, out.shape[1:]).reshape(-1).tolist()
        return fixed
    whole = np.broadcast_to(value, out.shape).reshape(count, size)
    series: list[Any] = (whole if forward else whole[::-1]).T.tolist()
    return series


def _key(link: Link, varies: list[bool]) -> tuple[str, int, bool]:
    return link.function, link.position, bool(varies and varies[0])


@lru_cache(maxsize=256)
def _function(links: tuple[tuple[str, int, bool], ...]) -> Callable[..., None]:
    """``f(x, line, cell, *operands)``: runs a chain, one statement a link.

    ``cell`` is one float that rounds what is in between.
    """
    names = [f"o{k}" for k, (f, _, _) in enumerate(links) if f != "neg"]
    series = [f"o{k}" for k, (f, _, v) in enumerate(links) if f != "neg" and v]
    lines = [f"def run(x, line, cell, {', '.join(names)}):"]
    head = ", ".join(f"v{name}" for name in series)
    if series:
        lines.append(f"    for i, ({head},) in enumerate(zip({', '.join(series)})):")
    else:
        lines.append("    for i in range(len(line)):")
    for k, (function, position, changes) in enumerate(links):
        operand = f"vo{k}" if changes else f"o{k}"
        if function == "neg":
            text = "-x"
        else:
            sides = ("x", operand) if position == 0 else (operand, "x")
            text = f" {_OPERATORS[function]} ".join(sides)
        place = "line[i]" if k == len(links) - 1 else "cell[0]"
        lines += [f"        {place} = {text}", f"        x = {place}"]
    space: dict[str, Any] = {}
    exec("\n".join(lines), space)
    made: Callable[..., None] = space["run"]
    return made
