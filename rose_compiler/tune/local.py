"""What operations take by themselves, on other rows or threads than program order gives them.

A profile says what an operation takes on the rows and with the threads of program order. On half of
the rows it may take half of that, or as long (it reads all of its weights), and on one thread
longer or shorter. A few calls of it tell, before any iteration is spent; forecasts go by the ratio
of two such measurements, so that neither the moment nor the state of the caches matters much.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

#: An operation by name and line.
Identity = tuple[str, str]
Which = Literal["seconds", "low", "high"]


@dataclass(frozen=True)
class Point:
    """Seconds of one call, and their quartiles (``low``, ``high``), on ``rows`` times as many rows
    as in program order and with so many of torch's threads."""

    rows: float
    threads: int
    seconds: float
    low: float
    high: float


@dataclass(frozen=True)
class Local:
    """The points of each operation that was measured.

    ``threads`` are torch's as the user set them, ``sizes`` the rows of each operation's batch in
    program order.
    """

    threads: int
    points: Mapping[Identity, Sequence[Point]] = field(default_factory=dict)
    sizes: Mapping[Identity, int] = field(default_factory=dict)

    def seconds(
        self, identity: Identity, rows: float = 1.0, threads: int = 0, which: Which = "seconds"
    ) -> float | None:
        """Seconds of one call, read off between the points, or beyond them on the line through the
        two next to it; ``None`` where nothing was measured. ``threads`` 0: those of the user."""
        count = threads or self.threads
        found = sorted(
            (p.rows, getattr(p, which)) for p in self.points.get(identity, ()) if p.threads == count
        )
        return _read(found, rows)


def _read(points: list[tuple[float, float]], rows: float) -> float | None:
    for at, seconds in points:
        if abs(at - rows) <= 1e-6 * rows:
            return seconds
    if len(points) < 2:
        return None
    k = next((k for k, (at, _) in enumerate(points) if at > rows), len(points))
    k = min(max(k, 1), len(points) - 1)
    (a, low), (b, high) = points[k - 1], points[k]
    found = low + (high - low) * (rows - a) / (b - a)
    if rows < a:  # no less than if nothing of it were fixed
        return max(found, low * rows / a)
    return max(found, high) if rows > b else found
