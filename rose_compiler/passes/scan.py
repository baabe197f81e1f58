"""Pointwise recurrences over a loop variable, all trips at once.

Advantages, returns and running sums are loops over time whose trips add up to sums and products
element by element. They are recognized by what their statements compute, whatever they are called;
one operation takes the place of the loop.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch.fx as fx

from rose_compiler.base.recurrence import Recurrence
from rose_compiler.base.remarks import Blocker
from rose_compiler.ir import bodies, facts
from rose_compiler.ir.effects import parse_entry
from rose_compiler.ir.ops import STATE, Op, Signature
from rose_compiler.ir.program import LoopView, Value, is_call, is_item, op_of
from rose_compiler.ir.rewriter import Rewriter
from rose_compiler.ir.trips import Trips
from rose_compiler.passes.base import Pass, context_of
from rose_compiler.passes.recurrence import items
from rose_compiler.passes.scan_match import Match, candidate, match


@dataclass(frozen=True)
class Scan(Pass):
    """Compute pointwise recurrences for all trips of their loop at once."""

    name: ClassVar[str] = "scan"

    def run(self, loop: LoopView, rewrite: Rewriter) -> None:
        if not candidate(loop):
            return
        found = match(loop, rewrite.deps, context_of(rewrite).examples)
        bitwise = context_of(rewrite).numerics == "bitwise"
        if isinstance(found, Match) and bitwise and not found.of.exact:
            found = Blocker(
                "not-probed",
                f"{loop.label} computes functions whose last bits may differ for many trips",
                'numerics="close"',
            )
        if isinstance(found, Blocker):
            if loop.carried_init:  # a loop that hands nothing on was hardly meant as one
                rewrite.missed(loop.node, found)
        elif rewrite.spend():
            found = replace(found, of=replace(found.of, bitwise=bitwise))
            try:
                op = _operation(loop, found, rewrite)
            except ValueError as stop:
                rewrite.missed(loop.node, Blocker("unsupported-shape", str(stop)))
                return
            count = len(found.trips if found.of.parts else found.of.trips)
            apart = len(found.trips) - count
            more = f", {apart} more as they stand" if apart else ""
            rewrite.applied(loop.node, f"{count} trips of {loop.label} at once{more}")
            _replace(loop, found, op, rewrite)


def _replace(loop: LoopView, found: Match, op: Op, rewrite: Rewriter) -> None:
    """Put the operation, and the trips at the ends, in the place of the loop."""
    carried: tuple[Value, ...] = loop.carried_init
    computed = found.of.bounds is not None
    before, _, behind = ((), (), ()) if computed or found.of.parts else found.thirds
    for t in before:
        carried = _trip(loop, t, carried, rewrite)
    bounds: tuple[Value, ...] = loop.bounds if computed else ()
    calls = (n for n in loop.graph.nodes if n.op == "call_function")
    like = next(n for n in calls if not is_item(n) and not is_call(n, STATE))
    picked = loop.result(0)
    name = picked.name if picked is not None and len(carried) == 1 else None
    node = rewrite.call(
        op, *carried, *loop.captured, *bounds, before=loop.node, like=like, name=name
    )
    facts.put(node, origin=facts.get(loop.node).origin.stamped(rewrite.pass_name))
    carried = _results(loop, node, rewrite)
    for t in behind:
        carried = _trip(loop, t, carried, rewrite)
    for picked in list(items(loop.node)):
        rewrite.replace(picked, carried[picked.args[1]])  # type: ignore[index]
        rewrite.erase(picked)
    rewrite.erase(loop.node)


def _results(loop: LoopView, node: fx.Node, rewrite: Rewriter) -> tuple[Value, ...]:
    """The final carried values, with the types and memory that the loop's had."""
    made: list[Value] = []
    for k, last in enumerate(loop.carried_next):
        result = node if len(loop.carried_next) == 1 else rewrite.item(node, k)
        picked = loop.result(k)
        known = facts.get(last) if isinstance(last, fx.Node) else facts.Facts()
        alias = facts.get(picked).alias if picked is not None else known.alias
        rewrite.set_facts(
            result, spec=known.spec, alias=tuple(dict.fromkeys((*alias, *known.alias)))
        )
        made.append(result)
    return tuple(made)


def _trip(
    loop: LoopView, index: int, carried: tuple[Value, ...], rewrite: Rewriter
) -> tuple[Value, ...]:
    """One trip as it stands, in front of the loop; the carried values behind it."""
    known: dict[fx.Node, Any] = {loop.index: index}
    known.update(zip(loop.carried, carried, strict=True))
    known.update(zip(loop.captured_params, loop.captured, strict=True))
    for node in loop.graph.nodes:
        if node.op == "call_function":
            known[node] = rewrite.clone(node, known, before=loop.node)
    return tuple(known[v] if isinstance(v, fx.Node) else v for v in loop.carried_next)


def _operation(loop: LoopView, found: Match, rewrite: Rewriter) -> Op:
    """The operation that computes the steady trips, or all where their number was computed or
    those at the ends are recurrences too.

    Raises:
        ValueError: when the body's trips can't be run by themselves.
    """
    trips: range | None = found.trips if found.of.parts else found.thirds[1]
    if found.of.bounds is not None:
        trips = None
    name = rewrite.program.ops.fresh(f"scan_{loop.label}")
    body = bodies.copied(loop.body, rewrite.program, {}, rewrite.pass_name)
    given = [n.name for n in (*loop.carried, *loop.captured_params)]
    params = _names(given if trips is not None else [*given, "start", "stop", "step"])
    named = dict(zip([*loop.carried, *loop.captured_params], params, strict=False))
    reads, writes = _entries(loop, found.of, named, False), _entries(loop, found.of, named, True)
    count = len(loop.carried)
    signature = Signature(name, params, reads, writes, results=count)
    calls = [n for n in loop.graph.nodes if is_call(n) and not is_call(n, STATE)]
    run = Trips(body, trips, count, name) if all(op_of(n).bound for n in calls) else None
    return Op(
        signature,
        run,
        source=found.of.text,
        attributes={"recurrence": found.of},
    )


def _names(wanted: list[str]) -> tuple[str, ...]:
    taken: dict[str, None] = {}
    for stem in wanted:
        name, n = stem, 1
        while name in taken:
            name, n = f"{stem}_{n}", n + 1
        taken[name] = None
    return tuple(taken)


def _entries(
    loop: LoopView, of: Recurrence, named: dict[fx.Node, str], write: bool
) -> tuple[str, ...]:
    """What the body's operations read or write, whole, in names of the new operation."""
    found: dict[str, None] = {}
    for node in loop.graph.nodes:
        if not is_call(node):
            continue
        signature = op_of(node).signature
        given = dict(zip(signature.params, node.args, strict=False))
        for text in (signature.writes if write else signature.reads) or ():
            entry = parse_entry(text)
            if entry.absolute is not None:
                found[f"@{entry.absolute}"] = None
                continue
            outer = given.get(entry.root)
            if isinstance(outer, fx.Node) and outer in named:
                found[named[outer] + (f".{entry.path}" if entry.path else "")] = None
            elif write:  # what a statement before has changed in place, and hands on
                found.update((named[loop.carried[j]], None) for j in of.inplace)
            # what is read of a value of the loop is read by who makes it
    return tuple(found)
