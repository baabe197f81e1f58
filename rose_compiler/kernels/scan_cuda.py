"""Pointwise recurrences on a device: series by torch, chains by one Triton kernel each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rose_compiler.base.recurrence import SAME, Link, Step
from rose_compiler.kernels import scan_triton
from rose_compiler.kernels.functions import FUNCTIONS

if TYPE_CHECKING:
    from rose_compiler.kernels.scan_fit import Given

Tensor = torch.Tensor


def run(given: Given) -> tuple[Tensor, ...]:
    """Compute every trip, store what it stores; the final carried values.

    A chain is folded to ``a * x + b`` first, so the last bits are not those of the loop.
    """
    with torch.no_grad():
        made = _Run(given).run()
    return given.finals(made)


class _Run:
    def __init__(self, given: Given) -> None:
        self.given, self.of = given, given.of
        self.trips = len(given.of.trips)
        self.low = min(given.of.trips)
        self.forward = given.of.step > 0
        self.value: dict[int, Any] = dict(given.fixed)

    def run(self) -> tuple[Tensor | None, ...]:
        of, value = self.of, self.value
        for k, item in enumerate(of.items):
            if item.kind == "row":
                value[k] = self._rows(item.source, item.offset)
        for j, last in enumerate(of.following):
            if of.items[last].kind == "row":
                self._previous(j)
        for step in self.given.order.steps:
            if step.chain >= 0:
                value[step.item] = self._chain(step)
            else:
                item = of.items[step.item]
                value[step.item] = FUNCTIONS[item.function](*(value[a] for a in item.args))
            for j, last in enumerate(of.following):
                if last == step.item:
                    self._previous(j)
        results = tuple(self._final(j) for j in range(of.handed))
        for store in of.stores:
            self._rows(store.source, store.offset).copy_(value[store.value])
        return results

    def _rows(self, source: int, offset: int) -> Tensor:
        start = self.low + offset
        found: Tensor = self.given.inputs[source].detach()[start : start + self.trips]
        return found

    def _previous(self, j: int) -> None:
        """What each trip is handed of a carried value, once it is known what they hand on."""
        for k, item in enumerate(self.of.items):
            if item.kind == "carried" and item.source == j:
                first = self.given.carried[j].detach()[None]
                after = self.value[self.of.following[j]]
                whole = (first, after[:-1]) if self.forward else (after[1:], first)
                self.value[k] = torch.cat(whole)

    def _final(self, j: int) -> Tensor | None:
        last = self.of.following[j]
        if self.given.is_row(j):
            return None
        made: Tensor = self.value[last][-1 if self.forward else 0]
        if j in self.of.inplace:
            self.given.carried[j].copy_(made)
            return self.given.handed[j]
        return made.clone().reshape(self.given.made_shape(j))

    def _chain(self, step: Step) -> Tensor:
        shape = (self.trips, *self.given.shape)
        like = {"dtype": self.given.dtype, "device": self.given.device}
        a, b = torch.ones((), **like), torch.zeros((), **like)  # type: ignore[call-overload]
        reset: Tensor | None = None
        for link in step.links:
            if link.function not in SAME:
                a, b, reset = _folded(link, [self.value[o] for o in link.others], a, b, reset)
        flat = (self.trips, -1)
        series = scan_triton.linear if scan_triton.available() else scan_triton.linear_by_rows
        made = series(
            a.expand(shape).reshape(flat),
            b.expand(shape).reshape(flat),
            self.given.carried[step.chain].detach().reshape(-1),
            reset=None if reset is None else reset.expand(shape).reshape(flat),
            reverse=not self.forward,
        )
        return made.reshape(shape)


def _folded(
    link: Link, others: list[Any], a: Tensor, b: Tensor, reset: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """``a * x + b``, or ``b`` alone where ``reset`` holds, put through one more operation."""
    function, position = link.function, link.position
    other: Any = others[-1] if others else None
    if function == "mul":
        return a * other, b * other, reset
    if function == "truediv":
        return a / other, b / other, reset
    if function == "add":
        return a, b + other, reset
    if function == "sub":
        return (a, b - other, reset) if position == 0 else (-a, other - b, reset)
    if function == "neg":
        return -a, -b, reset
    assert function == "where"
    mask = others[0] if position == 2 else ~others[0]
    chosen = torch.where(mask, other, b)  # type: ignore[arg-type, call-overload, unused-ignore]
    return a, chosen, mask if reset is None else mask | reset
