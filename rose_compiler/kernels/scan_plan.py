"""Calls of a compiled recurrence on arguments of a make that it was proven with.

Looking at each argument anew would take longer than the trips of a small batch. What hangs on the
make alone is settled when a plan is made; a call compares makes, addresses and whole numbers, and
hands addresses over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from operator import attrgetter, is_
from struct import pack
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import increment_version

from rose_compiler.base.recurrence import Input, Recurrence
from rose_compiler.kernels import scan_arrays
from rose_compiler.kernels.functions import FUNCTIONS
from rose_compiler.kernels.scan_fit import make_of
from rose_compiler.kernels.scan_memory import stored

if TYPE_CHECKING:
    from rose_compiler.kernels.scan_fit import Given
    from rose_compiler.kernels.scan_source import Places

#: Calls the function with addresses, strides, columns, addresses of first and last values, numbers.
Call = Callable[..., None]

_CPU = torch.device("cpu")


class Plan:
    """One recurrence, its ``parts`` as they fitted, and what the function is handed for each."""

    def __init__(
        self, of: Recurrence, parts: tuple[Given, ...], places: tuple[Places, ...], call: Call
    ) -> None:
        # no arguments are kept: they would live as long as the plan
        self.of, self.places, self.call = of, places, call
        first, last = parts[0], parts[-1]
        self.inputs: dict[Input, int] = {}
        self.at = [[self._index(one) for one in g.of.inputs] for g in parts]
        count = len(self.inputs)
        values, reach = [None] * count, [0] * count
        for g, at in zip(parts, self.at, strict=True):
            for u, value, size in zip(at, g.inputs, g.fit.reach, strict=True):
                values[u], reach[u] = value, size
        self.reach = reach
        self.handed_reach = first.fit.handed[: first.of.handed]
        self.handed = len(first.handed[: first.of.handed])
        self.found = [(one.argument, _path(one)) for one in self.inputs]
        self.makes = [make_of(v) for v in (*values, *first.handed[: self.handed])]
        self.tensors = [k for k, v in enumerate(values) if isinstance(v, torch.Tensor)]
        self.modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self.assumed = sorted(
            {(at[k], n) for g, at in zip(parts, self.at, strict=True) for k, n in g.of.assumed}
        )
        self.named = [named for g in parts for named in g.of.named]
        self._memory(parts, values)
        self.rows = [at[k] for p, at in zip(places, self.at, strict=True) for k in p.rows]
        self.strides = [values[u].stride(0) for u in self.rows]  # type: ignore[attr-defined]
        self.steps = [self._steps(g, at) for g, at in zip(parts, self.at, strict=True)]
        self.shapes = [last.made_shape(j) for j in range(last.of.handed)]
        self.shape, self.dtype = first.fit.shape, first.fit.dtype
        self.stored = sorted(
            {at[s.source] for g, at in zip(parts, self.at, strict=True) for s in g.of.stores}
        )
        self.handed_on = [self._handed_on(j, last.of) for j in range(last.of.handed)]
        self.scalars = [k for k, v in enumerate(values) if not isinstance(v, torch.Tensor)]
        self.direct = self._direct(parts)
        # of the last call, of numbers alone: those among the inputs, and what came of them
        self.packed: tuple[list[Any], bytes] | None = None
        self.known: tuple[int, ...] = ()  # where tensors lay that lie apart

    def _index(self, one: Input) -> int:
        return self.inputs.setdefault(one, len(self.inputs))

    def _memory(self, parts: tuple[Given, ...], values: Sequence[Any]) -> None:
        """Which inputs must lie apart, or in one place as they do now, and which rows are stored,
        in bytes from where their tensor begins."""
        apart: dict[tuple[int, int], None] = {}
        self.same: list[tuple[int, int]] = []
        self.ranges: list[tuple[int, int, int]] = []
        for g, at in zip(parts, self.at, strict=True):
            for s in g.of.stores:
                u = at[s.source]
                begin = values[u].data_ptr()
                low, high = stored(g.of, values[u], s.offset)
                self.ranges.append((u, low - begin, high - begin))
                for v in self.tensors:
                    if v != u and values[v].data_ptr() == begin and v not in at:
                        self.same.append((u, v))
                    elif v != u:
                        apart[u, v] = None
        self.apart = list(apart)

    def _steps(self, g: Given, at: list[int]) -> list[tuple[int, str, Any]]:
        """How the items that are the same on all trips come about: where from, or of what."""
        found: list[tuple[int, str, Any]] = []
        for k in g.fixed:
            item = g.of.items[k]
            if item.kind == "call":
                found.append((k, item.function, item.args))
            elif item.kind == "number":
                found.append((k, "", item.number))
            else:
                found.append((k, "input", at[item.source]))
        return found

    def run(self, args: Sequence[Any]) -> tuple[Any, ...] | None:
        """All trips on these arguments; None, with nothing done, where they are of another make or
        lie otherwise."""
        values = [args[k] if path is None else path(args[k]) for k, path in self.found]
        handed = list(args[: self.handed])
        if self.of.arrays:
            if scan_arrays.strict() or scan_arrays.meets_tensors((*values, *handed)):
                return None
            values, handed = [list(map(scan_arrays.seen, v)) for v in (values, handed)]
        if not _alike((*values, *handed), self.makes):
            return None
        if (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) != self.modes:
            return None
        if any(values[u] != number for u, number in self.assumed):
            return None
        if any(space.get(name) is not number for space, name, number in self.named):
            return None
        begin = [0] * len(values)
        for u in self.tensors:
            begin[u] = values[u].data_ptr()
        first = [c.data_ptr() if isinstance(c, torch.Tensor) else 0 for c in handed]
        places = (*begin, *first)
        if places != self.known:
            if not self._lies_apart(begin, first):
                return None
            self.known = places
        return self._computed(values, handed, begin)

    def computed(self, parts: tuple[Given, ...]) -> tuple[Any, ...]:
        """All trips on the arguments that the parts fitted."""
        values: list[Any] = [None] * len(self.inputs)
        for g, at in zip(parts, self.at, strict=True):
            for u, value in zip(at, g.inputs, strict=True):
                values[u] = value
        handed = list(parts[0].handed[: self.handed])
        begin = [v.data_ptr() if isinstance(v, torch.Tensor) else 0 for v in values]
        return self._computed(values, handed, begin)

    def _lies_apart(self, begin: list[int], first: list[int]) -> bool:
        reach = self.reach
        for u, v in self.apart:
            if begin[u] < begin[v] + reach[v] and begin[v] < begin[u] + reach[u]:
                return False
        if any(begin[u] != begin[v] for u, v in self.same):
            return False
        sizes = self.handed_reach
        for u, low, high in self.ranges:
            for start, size in zip(first, sizes, strict=True):
                if start < begin[u] + high and begin[u] + low < start + size:
                    return False
        for j in self.of.inplace:
            for u in self.tensors:
                if first[j] < begin[u] + reach[u] and begin[u] < first[j] + sizes[j]:
                    return False
            for i, k in combinations(range(len(first)), 2):
                if (
                    j in (i, k)
                    and first[i] < first[k] + sizes[k]
                    and first[k] < first[i] + sizes[i]
                ):
                    return False
        return True

    def _computed(self, values: list[Any], handed: list[Any], begin: list[int]) -> tuple[Any, ...]:
        # nothing here is recorded for gradients: either they are off or no argument asks for one
        columns, numbers = self._same_on_all_trips(values)
        began = [c.contiguous() if isinstance(c, torch.Tensor) else None for c in handed]
        made = [torch.empty(s, dtype=self.dtype, device=_CPU) for s in self.shapes]
        self.call([begin[u] for u in self.rows], self.strides, columns, began, made, numbers)
        if self.stored:
            changed = [values[u] for u in self.stored]
            # autograd's check for changed tensors does not see C write
            increment_version([t for t in changed if not t.is_inference()])
        finals = [self._final(j, handed, made) for j in range(len(made))]
        # as in the loop, under its modes: views that are made without gradients can't be changed
        # later where there are some
        rows = [at and values[at[0]][at[1]] for at in self.handed_on]
        return tuple(f if r is None else r for f, r in zip(finals, rows, strict=True))

    def _direct(self, parts: tuple[Given, ...]) -> list[int] | None:
        """The inputs that are the values by column, where those are inputs as they come and all
        numbers are of numbers; None otherwise."""
        found = []
        for g, places, steps in zip(parts, self.places, self.steps, strict=True):
            of = {k: u for k, function, u in steps if function == "input"}
            if any(isinstance(g.fixed[k], torch.Tensor) for k in places.numbers):
                return None
            if any(k not in of for k in places.columns):
                return None
            found += [of[k] for k in places.columns]
        return found

    def _same_on_all_trips(self, values: list[Any]) -> tuple[list[torch.Tensor], bytes]:
        """Values by column and numbers, the latter as doubles in a row."""
        given = [values[u] for u in self.scalars]
        known = self.packed
        if known is not None and self.direct is not None and all(map(is_, known[0], given)):
            return [column(values[u], self.shape) for u in self.direct], known[1]
        columns: list[torch.Tensor] = []
        numbers: list[float] = []
        for steps, places in zip(self.steps, self.places, strict=True):
            fixed = self._fixed(steps, values)
            columns += [column(fixed[k], self.shape) for k in places.columns]
            numbers += [number(fixed[k]) for k in places.numbers]
        packed = pack(f"{len(numbers)}d", *numbers)
        if self.direct is not None:
            self.packed = given, packed
        return columns, packed

    def _fixed(self, steps: list[tuple[int, str, Any]], values: list[Any]) -> dict[int, Any]:
        fixed: dict[int, Any] = {}
        for k, function, of in steps:
            if function == "input":
                fixed[k] = values[of]
            elif not function:
                fixed[k] = of
            else:
                given = [fixed[a] for a in of]
                if self.of.arrays:
                    fixed[k] = scan_arrays.call(function, given)
                else:
                    fixed[k] = FUNCTIONS[function](*given)
        return fixed

    def _handed_on(self, j: int, of: Recurrence) -> tuple[int, int] | None:
        """Which row of which input a carried value is in the end, if it is one."""
        item = of.items[of.following[j]]
        if item.kind != "row":
            return None
        return self.at[-1][item.source], of.trips[-1] + item.offset

    def _final(self, j: int, handed: list[Any], made: list[Any]) -> Any:
        if j in self.of.inplace:
            handed[j].copy_(made[j].view(handed[j].shape))
            return handed[j]
        return made[j]


def _path(one: Input) -> Callable[[Any], Any] | None:
    """Takes what an input stands for out of its argument; None where it is the argument itself."""
    return attrgetter(".".join(one.path)) if one.path else None


def _alike(values: Sequence[Any], makes: Sequence[tuple[Any, ...]]) -> bool:
    """Whether these are of the makes that :func:`make_of` told. What is asked of each is asked
    until one differs, and no more is made of it: that takes half as long."""
    for value, make in zip(values, makes, strict=True):
        if type(value) is not make[0]:
            return False
        if len(make) == 1:
            continue
        if value.layout is not torch.strided or len(make) == 2:
            if make_of(value) != make:
                return False
            continue
        _, dtype, device, shape, stride, grad, negative, inference = make
        if (
            value.dtype is not dtype
            or value.device != device
            or value.shape != shape
            or value.stride() != stride
            or value.requires_grad is not grad
            or value.is_neg() is not negative
            or value.is_inference() is not inference
        ):
            return False
    return True


def number(value: Any) -> float:
    """A number that is the same on all trips; C rounds it once, as torch does."""
    if type(value) is float:
        return value
    return float(value.item() if isinstance(value, torch.Tensor) else value)


def column(value: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A value by column in one piece."""
    while value.ndim > len(shape) and value.shape[0] == 1:
        value = value[0]
    if value.shape == shape and value.is_contiguous():
        return value
    return value.detach().expand(shape).contiguous()
