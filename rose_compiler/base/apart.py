"""Values of several trips that are no rows of one batch, and calls that take them trip by trip.

Late work of all trips is computed in one call on their joined inputs. That is only the same where
the inputs are of one kind: joining float32 and float64 would make float64 of both, and a dict with
a key more than the others has no place for it. What a trip really hands over is seen at run time
only, so this is what stands there for inputs that differ. Nor may one lie in memory otherwise than
row by row: what is computed from it would be rounded, and laid out, as from joined rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from rose_compiler.base.errors import fail
from rose_compiler.base.gaps import shown_again


class Apart:
    """One value a trip, not joined: their keys, types, dtypes, devices or trailing shapes differ,
    or one is not contiguous.

    Args:
        parts: the values in the order of the trips.
    """

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = tuple(parts)


def alike(items: Sequence[Any]) -> bool:
    """Whether values are contiguous tensors or arrays of the same type, dtype, device and trailing
    shape, or show one and the same row again and again, or are dicts of such under the same keys in
    the same order, with as many rows in all entries."""
    first = items[0]
    if any(type(item) is not type(first) for item in items):
        return False
    if type(first) is dict:
        keys = list(first)
        return (
            bool(keys)
            and all(list(item) == keys for item in items)
            and all(alike([item[key] for item in items]) for key in keys)
            and all(len({rows_in(entry) for entry in item.values()}) == 1 for item in items)
        )
    kind = _kind(first)
    if kind is None or any(_kind(item) != kind for item in items):
        return False
    return not kind[-1] or shown_again(items) is not None


def _kind(value: Any) -> tuple[Any, ...] | None:
    """What joining must find equal of a tensor or array, and last whether it may be a row that is
    shown again and again; ``None`` for one without rows, one that is neither that nor contiguous,
    and for anything else."""
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", ())
    if dtype is None or not shape:
        return None
    if (again := _again(value)) is None:
        return None
    return (
        dtype,
        tuple(shape[1:]),
        getattr(value, "device", None),
        getattr(value, "requires_grad", False),
        again,
    )


def _again(value: Any) -> bool | None:
    """Whether a value may be a row that is shown again and again; ``None`` where it is neither that
    nor contiguous."""
    flags = getattr(value, "flags", None)
    try:
        again = not (value.is_contiguous() if flags is None else flags.c_contiguous)
        if again and (flags is not None or value.stride(0) or not value[:1].is_contiguous()):
            return None
    except (AttributeError, RuntimeError):  # no tensor or array, or a sparse one
        return None
    return again


def rows_in(value: Any) -> int:
    """The rows of a batch: those of its first entry, if it is a dict."""
    while isinstance(value, dict):
        value = next(iter(value.values()))
    return int(value.shape[0])


def by_trip(
    function: Callable[..., Any], batched: Sequence[int], each: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """``function``, in whose place ``each``, by default itself, is called once a trip where an
    argument is :class:`Apart`.

    What is joined among the arguments at the positions ``batched`` is cut again into the rows of
    each trip; the others are the same on every trip. Results are then apart too, one by one where
    there are several.
    """

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        apart = [a.parts for a in args if isinstance(a, Apart)]
        if not apart:
            return function(*args)
        one = function if each is None else each
        made, low = [], 0
        cuts = any(k in batched and not isinstance(a, Apart) for k, a in enumerate(args))
        for trip, part in enumerate(_counted(apart) if cuts else apart[0]):
            high = low + rows_in(part) if cuts else 0
            made.append(
                one(*(_of_trip(a, trip, low, high, k in batched) for k, a in enumerate(args)))
            )
            low = high
        if isinstance(made[0], tuple):
            return tuple(map(Apart, zip(*made, strict=True)))
        return Apart(made)

    return call


def _counted(apart: Sequence[Sequence[Any]]) -> Sequence[Any]:
    """Values of the trips whose rows can be counted.

    Raises:
        RuntimeFault: where none can.
    """
    for parts in apart:
        if all(isinstance(p, dict) or getattr(p, "shape", ()) for p in parts):
            return parts
    raise fail("sizes-changed", "the rows that each trip has made are not known")


def _of_trip(value: Any, trip: int, low: int, high: int, batched: bool) -> Any:
    if isinstance(value, Apart):
        return value.parts[trip]
    if not batched:
        return value
    if isinstance(value, dict):
        return {key: item[low:high] for key, item in value.items()}
    return value[low:high]
