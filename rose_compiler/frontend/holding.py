"""What graphs may hold: numbers that stay as they are, and are compared before each run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.fx as fx

from rose_compiler.base.remarks import Blocker
from rose_compiler.frontend.numbers import Number, numbers_read
from rose_compiler.frontend.record import Record
from rose_compiler.frontend.sizes import Vary
from rose_compiler.frontend.trace import Traced
from rose_compiler.ir.deps import Dependences
from rose_compiler.ir.effects import related
from rose_compiler.ir.program import Program


@dataclass(frozen=True)
class Unsteady(Blocker):
    """A graph would hold a number that changes; a graph of fewer statements may not."""


def hold_numbers(
    program: Program, traced: Traced, roots: list[Any], record: Record
) -> Blocker | None:
    """Take note of the numbers that a graph holds; why it may not hold one of them."""
    numbers = numbers_read(traced.mentions, roots, record.names)
    if not numbers:
        return None
    deps = Dependences(program)
    written = {s for graph in program.graphs() for s in written_in(graph, deps)}
    for each in numbers:
        if (why := _why_not(each, written, record)) is not None:
            return Unsteady("not-traceable", why)
    record.numbers.extend(numbers)
    return None


def _why_not(number: Number, written: set[str], record: Record) -> str | None:
    if not number.followed:
        return f"there is too much in `{number.where}` to compare before each call"
    if number.where in record.unsteady or any(related(number.state, w) for w in written):
        return f"it may read `{number.where}`, which changes"
    return None


def draws_fixed(traced: Traced, vary: Vary) -> Blocker | None:
    """Why random numbers of a graph can't be drawn in front of it."""
    if vary == "none" or not traced.draws:
        return None
    return Blocker("not-traceable", "it draws random numbers, and sizes differ from trip to trip")


def written_in(graph: fx.Graph, deps: Dependences) -> set[str]:
    """States that operations of a body write, generators apart."""
    return {
        e.state
        for node in graph.nodes
        for e in deps.effects(node)
        if e.write and not e.state.startswith(("rng:", "*"))
    }
