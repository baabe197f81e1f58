"""All trips of a pointwise recurrence at once, where its arguments allow that.

:func:`whole` is what emitted code calls. It looks at what it is given, hands it to the form for its
device, and runs the trips one by one where none fits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from rose_compiler.base.recurrence import Recurrence
from rose_compiler.kernels import scan_arrays, scan_cpu, scan_cuda, scan_native
from rose_compiler.kernels.scan_fit import Given, fit, resolve

__all__ = ["Given", "Trips", "fit", "resolve", "run", "whole"]

_Form = Callable[[Given], tuple[Any, ...]]


def run(
    of: Recurrence,
    args: Sequence[Any],
    name: str = "",
    tell: scan_native.Tell | None = None,
    on_cpu: _Form | None = None,
) -> tuple[Any, ...] | None:
    """Compute every trip, store what it stores; the final carried values. ``tell`` hears of what
    is compiled for that, under the operation's ``name``; ``on_cpu`` is another form for the CPU.

    ``None``, with nothing changed, where types, shapes, devices, overlapping memory or gradients
    ask for one trip after the other.
    """
    if on_cpu is None and (made := _planned(of, args, 1)) is not None:
        return scan_arrays.back(of, made, args)
    given = fit(of, args)
    if given is None or any(
        not isinstance(c, torch.Tensor) or c.shape != given.shape for c in given.carried
    ):
        return None
    if given.device.type == "cpu":
        made = scan_native.run(given, name, tell) if on_cpu is None else on_cpu(given)
        return scan_arrays.back(of, made, args)
    if given.device.type == "cuda" and not of.bitwise:
        return scan_cuda.run(given)
    return None


class Trips(Protocol):
    """The trips of a loop as they stand."""

    @property
    def indices(self) -> range | None:
        """The loop variable's values, where they are always the same."""

    def over(self, indices: range, args: Sequence[Any]) -> tuple[Any, ...]:
        """Run some of them on carried and captured values; the carried values behind them."""


def whole(
    of: Recurrence, trips: Trips, args: Sequence[Any], tell: scan_native.Tell | None = None
) -> tuple[Any, ...]:
    """A loop: its recurrence at once where that fits, the other trips as they stand. ``tell`` as
    for :func:`run`.

    Returns the final carried values.
    """
    indices = trips.indices
    if indices is None:
        bounds, args = tuple(args[-3:]), args[:-3]
        indices = range(*bounds)
        if bounds != of.bounds:
            return trips.over(indices, args)
    name = getattr(trips, "__name__", "")

    def in_turn(on_cpu: _Form | None = None) -> tuple[Any, ...]:
        carried, captured = tuple(args[: of.handed]), args[of.handed :]
        first, last = of.ends[0], len(indices) - of.ends[1]
        if first:
            carried = trips.over(indices[:first], (*carried, *captured))
        made = run(of, (*carried, *captured), name, tell, on_cpu)
        if made is None:
            return trips.over(indices[first:], (*carried, *captured))
        if last < len(indices):
            return trips.over(indices[last:], (*made, *captured))
        return made

    if sum(of.ends) and not of.parts:
        return in_turn()
    made = _planned(of, args, len(of.parts) or 1)
    if made is None:
        parts = _parts(of, args)
        if parts is None:
            return in_turn()
        made = scan_native.together(of, parts, lambda: in_turn(scan_cpu.run), name, tell)
    return scan_arrays.back(of, made, args)


def _planned(of: Recurrence, args: Sequence[Any], parts: int) -> tuple[Any, ...] | None:
    """The trips as they were computed before, if the arguments are of the same make."""
    plan = scan_native.plan_of(of, parts)
    return None if plan is None else plan.run(args)


def _parts(of: Recurrence, args: Sequence[Any]) -> tuple[Given, ...] | None:
    """All trips, those at the ends as recurrences of their own, if all fit and lie on the CPU."""
    found: list[Given] = []
    for part in of.parts or (of,):
        given = fit(part, args, found[-1] if found else None, alone=False)
        if given is None or given.device.type != "cpu":
            return None
        if found and (given.shape != found[0].shape or part.inplace != found[0].of.inplace):
            return None
        found.append(given)
    return tuple(found) if scan_native.apart(found) else None
