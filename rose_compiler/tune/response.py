"""How long work takes with how many SMs or cores: a monotone curve from a few measured points."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.interpolate import PchipInterpolator
from scipy.optimize import isotonic_regression, nnls

#: Largest relative error of the law at a point before the points themselves are interpolated.
TOLERANCE = 0.1


@dataclass(frozen=True)
class Response:
    """Seconds against units, never increasing.

    The law is Amdahl's with saturation, ``fixed + work / min(units, demand)``: ``fixed`` seconds
    don't depend on the units, ``work`` is in unit-seconds, and more than ``demand`` units are of no
    use. ``knots`` are set where the law fits badly: monotone points, interpolated in between.
    """

    fixed: float
    work: float
    demand: float = math.inf
    knots: tuple[tuple[float, float], ...] = ()

    def seconds(self, units: float) -> float:
        """Time with that many units; raises ``ValueError`` for none."""
        if units <= 0:
            raise ValueError("work without any unit never ends")
        if not self.knots:
            return self.fixed + self.work / min(units, self.demand)
        first, last = self.knots[0], self.knots[-1]
        if units <= first[0]:
            return first[1] * first[0] / units  # below all points: as if all of it were parallel
        if units >= last[0]:
            return last[1]
        x, y = zip(*self.knots, strict=True)
        return float(PchipInterpolator(x, y)(units))


def fit(points: Sequence[tuple[float, float]]) -> Response:
    """The curve through measured ``(units, seconds)``, best 3 to 5 of them at different units.

    Relative errors count, so that a point with few units does not decide alone. Raises
    ``ValueError`` without points, or for one that is not positive.
    """
    if not points:
        raise ValueError("a response needs at least one point")
    if any(units <= 0 or seconds < 0 for units, seconds in points):
        raise ValueError("points of a response are positive")
    at = sorted({units for units, _ in points})
    merged = [(u, float(np.median([s for v, s in points if v == u]))) for u in at]
    if all(seconds == 0 for _, seconds in merged):
        return Response(0.0, 0.0)
    if len(merged) == 1:  # nothing is known of its shape
        units, seconds = merged[0]
        return Response(0.0, units * seconds)
    best = _law(merged)
    errors = [abs(best.seconds(u) - s) / s for u, s in merged if s > 0]
    if max(errors) <= TOLERANCE or len(merged) < 3:
        return best
    smooth = isotonic_regression([s for _, s in merged], increasing=False).x
    return Response(
        best.fixed, best.work, best.demand, tuple(zip(at, map(float, smooth), strict=True))
    )


def _law(points: Sequence[tuple[float, float]]) -> Response:
    units = np.array([u for u, _ in points])
    seconds = np.array([s for _, s in points])
    weights = 1.0 / np.maximum(seconds, 1e-12 + 1e-6 * seconds.max())
    # what saturates between two points shows in the later one's time only: a grid finds it
    grid = np.unique(np.concatenate([np.linspace(units[0], units[-1], 61), units]))
    demands = np.concatenate([[np.inf], grid[::-1]])
    errors = _errors(1.0 / np.minimum(units, demands[:, None]), seconds, weights)
    # the latest demand among the best: an earlier one must explain more than rounding does
    best = float(demands[np.argmax(errors <= errors.min() * (1 + 1e-6) + 1e-12)])
    rows = np.stack([np.ones_like(units), 1.0 / np.minimum(units, best)], axis=1)
    (fixed, work), _ = nnls(rows * weights[:, None], seconds * weights)
    return Response(float(fixed), float(work), best)


def _errors(inverse: np.ndarray, seconds: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Least squared error of ``fixed + work * inverse`` with both not negative, for each row."""
    w = weights**2
    one, x, xx = w.sum(), inverse @ w, inverse**2 @ w
    y, xy = w @ seconds, inverse @ (w * seconds)
    spread = one * xx - x**2
    flat = spread <= 1e-12 * one * xx
    work = np.where(flat, 0.0, (one * xy - x * y) / np.where(flat, 1.0, spread))
    fixed = (y - work * x) / one
    work, fixed = np.where(work < 0, 0.0, work), np.where(work < 0, y / one, fixed)
    work, fixed = np.where(fixed < 0, xy / xx, work), np.where(fixed < 0, 0.0, fixed)
    return ((fixed[:, None] + work[:, None] * inverse - seconds) ** 2) @ w
