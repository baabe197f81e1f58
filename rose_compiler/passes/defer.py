"""Late work collected over a loop and computed in one call behind it.

Loop fission: a traced operation whose results only end in stores that nothing in the loop reads is
taken out of the loop. Its inputs are kept, one entry a trip, and joined behind the loop; one call
computes all rows; a second loop over the same trips does the stores. Every draw and every write
keeps its order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import networkx as nx
import torch.fx as fx

from rose_compiler.base.remarks import Blocker
from rose_compiler.ir import bodies, facts
from rose_compiler.ir.deps import Dependences, place, recorded_order, title
from rose_compiler.ir.edges import Edge
from rose_compiler.ir.effects import parse_entry, related
from rose_compiler.ir.program import (
    LoopView,
    is_call,
    is_item,
    is_state,
    is_structure,
    op_of,
)
from rose_compiler.ir.recorded import records
from rose_compiler.ir.rewriter import Rewriter
from rose_compiler.passes.base import Pass, PassContext, context_of, raising
from rose_compiler.passes.fission import Fission, Splitter, batch_rows, rows_known, values_of_trip
from rose_compiler.passes.probing import ask
from rose_compiler.passes.recurrence import is_step, items, result_name, value_graph

_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2}
_NO_GRAD = frozenset({"no_grad", "inference_mode"})


@dataclass(frozen=True)
class Defer(Pass):
    """Compute late traced work of all trips in one call behind the loop."""

    name: ClassVar[str] = "defer"

    def run(self, loop: LoopView, rewrite: Rewriter) -> None:
        values = value_graph(loop)
        steps = [n for n in loop.graph.nodes if is_step(n)]
        needed = {a for s in steps for a in nx.ancestors(values, s)} if steps else set()
        late = [n for n in loop.graph.nodes if _batchable(n) and n not in needed]
        if not steps or not late:
            return
        context = context_of(rewrite)
        found: list[Fission] = []
        for node in late:
            if any(node in f.nodes for f in found):
                continue
            plan = self.plan(loop, node, rewrite.deps, context)
            if not isinstance(plan, Blocker):
                plan = _overwritten([*found, plan], loop, rewrite.deps) or plan
            if isinstance(plan, Blocker):
                rewrite.missed(node, plan)
            else:
                found.append(plan)
        if found and rewrite.spend():
            for plan in found:
                rewrite.applied(
                    plan.batched[0],
                    f"{', '.join(title(n) for n in plan.batched)} computed once for all "
                    f"{plan.trips} trips of {loop.label}",
                )
            Splitter(loop, found, rewrite).run()

    def plan(
        self, loop: LoopView, node: fx.Node, deps: Dependences, context: PassContext
    ) -> Fission | Blocker:
        """What leaves the loop together with ``node``, or why it stays."""
        if not context.options.defer:
            return Blocker("switched-off", "the decision computes late work on every trip")
        if exits := bodies.exits(loop.graph):
            return Blocker("early-exit", f"{loop.label} may stop at {title(exits[0])}")
        if loop.facts.kind != "range":
            return Blocker("unsupported-shape", f"{loop.label} can't be gone through twice")
        trips = deps.scope.iteration[loop.graph].trips or context.trips.get(loop.label)
        if trips is None:
            return Blocker("trip-count-unknown", f"{loop.label} makes any number of trips")
        if trips < 2:
            return Blocker("single-trip", f"{loop.label} makes {trips} trip")
        leaving = _closure(loop, node)
        if isinstance(leaving, Blocker):
            return leaving
        if not context.run_ahead and any(map(raising, leaving)):
            first = next(n for n in map(raising, leaving) if n is not None)
            return Blocker(
                "may-raise",
                f"{title(first)} may raise, and run_ahead=False begins no trip before it is over",
                "run_ahead=True",
                where=tuple(w for w in (place(first),) if w is not None),
            )
        batched = _chained(leaving, node, loop)
        for reason in (
            _held(loop, leaving, batched, deps),
            *(_separable(n, loop, leaving, batched) for n in batched),
            *(_graph_of_grads(n) for n in batched),
        ):
            if reason is not None:
                return reason
        for one in batched:
            rows = batch_rows(one)
            if rows is None:
                return Blocker("not-probed", f"the size of the batch of {title(one)} is not known")
            if reason := ask(context, one, (rows,) * trips):
                return reason
        kept = tuple(dict.fromkeys(_taken(loop, leaving, batched)))
        if any(_bytes(n) is None for n in kept) and context.memory_limit is not None:
            return Blocker("memory-limit", "the size of what would be kept is not known")
        size = trips * sum(_bytes(n) or 0 for n in (*kept, *batched))
        if context.memory_limit is not None and size > context.memory_limit:
            return Blocker(
                "memory-limit", f"{size} bytes would be kept, {context.memory_limit} are allowed"
            )
        for value in kept:
            if value in leaving or rows_known(value) is None:
                return Blocker(
                    "unsupported-shape", f"{title(value)} has no rows to be kept for later"
                )
        return Fission(
            tuple(batched),
            tuple(n for n in leaving if n not in batched and not _picks(n, batched)),
            kept,
            frozenset(n for n in kept if _changes(n, loop, deps)),
            trips,
        )


def _batchable(node: fx.Node) -> bool:
    if not is_call(node) or op_of(node).kind != "graph":
        return False
    signature = op_of(node).signature
    return signature.writes == () and not any(r.startswith("rng:") for r in signature.reads or ())


def _closure(loop: LoopView, node: fx.Node) -> list[fx.Node] | Blocker:
    """A node and everything that uses its value, in program order."""
    found = {node}
    todo = [node]
    while todo:
        for user in todo.pop().users:
            if user.op == "output":
                return Blocker(
                    "carried-dependence", f"{title(node)} makes what the next trip is handed"
                )
            if is_structure(user) or is_step(user) or not (is_call(user) or is_item(user)):
                return Blocker(
                    "unsupported-shape", f"{title(user)} uses the value of {title(node)}"
                )
            if user not in found:
                found.add(user)
                todo.append(user)
    return [n for n in loop.graph.nodes if n in found]


def _picks(node: fx.Node, batched: list[fx.Node]) -> bool:
    return is_item(node) and node.args[0] in batched


def _chained(leaving: list[fx.Node], first: fx.Node, loop: LoopView) -> list[fx.Node]:
    """The traced operations that can be computed for all trips at once, one after the other."""
    batched = [first]
    for node in leaving:
        inside = [n for n in node.all_input_nodes if n in leaving]
        known = all(n in batched or _picks(n, batched) for n in inside)
        if node is not first and known and _batchable(node):
            batched.append(node)
    return batched


def _held(
    loop: LoopView, leaving: list[fx.Node], batched: list[fx.Node], deps: Dependences
) -> Blocker | None:
    """A dependence that would be turned round."""
    out = set(leaving)
    for edge in deps.edges(loop.graph):
        inside, outside = edge.src in out, edge.dst in out
        if inside != outside and _by_copy(edge.src if inside else edge.dst, edge, leaving, deps):
            continue
        if (
            edge.kind == "record"
            and inside
            and (not outside or {edge.src, edge.dst} & set(batched))
        ):
            return Blocker("grad-graph", recorded_order(edge))
        if inside and not outside:
            what = f"{title(edge.dst)} touches {edge.state} behind {title(edge.src)}"
        elif outside and not inside and edge.kind in ("flow", "control"):
            what = f"{title(edge.dst)} reads {edge.state}, which {title(edge.src)} writes"
        elif inside and outside and edge.kind != "value" and {edge.src, edge.dst} & set(batched):
            what = f"{title(edge.src)} and {title(edge.dst)} both touch {edge.state}"
        else:
            continue
        code = "reads-loop-state" if edge.kind == "flow" and outside else "effects-conflict"
        places = tuple(w for w in (place(edge.src), place(edge.dst)) if w)
        return Blocker(code, what, where=places)
    return None


def _by_copy(node: fx.Node, edge: Edge, leaving: list[fx.Node], deps: Dependences) -> bool:
    """Whether a dependence is only there because an input that the loop keeps lies in memory that
    is written: it is kept as a copy, taken where the operation stood."""
    if edge.kind not in ("anti", "flow") or edge.state is None or not is_call(node):
        return False
    signature = op_of(node).signature
    scope = deps.scope
    for text in signature.reads or ():
        entry = parse_entry(text)
        if entry.root not in signature.params:
            return False
        value = node.args[signature.params.index(entry.root)]
        if (
            isinstance(value, fx.Node)
            and is_state(value)
            and related(scope.state(value), edge.state)
        ):
            return False
    if any(e.write and related(e.state, edge.state) for e in deps.effects(node)):
        return False
    names = {
        name
        for value in node.all_input_nodes
        if value not in leaving and not is_state(value)
        for name in (*scope.aliases(value), *(f"%{d.name}" for d in scope.definers(value)))
    }
    inner = {
        name for value in node.all_input_nodes if value in leaving for name in scope.aliases(value)
    }
    return any(related(n, edge.state) for n in names) and not any(
        related(n, edge.state) for n in inner
    )


def _separable(
    node: fx.Node, loop: LoopView, leaving: list[fx.Node], batched: list[fx.Node]
) -> Blocker | None:
    signature = op_of(node).signature
    axes = signature.separable()
    taken = [
        name
        for name, value in zip(signature.params, node.args, strict=True)
        if isinstance(value, fx.Node) and not is_state(value) and value not in loop.captured_params
    ]
    made = ["return.0"] if signature.results == 1 else [result_name(u) for u in items(node)]
    for name in (*taken, *made):
        if axes.get(name) != 0:
            return Blocker(
                "not-proven-separable" if signature.batch is None else "batch-coupling",
                f"nothing says that rows of {name} are computed apart in {title(node)}",
                f"declare it: batch={{{name!r}: 0, ...}}",
            )
    if not any(v not in leaving for v in values_of_trip(node, loop)):
        return (
            None
            if node is not batched[0]
            else Blocker("varies-in-loop", f"{title(node)} takes nothing that the loop makes")
        )
    return None


def _graph_of_grads(node: fx.Node) -> Blocker | None:
    spec = facts.get(node).spec
    graphless = any(c.kind in _NO_GRAD for c in facts.get(node).context)
    if records(node) or (not graphless and (spec is None or spec.requires_grad)):
        return Blocker("grad-graph", f"{title(node)} may build an autograd graph on every trip")
    return None


def _taken(loop: LoopView, leaving: list[fx.Node], batched: list[fx.Node]) -> Iterator[fx.Node]:
    """What the operations that leave take from the loop, and rows of a batch from outside: those
    of one trip, which all trips take."""
    out, outside = set(leaving), set(loop.captured_params)
    for node in batched:
        signature = op_of(node).signature
        axes = signature.separable()
        for name, value in zip(signature.params, node.args, strict=True):
            if value in outside and axes.get(name) == 0:
                yield value  # type: ignore[misc]
    for node in leaving:
        for used in values_of_trip(node, loop):
            if used not in out:
                yield used


def _overwritten(plans: list[Fission], loop: LoopView, deps: Dependences) -> Blocker | None:
    """A write between two reads of a value that is kept once for both."""
    nodes = list(loop.graph.nodes)
    for value in dict.fromkeys(v for plan in plans for v in plan.copied):
        readers = [
            k
            for k, n in enumerate(nodes)
            if value in n.all_input_nodes and any(n in plan.nodes for plan in plans)
        ]
        names = _memory(value, deps)
        for between in nodes[min(readers) : max(readers)]:
            written = (e.state for e in deps.effects(between) if e.write)
            if any(related(state, name) for state in written for name in names):
                return Blocker(
                    "borrowed-buffer",
                    f"{title(between)} writes the memory of `{value.name}`, which is read in front "
                    f"of it and behind",
                )
    return None


def _memory(node: fx.Node, deps: Dependences) -> list[str]:
    """Names of the memory that a value lies in."""
    return [*deps.scope.aliases(node), *(f"%{d.name}" for d in deps.scope.definers(node))]


def _changes(node: fx.Node, loop: LoopView, deps: Dependences) -> bool:
    """Whether a value may be another one once it is used: its memory is written in the loop, or is
    a state's, of which what uses it behind the loop would not count as a reader."""
    if any(not name.startswith("%") for name in deps.scope.aliases(node)):
        return True
    names = _memory(node, deps)
    written = {e.state for n in loop.graph.nodes for e in deps.effects(n) if e.write}
    return any(related(w, n) for w in written for n in names)


def _bytes(node: fx.Node) -> int | None:
    spec = facts.get(node).spec
    if spec is None:
        return None
    parts = spec.items if spec.kind in ("tuple", "dict") else (spec,)
    total = 0
    for part in parts:
        size = _BYTES.get(part.dtype, 1)
        for n in part.shape:
            size *= n
        total += size
    return total
