"""Pointwise recurrences on the CPU by one C function each, where the compiler's time is repaid.

A recurrence begins on numpy (``scan_cpu``). Once it has spent as long there as compiling takes, a
process beside this one compiles it; until that is done, and where it can't be, numpy goes on. The
first trips of a new function are computed both ways, and it is used only if all bits are the same.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.autograd.graph import increment_version

from rose_compiler.base.recurrence import Recurrence
from rose_compiler.kernels import native, scan_cpu
from rose_compiler.kernels.scan_source import Layout, Text, text

if TYPE_CHECKING:
    from rose_compiler.kernels.scan import Given

Results = tuple[torch.Tensor, ...]

#: Seconds that a recurrence spends on numpy before it is compiled: what compiling takes.
AFTER_S = 0.25


@dataclass(frozen=True)
class Built:
    """What became of compiling one recurrence: ``why`` it was given up, if it was.

    ``name`` is its operation, ``seconds`` how long the compiler took beside the program; 0 for a
    function that an earlier run left on disk.
    """

    name: str
    seconds: float
    why: str = ""


Tell = Callable[[Built], None]


class _Kernel:
    """One recurrence in one layout of its arguments, on its way from numpy to C."""

    def __init__(self, form: Text | None) -> None:
        self.form = form
        self.lock = threading.Lock()
        self.spent = 0.0
        self.function: Any = None
        self.proven = False
        self.build = native.Build(form.source) if form is not None else None
        self.looked = False
        self.kept = False

    def ready(self, tell: Callable[[float, str], None]) -> bool:
        """Whether the function is there; looks on disk, starts the compiler or asks it."""
        if self.function is not None:
            return True
        if self.build is None or not self.lock.acquire(blocking=False):
            return False
        try:
            library = None
            if not self.looked:
                self.looked = True
                library = self.build.kept()
                self.kept = library is not None
            elif self.build.running:
                library = self.build.poll()
            elif self.spent > AFTER_S:
                self.build.start()
            if library is not None:
                function = library.run
                function.restype = None
                function.argtypes = [ctypes.c_void_p] * 6 + [ctypes.c_long] * 4
                self.function = function
            return library is not None
        except native.NotBuilt as error:
            tell(self.build.seconds, str(error))
            self.build = None
            return False
        finally:
            self.lock.release()


_kernels: dict[tuple[Recurrence, Layout], _Kernel] = {}


def run(given: Given, name: str = "", tell: Tell | None = None) -> Results:
    """Compute every trip, store what it stores; the final carried values.

    ``tell`` hears once of what was compiled, or why nothing was; ``name`` is the operation's.
    """
    layout = _layout(given)
    kernel = None if layout is None else _kernel(given.of, layout)
    if kernel is None or kernel.form is None:
        return scan_cpu.run(given)

    def say(seconds: float, why: str) -> None:
        if tell is not None:
            tell(Built(name, seconds, why))

    with torch.no_grad():
        if kernel.ready(say):
            if kernel.proven:
                return _run(given, kernel)
            return _proven(given, kernel, say)
    started = time.perf_counter()
    made = scan_cpu.run(given)
    kernel.spent += time.perf_counter() - started
    return made


def _kernel(of: Recurrence, layout: Layout) -> _Kernel:
    found = _kernels.get((of, layout))
    if found is None:
        found = _kernels.setdefault((of, layout), _Kernel(text(of, layout)))
    return found


def _proven(given: Given, kernel: _Kernel, say: Callable[[float, str], None]) -> Results:
    """Compute the trips by numpy and, apart, in C; the function is dropped if a bit differs."""
    stored = {s.source: given.inputs[s.source].detach().clone() for s in given.of.stores}
    native_made = _compute(given, kernel, stored)
    made = scan_cpu.run(given)
    assert kernel.build is not None
    pairs = [(given.inputs[k].detach(), again) for k, again in stored.items()]
    pairs += [(a.detach().reshape(-1), b) for a, b in zip(made, native_made, strict=True)]
    seconds = 0.0 if kernel.kept else kernel.build.seconds
    if all(_same(a, b) for a, b in pairs):
        kernel.proven = True
        say(seconds, "")
    else:
        kernel.build, kernel.function = None, None
        say(seconds, "what it computes differs from numpy")
    return made


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether bits are equal, any missing value being as good as another."""
    whole = torch.int32 if a.dtype == torch.float32 else torch.int64
    a, b = a.contiguous(), b.contiguous()
    alike = a.view(whole) == b.view(whole)
    return bool((alike | (a.isnan() & b.isnan())).all())


def _run(given: Given, kernel: _Kernel) -> Results:
    of = given.of
    made = _compute(given, kernel, {})
    found: list[torch.Tensor] = []
    for j in range(of.handed):
        item = of.items[of.following[j]]
        if item.kind == "row":  # as in the loop, what it handed on last is that row itself
            found.append(given.inputs[item.source][of.trips[-1] + item.offset])
        elif j in of.inplace:
            given.carried[j].detach().copy_(made[j].reshape(given.shape))
            found.append(given.handed[j])
        else:
            found.append(made[j].reshape(given.handed[j].shape))
    # autograd's check for changed tensors does not see C write
    increment_version([t for s in of.stores if not (t := given.inputs[s.source]).is_inference()])
    return tuple(found)


def _compute(given: Given, kernel: _Kernel, stored: dict[int, torch.Tensor]) -> list[torch.Tensor]:
    """Let the function run; the final carried values, flat. Stores go to ``stored``, by input, if
    it has one for them."""
    of, form = given.of, kernel.form
    assert form is not None
    rows = [stored.get(k, given.inputs[k]) for k in form.rows]
    size = given.shape_size
    own = np.float32 if given.dtype == torch.float32 else np.float64
    numbers = [_number(given.fixed[k], own) for k in form.numbers]
    columns = [_column(given.fixed[k], given.shape) for k in form.columns]
    first = [c.detach().contiguous() for c in given.carried]
    last = [torch.empty(size, dtype=given.dtype) for _ in range(of.handed)]
    kernel.function(
        _pointers(rows),
        (ctypes.c_long * len(rows))(*(r.stride(0) for r in rows)),
        _pointers(columns),
        (ctypes.c_double * len(numbers))(*numbers),
        _pointers(first),
        _pointers(last),
        of.start,
        of.step,
        len(of.trips),
        size,
    )
    return last


def _pointers(tensors: list[torch.Tensor]) -> Any:
    return (ctypes.c_void_p * len(tensors))(*(t.data_ptr() for t in tensors))


def _number(value: Any, own: Any) -> float:
    """A number, rounded once as torch rounds it."""
    return float(own(value.item() if isinstance(value, torch.Tensor) else value))


def _column(value: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return value.detach().expand(shape).contiguous()


def _layout(given: Given) -> Layout | None:
    """How the arguments lie; None where a row's elements don't follow upon each other."""
    of = given.of
    rows: dict[int, str] = {}
    for k in of.touched:
        value = given.inputs[k]
        if not _dense(value):
            return None
        rows[k] = str(value.dtype).removeprefix("torch.")
    fixed = tuple(
        (k, isinstance(v, torch.Tensor) and v.numel() != 1) for k, v in given.fixed.items()
    )
    dtype = str(given.dtype).removeprefix("torch.")
    return Layout(dtype, given.kinds, tuple(rows.items()), fixed)


def _dense(value: torch.Tensor) -> bool:
    """Whether the elements of each row follow upon each other."""
    expected = 1
    for n, s in zip(reversed(value.shape[1:]), reversed(value.stride()[1:]), strict=True):
        if n != 1 and s != expected:
            return False
        expected *= n
    return True
