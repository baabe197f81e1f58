"""What graphs may hold: numbers that stay as they are, and are compared before each run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.fx as fx

from rose_compiler.base.remarks import Blocker
from rose_compiler.frontend.changes import Changes
from rose_compiler.frontend.numbers import Number, numbers_read
from rose_compiler.frontend.reachable import hooks_of
from rose_compiler.frontend.record import Record
from rose_compiler.frontend.sizes import Vary
from rose_compiler.frontend.stores import Stores
from rose_compiler.frontend.trace import Traced
from rose_compiler.ir import bodies
from rose_compiler.ir.deps import Dependences, title
from rose_compiler.ir.effects import EVERYTHING
from rose_compiler.ir.ops import BRANCH, LOOP
from rose_compiler.ir.program import Program, is_call, op_of


@dataclass(frozen=True)
class Unsteady(Blocker):
    """A graph would hold a number that changes; a graph of fewer statements may not."""


def hold_numbers(
    program: Program, traced: Traced, at: fx.Node, roots: list[Any], record: Record
) -> Blocker | None:
    """Take note of the numbers that the graph of an operation holds; why it may not hold one of
    them."""
    numbers = numbers_read(traced.mentions, roots, record.names)
    if not numbers:
        return None
    deps = Dependences(program)
    written = {s for graph in program.graphs() for s in written_in(graph, deps)}
    hooked = any(map(hooks_of, record.names.tensors.values()))
    opaque = _opaque(at, deps, hooked)
    asked = opaque is not None or any(each.simulated for each in numbers)
    stores = _stores(program) if asked else None
    for each in numbers:
        if (why := _why_not(each, written, record, stores)) is not None:
            return Unsteady("not-traceable", why)
        if opaque is not None and (stores is None or stores.reach(each, program.objects)):
            why = f"it may read `{each.where}`, and {title(opaque)} may touch anything"
            return Unsteady("not-traceable", why, "say what that touches: rose_compiler.declare")
    record.numbers.extend(numbers)
    return None


def _why_not(
    number: Number, written: set[str], record: Record, stores: Stores | None
) -> str | None:
    if not number.followed:
        return f"there is too much in `{number.where}` to compare before each call"
    changes = any(number.written_by(w) for w in written)
    if number.simulated:  # each step writes the simulator: what of it, the names in its code say
        changes = stores is None or stores.name(number.steps[-1][1])
    if number.where in record.unsteady or changes:
        return f"it may read `{number.where}`, which changes"
    return None


def _opaque(at: fx.Node, deps: Dependences, hooked: bool) -> fx.Node | None:
    """What may touch anything and runs between the begin of a call, where numbers are compared, and
    an operation: in front of it, or in a loop around it. Where tensors are ``hooked``, going
    backward does."""
    inner: fx.Node | None = at
    while inner is not None:
        around = inner.graph in deps.scope.iteration
        for node in inner.graph.nodes:
            if node is inner and not around:
                break
            if (found := _inside(node, deps, hooked)) is not None:
                return found
        inner = deps.scope.owner[inner.graph]
    return None


def _inside(node: fx.Node, deps: Dependences, hooked: bool) -> fx.Node | None:
    """The operation that may touch anything: a node, or one in the loop or branch that it is."""
    anything = any(e.write and e.state == EVERYTHING for e in deps.effects(node))
    if (anything or hooked) and (is_call(node, LOOP) or is_call(node, BRANCH)):
        for graph in bodies.graphs_of(node):
            for each in graph.nodes:
                if (found := _inside(each, deps, hooked)) is not None:
                    return found
    if anything:
        return node
    backward = is_call(node) and "backward" in op_of(node).attributes.get("calls", ())
    return node if hooked and backward else None


def _stores(program: Program) -> Stores | None:
    known = (op.attributes.get("changes") for op in program.ops.by_name.values())
    changes = next((c for c in known if isinstance(c, Changes)), None)
    return None if changes is None else Stores(changes)


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
