"""Pointwise recurrences on the CPU by one C function each, where the compiler's time is repaid.

A recurrence begins on numpy (``scan_cpu``). Once it has spent as long there as compiling takes, a
process beside this one compiles it; until that is done, and where it can't be, numpy goes on. Some
columns of the first trips of a new function are computed both ways, and it is used only if all bits
are the same. Long rows are shared out among torch's threads, by the OpenMP that torch runs on.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from struct import pack
from typing import TYPE_CHECKING, Any

import torch

from rose_compiler.base.latest import latest
from rose_compiler.base.recurrence import PROVEN, Recurrence
from rose_compiler.kernels import native, scan_arrays, scan_cpu
from rose_compiler.kernels.scan_memory import extent, stored
from rose_compiler.kernels.scan_plan import Plan, column, number
from rose_compiler.kernels.scan_source import BLOCK, Layout, Part, text

if TYPE_CHECKING:
    from rose_compiler.kernels.scan_fit import Given

#: Seconds that a recurrence spends on numpy before it is compiled: what compiling takes.
AFTER_S = 0.25
#: Elements of all rows from which on threads share the columns, and the fewest that one takes.
SHARED, LEAST = 1 << 18, 256
#: Plans that are kept.
MOST = 1024
#: Recurrences and layouts of their arguments that are kept compiled, those used last.
MOST_KERNELS = 256


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
    """Recurrences that go on from one another, in one layout of their arguments, on the way from
    numpy to C."""

    def __init__(self, parts: tuple[Part, ...]) -> None:
        self.form = form = text(parts)
        self.spans = [n for of, _ in parts for n in (of.start, of.step, len(of.trips))]
        self.sharing: dict[int, _Sharing] = {}
        self.trips = sum(len(of.trips) for of, _ in parts)
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
                function.argtypes = [
                    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long, ctypes.c_long),
                    *(ctypes.c_uint, ctypes.c_void_p),
                ]
                self.function = function
            return library is not None
        except native.NotBuilt as error:
            tell(self.build.seconds, str(error))
            self.build = None
            return False
        finally:
            self.lock.release()

    def call(
        self,
        rows: list[int],
        strides: list[int],
        columns: list[torch.Tensor],
        first: list[torch.Tensor | None],
        last: list[torch.Tensor],
        numbers: bytes,
        *,
        size: int,
        whole: bool = True,
    ) -> None:
        """Run the function over the first ``size`` columns, by one thread unless they are the
        ``whole``: addresses of inputs with rows and the distances of rows, values by column,
        carried values in front and behind, numbers as doubles; part by part."""
        given = [*rows, *strides, *(t.data_ptr() for t in columns)]
        given += [0 if t is None else t.data_ptr() for t in first]
        given += [t.data_ptr() for t in last]
        given += self.spans
        # made anew in each call: several threads may be in it
        handed = pack(f"{len(given)}l", *given), numbers
        most = _shared(size, self.trips) if whole else 1
        if most == 1:
            self.function(*handed, size, BLOCK if whole else PROVEN, 1, None)
            return
        sharing = self.sharing.setdefault(size, _Sharing())
        threads, started = sharing.threads(most), time.perf_counter()
        self.function(*handed, size, _block(size, threads), threads, _fork())
        sharing.took(threads, time.perf_counter() - started)


class _Sharing:
    """Whether several threads pay, from what calls took: beside other work they may not. Both ways
    are tried in turn first, and the slower one now and then, since that may change."""

    FIRST, AGAIN = 10, 100

    def __init__(self) -> None:
        self.calls = 0
        self.alone: deque[float] = deque(maxlen=5)
        self.shared: deque[float] = deque(maxlen=5)

    def threads(self, most: int) -> int:
        """How many threads the next call runs on, of ``most``."""
        if self.calls < self.FIRST:
            share = self.calls % 2 == 0
        else:
            share = statistics.median(self.shared) < statistics.median(self.alone)
            share ^= self.calls % self.AGAIN == 0
        self.calls += 1
        return most if share else 1

    def took(self, threads: int, seconds: float) -> None:
        """Note what a call took."""
        (self.alone if threads == 1 else self.shared).append(seconds)


_kernels: dict[tuple[Part, ...], _Kernel] = {}
#: By recurrence and the number of its parts: its middle alone has one.
_plans: dict[tuple[Recurrence, int], Plan] = {}


def run(given: Given, name: str = "", tell: Tell | None = None) -> tuple[Any, ...]:
    """Compute every trip, store what it stores; the final carried values.

    ``tell`` hears once of what was compiled, or why nothing was; ``name`` is the operation's.
    """
    return together(given.of, (given,), lambda: scan_cpu.run(given), name, tell)


def plan_of(of: Recurrence, parts: int) -> Plan | None:
    """How a recurrence of so many parts that was compiled and proven is called."""
    return _plans.get((of, parts))


def together(
    of: Recurrence,
    parts: tuple[Given, ...],
    slow: Callable[[], tuple[Any, ...]],
    name: str = "",
    tell: Tell | None = None,
) -> tuple[Any, ...]:
    """Compute the parts of a recurrence, which go on from one another, or its only one; ``slow``
    does the same without what is compiled. ``name`` and ``tell`` as for :func:`run`."""
    kernel = _kernel(parts)
    if kernel is None or kernel.form is None:
        return slow()

    def say(seconds: float, why: str) -> None:
        if tell is not None:
            tell(Built(name, seconds, why))

    if kernel.ready(say):
        if not kernel.proven:
            return _proven(parts, kernel, slow, say)
        call = partial(kernel.call, size=parts[0].shape_size)
        if len(_plans) >= MOST:
            _plans.clear()
        plan = _plans[of, len(parts)] = Plan(of, parts, kernel.form.parts, call)
        return plan.computed(parts)
    started = time.perf_counter()
    made = slow()
    kernel.spent += time.perf_counter() - started
    return made


def apart(parts: Sequence[Given]) -> bool:
    """Whether what one part stores is read by others from the same place of the same tensor, or
    not at all: columns are then computed one block after the other."""
    if len(parts) == 1:
        return True
    inputs = [
        (*extent(v, reach), v)
        for g in parts
        for v, reach in zip(g.inputs, g.fit.reach, strict=True)
        if reach
    ]
    first = parts[0]
    handed = list(map(extent, first.handed[: first.of.handed], first.fit.handed))
    for g in parts:
        for s in g.of.stores:
            store = g.inputs[s.source]
            low, high = extent(store, g.fit.reach[s.source])
            for start, end, other in inputs:
                same = other is store or (start, other.stride()) == (low, store.stride())
                if low < end and start < high and not same:
                    return False
            low, high = stored(g.of, store, s.offset)
            if any(low < end and start < high for start, end in handed):
                return False
    changed = [handed[j] for j in first.of.inplace]
    return not any(a < end and start < b for a, b in changed for start, end, _ in inputs)


def _kernel(parts: tuple[Given, ...]) -> _Kernel | None:
    """What became of the recurrences in this layout; kept with the fit of the last one."""
    kept = parts[-1].fit.kept
    before = tuple(g.fit for g in parts[:-1])
    known = kept.get("native")
    if known is not None and known[0] == before:
        found: _Kernel | None = known[1]
        return found
    layouts = [_layout(g) for g in parts]
    found = None
    if None not in layouts:
        key = tuple((g.of, layout) for g, layout in zip(parts, layouts, strict=True) if layout)
        found = latest(_kernels, key, lambda: _Kernel(key), MOST_KERNELS)
    kept["native"] = before, found
    return found


def _proven(
    parts: tuple[Given, ...],
    kernel: _Kernel,
    slow: Callable[[], tuple[Any, ...]],
    say: Callable[[float, str], None],
) -> tuple[Any, ...]:
    """Compute the trips without what was compiled and, apart, some columns in C; the function is
    dropped if a bit differs."""
    size = parts[0].shape_size
    count = parts[0].of.tried(size)
    buffers = {_place(b): b for g in parts for s in g.of.stores for b in (g.inputs[s.source],)}
    into = {k: _columns_of(b, count).clone() for k, b in buffers.items()}
    with torch.no_grad():
        native_made = _tried(parts, kernel, into, count)
    made = slow()
    assert kernel.build is not None
    pairs = [(_columns_of(buffers[k], count), again) for k, again in into.items()]
    alike = True
    shapes = [parts[-1].made_shape(j) for j in range(parts[-1].of.handed)]
    final = map(scan_arrays.seen, made) if parts[0].of.arrays else made
    for a, b, shape in zip(final, native_made, shapes, strict=True):
        alike = alike and isinstance(a, torch.Tensor) and tuple(a.shape) == shape
        if alike:
            pairs.append((a.detach().reshape(-1)[:count], b))
    seconds = 0.0 if kernel.kept else kernel.build.seconds
    if alike and all(_same(a, b) for a, b in pairs):
        kernel.proven = True
        say(seconds, "")
    else:
        kernel.build, kernel.function = None, None
        say(seconds, "what it computes differs from numpy")
    return made


def _place(value: torch.Tensor) -> tuple[Any, ...]:
    """Where a tensor lies; several may lie in one place."""
    return value.data_ptr(), value.shape, value.stride()


def _columns_of(buffer: torch.Tensor, count: int) -> torch.Tensor:
    """The first columns of a tensor whose rows are dense, a view."""
    detached = buffer.detach()
    return detached.as_strided((buffer.shape[0], count), (buffer.stride(0), 1))


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether bits are equal, any missing value being as good as another."""
    whole = torch.int32 if a.dtype == torch.float32 else torch.int64
    a, b = a.contiguous(), b.contiguous()
    alike = a.view(whole) == b.view(whole)
    return bool((alike | (a.isnan() & b.isnan())).all())


def _tried(
    parts: tuple[Given, ...], kernel: _Kernel, into: dict[tuple[Any, ...], torch.Tensor], size: int
) -> list[torch.Tensor]:
    """Let the function run over the first ``size`` columns, stores going to ``into``, by the place
    of the tensor; the final carried values of these columns."""
    first = parts[0]
    assert kernel.form is not None
    rows: list[torch.Tensor] = []
    columns: list[torch.Tensor] = []
    numbers: list[float] = []
    for g, places in zip(parts, kernel.form.parts, strict=True):
        rows += [into.get(_place(v), v) for v in (g.inputs[k] for k in places.rows)]
        columns += [column(g.fixed[k], g.shape) for k in places.columns]
        numbers += [number(g.fixed[k]) for k in places.numbers]
    began = [
        c.detach().contiguous() if isinstance(c, torch.Tensor) else None
        for c in first.carried[: first.of.handed]
    ]
    made = [torch.empty(size, dtype=first.dtype, device="cpu") for _ in range(first.of.handed)]
    at, strides = [r.data_ptr() for r in rows], [r.stride(0) for r in rows]
    doubles = pack(f"{len(numbers)}d", *numbers)
    kernel.call(at, strides, columns, began, made, doubles, size=size, whole=False)
    return made


def _shared(size: int, trips: int) -> int:
    """How many threads there are for the columns: torch's, if all trips are work enough."""
    if size * trips < SHARED or size < 2 * LEAST:
        return 1
    threads = min(torch.get_num_threads(), size // LEAST)
    return threads if threads > 1 and _fork() else 1


def _block(size: int, threads: int) -> int:
    """Columns that a thread takes at a time: each twice, if there are enough."""
    if threads == 1:
        return BLOCK
    return min(BLOCK, max(LEAST, -(-size // (128 * threads)) * 64))


@lru_cache(maxsize=1)
def _fork() -> int | None:
    """``GOMP_parallel`` of the OpenMP that torch's own operations run on; None without one."""
    paths: list[str] = []
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
            paths = [line.split(maxsplit=5)[-1].strip() for line in file if "omp" in line]
    except OSError:
        return None
    own = os.path.dirname(os.path.dirname(torch.__file__))
    # of several, the one that came with torch
    for path in sorted(dict.fromkeys(paths), key=lambda p: not p.startswith(own)):
        with suppress(OSError, AttributeError):
            library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
            return ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value
    return None


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
