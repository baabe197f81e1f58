"""Short loops between an observation and its action, or in a loss, become straight statements.

A policy that refines its action in a few steps (a denoising loop) stands as a loop between the
simulator's observation and its next step. Its trips written out one behind the other, the passes
see what each of them computes: they trace it, draw its random numbers whole, and let groups of the
batch go through it apart. A loss that is added up in a few trips becomes one graph with the others.
Program order, and so all that it means, stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.fx as fx

from rose_compiler.base.remarks import RemarkLog
from rose_compiler.frontend.record import Record
from rose_compiler.ir import bodies, facts
from rose_compiler.ir.casts import anew
from rose_compiler.ir.contexts import region_of
from rose_compiler.ir.deps import title
from rose_compiler.ir.ops import BRANCH, LOOP
from rose_compiler.ir.program import (
    LoopView,
    Program,
    Value,
    is_call,
    is_item,
    is_structure,
    op_of,
)
from rose_compiler.ir.recorded import has_graph
from rose_compiler.ir.rewriter import Rewriter

PASS = "unroll"
#: Trips, and operations of all trips together, that are written out at most.
MAX_TRIPS, MAX_OPERATIONS = 16, 256


def unroll(program: Program, record: Record, log: RemarkLog) -> int:
    """Write out short loops that a simulator's step waits for in its own loop; how many there were.

    Copies of an operation count as seen with the values that it was first called with: ``record``
    goes on to fit.
    """
    rewriter = Rewriter(program, log, PASS)
    found = [(inner, "a step") for loop in program.loops() for inner in _between(loop)]
    losses = [inner for graph in program.graphs() for inner in _in_losses(graph, record)]
    known = {inner.node for inner, _ in found}
    found += [(inner, "a backward") for inner in losses if inner.node not in known]
    done = 0
    for inner, end in found:
        if (trips := _trips(inner, record)) is not None:
            rewriter.applied(
                inner.node,
                f"{title(inner.node)} makes {trips} trips on the way to {end}: they are written "
                "out",
            )
            # a loss names its operations, and each stands for one call
            _write_out(inner, rewriter, record, apart=end == "a backward")
            done += 1
    return done


def _in_losses(graph: fx.Graph, record: Record) -> Iterator[LoopView]:
    """The loops of a body that make something with a graph for a ``backward`` in it, or put such
    things into a list for one."""
    ends = [
        n
        for n in graph.nodes
        if is_call(n)
        and op_of(n).kind == "block"
        and "backward" in op_of(n).attributes.get("calls", ())
    ]
    if not ends:
        return
    wanted = _reached(ends, lambda n: n.all_input_nodes)
    last = max(ends)
    for node in graph.nodes:
        if not is_call(node, LOOP) or node > last:
            continue
        view = LoopView(node)
        # a loop that hands on more than a loss is one of its own kind: a rollout, for instance
        used = [u for u in node.users if u.users]  # a last `x` that nobody asks for is left here
        makes = node in wanted and wanted.issuperset(used)
        makes = makes and any(has_graph(facts.get(u).spec) for u in used)
        if (makes or _fills(view, wanted)) and not _repeats(view):
            yield view


def _repeats(loop: LoopView) -> bool:
    """Whether an operation makes the same tensor on every trip: in the loop it can be hoisted,
    written out it would be computed as often as there are trips. A number takes next to no time."""
    varies = {loop.index, *loop.carried}
    for node in loop.graph.nodes:
        if node.op == "call_function" and not varies.isdisjoint(node.all_input_nodes):
            varies.add(node)
        elif is_call(node) and op_of(node).kind == "block" and not _is_number(node):
            return True
    return False


def _is_number(node: fx.Node) -> bool:
    spec = facts.get(node).spec
    return spec is not None and spec.kind == "scalar"


def _fills(loop: LoopView, wanted: set[fx.Node]) -> bool:
    """Whether a loop does nothing but put items into lists that are wanted."""
    lists = {p for p, v in zip(loop.captured_params, loop.captured, strict=True) if v in wanted}
    filling = False
    for node in loop.graph.nodes:
        op = op_of(node) if is_call(node) and not is_structure(node) else None
        if op is None or op.signature.writes == ():
            continue
        items = op.attributes.get("items", ())
        given = dict(zip(op.signature.params, node.args, strict=False))
        if not items or any(given.get(i) not in lists for i in items):
            return False
        filling = True
    return filling


def _between(loop: LoopView) -> Iterator[LoopView]:
    """The loops of a body on the way from what its trips hand on to the action of a step."""
    steps = [n for n in loop.graph.nodes if is_call(n) and op_of(n).kind == "step"]
    if len(steps) != 1:
        return
    before = _reached(steps, lambda n: n.all_input_nodes)
    behind = _reached(list(loop.carried), lambda n: list(n.users))
    for node in loop.graph.nodes:
        if is_call(node, LOOP) and node in before and node in behind:
            yield LoopView(node)


def _reached(start: list[fx.Node], following: Any) -> set[fx.Node]:
    found: set[fx.Node] = set()
    todo = list(start)
    while todo:
        for node in following(todo.pop()):
            if node not in found:
                found.add(node)
                todo.append(node)
    return found


def _trips(loop: LoopView, record: Record) -> int | None:
    """The number of trips of a loop that can be written out; ``None`` for any other."""
    known = loop.facts
    if known.kind != "range" or known.wrapper or known.threads or bodies.exits(loop.graph):
        return None
    if len(loop.bounds) != 3 or any(type(b) is not int for b in loop.bounds):
        return None
    trips = len(range(*loop.bounds))
    inner = [n for n in loop.graph.nodes if n.op == "call_function" and not is_item(n)]
    if not 1 <= trips <= MAX_TRIPS or trips * len(inner) > MAX_OPERATIONS:
        return None
    if any(is_call(n, LOOP) or is_call(n, BRANCH) for n in inner):
        return None
    blocks = [n for n in inner if is_call(n) and op_of(n).kind != "builtin"]
    if any(n not in record.examples or op_of(n).kind == "step" for n in blocks):
        return None
    return trips if all(is_item(u) for u in loop.node.users) else None


def _write_out(loop: LoopView, rewriter: Rewriter, record: Record, *, apart: bool) -> None:
    handed: list[Value] = list(loop.carried_init)
    outer = dict(zip(loop.captured_params, loop.captured, strict=True))
    around = facts.get(loop.node).context
    for number in range(*loop.bounds):
        known: dict[fx.Node, Any] = {loop.index: number, **outer}
        known.update(zip(loop.carried, handed, strict=True))
        regions: dict[int, int] = {}
        for node in list(loop.graph.nodes):
            if node.op == "call_function":
                known[node] = rewriter.clone(node, known, before=loop.node)
                _seen_alike(record, node, known[node])
                if region_of(modes := facts.get(node).context):
                    modes = anew(modes, around, regions, rewriter.program)
                    rewriter.set_facts(known[node], context=modes)
                if apart and is_call(node) and op_of(node).kind == "block":
                    _named_anew(known[node], rewriter)
        handed = [known.get(v, v) if isinstance(v, fx.Node) else v for v in loop.carried_next]
    for picked in list(loop.node.users):
        rewriter.replace(picked, handed[picked.args[1]])  # type: ignore[index]
        rewriter.erase(picked)
    rewriter.erase(loop.node)


def _named_anew(node: fx.Node, rewriter: Rewriter) -> None:
    op = op_of(node)
    name = rewriter.program.ops.fresh(op.name)
    rewriter.retarget(node, op.with_signature(name=name), *node.args)


def _seen_alike(record: Record, node: fx.Node, copy: fx.Node) -> None:
    """What was seen of an operation holds for its copy."""
    tables: list[dict[fx.Node, Any]]
    tables = [record.examples, record.types, record.recorded, record.leaves, record.saved]
    tables.append(record.makes)
    for table in tables:
        if node in table:
            table[copy] = table[node]
    record.counts[copy] = record.counts[node]
