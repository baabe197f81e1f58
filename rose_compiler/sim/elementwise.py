"""Which of a user's small functions may be given a whole batch instead of one row at a time.

A function qualifies if it reads nothing but its argument, constants and numpy, and calls nothing
but operations of numpy that treat every element by itself and round as IEEE 754 asks. Then the
rows of its result have the bits of single calls. Anything else is left as it is.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Mapping
from numbers import Real
from types import FunctionType, NoneType
from typing import Any

import numpy as np

#: What may stand behind `np.` or a value's dot.
_OPERATIONS = frozenset(
    """
    abs absolute add astype clip float32 float64 maximum minimum multiply negative sign sqrt square
    subtract
    """.split()  # noqa: SIM905
)

#: What may be passed to these by name.
_KEYWORDS = frozenset(("a_max", "a_min", "dtype", "max", "min"))

#: Instructions that only load, compute and return; names differ among Python's versions.
_INSTRUCTIONS = frozenset(
    """
    BINARY_OP CACHE CALL CALL_KW COPY_FREE_VARS KW_NAMES LOAD_ATTR LOAD_CONST LOAD_DEREF LOAD_FAST
    LOAD_FAST_BORROW LOAD_FAST_BORROW_LOAD_FAST_BORROW LOAD_FAST_LOAD_FAST LOAD_GLOBAL LOAD_METHOD
    LOAD_SMALL_INT NOP PRECALL PUSH_NULL RESUME RETURN_VALUE UNARY_NEGATIVE
    """.split()  # noqa: SIM905
)

_ROUNDED = frozenset("+-*")


def batched(functions: list[Any]) -> Callable[[Any], Any] | None:
    """One function that treats a batch as each of these treats its own row; None if unknown.

    The functions must do the same. `float(x)`, which takes no array, becomes a conversion to
    float64.
    """
    first = functions[0]
    if any(type(f) is not FunctionType or f.__kwdefaults__ for f in functions):
        return None
    if not all(_same(f, first) for f in functions) or not _qualifies(first):
        return None
    if "float" not in first.__code__.co_names:
        found: Callable[[Any], Any] = first
        return found
    names = {n: first.__globals__[n] for n in first.__code__.co_names if n in first.__globals__}
    return FunctionType(
        first.__code__,
        {**names, "float": _as_float},
        first.__name__,
        first.__defaults__,
        first.__closure__,
    )


def _as_float(values: Any) -> Any:
    return np.asarray(values, np.float64)


def _same(f: FunctionType, first: FunctionType) -> bool:
    if f is first:
        return True
    if f.__code__ != first.__code__:
        return False
    mine, other = constants(f), constants(first)
    if len(mine) != len(other) or not all(map(_equal, mine, other)):
        return False
    return all(f.__globals__.get(n) is first.__globals__.get(n) for n in f.__code__.co_names)


def constants(f: FunctionType) -> list[Any]:
    """What the function reads now beside its argument and globals."""
    try:
        cells = [cell.cell_contents for cell in f.__closure__ or ()]
    except ValueError:  # an empty cell
        cells = [object()]
    return [*cells, *(f.__defaults__ or ())]


def _equal(mine: Any, other: Any) -> bool:
    if isinstance(mine, np.ndarray) or isinstance(other, np.ndarray):
        return mine is other  # one that is written to later is written for all
    return type(mine) is type(other) and bool(mine == other)


def _qualifies(f: FunctionType) -> bool:
    code = f.__code__
    if code.co_argcount - len(f.__defaults__ or ()) != 1 or code.co_kwonlyargcount:
        return False
    if code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS | inspect.CO_GENERATOR):
        return False
    if not all(isinstance(value, (Real, np.ndarray, NoneType)) for value in constants(f)):
        return False
    steps = [step for step in dis.get_instructions(code) if step.opname != "CACHE"]
    # `out=` would write into an environment's own array
    names = [n for c in code.co_consts if isinstance(c, tuple) for n in c if isinstance(n, str)]
    if not _KEYWORDS.issuperset(names):
        return False
    for before, step in zip([None, *steps[:-1]], steps, strict=True):
        name = step.opname
        if name not in _INSTRUCTIONS:
            return False
        if name in ("LOAD_ATTR", "LOAD_METHOD") and step.argval not in _OPERATIONS:
            return False
        if name == "LOAD_GLOBAL" and not _known(f.__globals__, step.argval):
            return False
        if name == "BINARY_OP" and not _exact(before, step):
            return False
    return True


def _known(names: Mapping[str, Any], name: str) -> bool:
    if name in names:
        return names[name] is np
    return name in ("abs", "float")


def _exact(before: dis.Instruction | None, step: dis.Instruction) -> bool:
    """Whether an operator rounds as IEEE 754 asks, and raises for no element: a number of Python's
    is not divided by 0 as one of numpy's is."""
    if step.argrepr in _ROUNDED:
        return True
    if step.argrepr != "/" or before is None or not before.opname.startswith("LOAD_"):
        return False
    return isinstance(before.argval, Real) and before.argval != 0
