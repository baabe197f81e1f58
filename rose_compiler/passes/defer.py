"""Late work collected over a loop and computed in one call behind it.

Loop fission: a traced operation whose results only end in stores that nothing in the loop reads is
taken out of the loop. Its inputs are kept, one entry a trip, and joined behind the loop; one call
computes all rows; a second loop over the same trips does the stores. Every draw and every write
keeps its order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import networkx as nx
import torch.fx as fx

from rose_compiler.base.remarks import Blocker
from rose_compiler.ir import bodies, facts
from rose_compiler.ir.deps import Dependences, place, title
from rose_compiler.ir.effects import related
from rose_compiler.ir.facts import LoopFacts
from rose_compiler.ir.ops import APPEND, JOIN_ROWS, NEW_LIST, PIECE, SNAPSHOT, SPLIT_ROWS, STATE
from rose_compiler.ir.program import (
    LoopView,
    Value,
    is_call,
    is_item,
    is_state,
    is_structure,
    op_of,
)
from rose_compiler.ir.rewriter import Rewriter
from rose_compiler.passes.base import Pass, PassContext, context_of
from rose_compiler.passes.probing import differs
from rose_compiler.passes.recurrence import is_step, items, result_name, value_graph
from rose_compiler.passes.tiles import with_rows

_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2}
_NO_GRAD = frozenset({"no_grad", "inference_mode"})


@dataclass(frozen=True)
class Fission:
    """What leaves a loop: ``batched`` is computed in one call, ``replayed`` once a trip behind it,
    both in program order; ``kept`` are the values that the loop has to keep for them."""

    batched: tuple[fx.Node, ...] = ()
    replayed: tuple[fx.Node, ...] = ()
    kept: tuple[fx.Node, ...] = ()
    copied: frozenset[fx.Node] = frozenset()
    trips: int = 0

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        return (*self.batched, *self.replayed)


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
        if not context.run_ahead and op_of(node).signature.may_raise:
            return Blocker("may-raise", f"{title(node)} may raise, and run_ahead=False holds")
        leaving = _closure(loop, node)
        if isinstance(leaving, Blocker):
            return leaving
        batched = _chained(leaving, node, loop)
        for reason in (
            _held(loop, leaving, batched, deps),
            *(_separable(n, loop, leaving, batched) for n in batched),
            *(_graph_of_grads(n) for n in batched),
        ):
            if reason is not None:
                return reason
        for one in batched:
            rows = _rows(one)
            if rows is None:
                return Blocker("not-probed", f"the size of the batch of {title(one)} is not known")
            verdict = context.probe(one, (rows,) * trips)
            if reason := differs(one, verdict, (rows,) * trips, context.numerics):
                return reason
        kept = tuple(dict.fromkeys(_taken(loop, leaving)))
        if any(_bytes(n) is None for n in kept) and context.memory_limit is not None:
            return Blocker("memory-limit", "the size of what would be kept is not known")
        size = trips * sum(_bytes(n) or 0 for n in (*kept, *batched))
        if context.memory_limit is not None and size > context.memory_limit:
            return Blocker(
                "memory-limit", f"{size} bytes would be kept, {context.memory_limit} are allowed"
            )
        for value in kept:
            if value in leaving or _rows_known(value) is None:
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
        if node is not first and _batchable(node):
            if all(n in batched or _picks(n, batched) for n in inside):
                batched.append(node)
    return batched


def _held(
    loop: LoopView, leaving: list[fx.Node], batched: list[fx.Node], deps: Dependences
) -> Blocker | None:
    """A dependence that would be turned round."""
    out = set(leaving)
    for edge in deps.edges(loop.graph):
        inside, outside = edge.src in out, edge.dst in out
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
    if not any(v not in leaving for v in _values(node, loop)):
        return (
            None
            if node is not batched[0]
            else Blocker("varies-in-loop", f"{title(node)} takes nothing that the loop makes")
        )
    return None


def _graph_of_grads(node: fx.Node) -> Blocker | None:
    spec = facts.get(node).spec
    graphless = any(c.kind in _NO_GRAD for c in facts.get(node).context)
    if not graphless and (spec is None or spec.requires_grad):
        return Blocker("grad-graph", f"{title(node)} may build an autograd graph on every trip")
    return None


def _values(node: fx.Node, loop: LoopView) -> Iterator[fx.Node]:
    """The values of a trip that an operation takes, the index left out."""
    captured = {*loop.captured_params, loop.index}
    for used in node.all_input_nodes:
        if used not in captured and not is_state(used):
            yield used


def _taken(loop: LoopView, leaving: list[fx.Node]) -> Iterator[fx.Node]:
    """What the operations that leave take from the loop."""
    out = set(leaving)
    for node in leaving:
        for used in _values(node, loop):
            if used not in out:
                yield used


def _changes(node: fx.Node, loop: LoopView, deps: Dependences) -> bool:
    """Whether a value may be another one by the end of the loop: a view, or written in place."""
    if deps.scope.aliases(node):
        return True
    names = [f"%{d.name}" for d in deps.scope.definers(node)]
    written = (e.state for n in loop.graph.nodes for e in deps.effects(n) if e.write)
    return any(related(w, n) for w in written for n in names if w != "*")


def _rows(node: fx.Node) -> int | None:
    """The rows of one trip of an operation's batch."""
    axes = op_of(node).signature.separable()
    for name, value in zip(op_of(node).signature.params, node.args, strict=True):
        if name in axes and isinstance(value, fx.Node) and (n := _rows_known(value)) is not None:
            return n
    return None


def _rows_known(value: fx.Node) -> int | None:
    spec = facts.get(value).spec
    if spec is None or spec.kind not in ("tensor", "array") or not spec.shape:
        return None
    return spec.shape[0]


def _bytes(node: fx.Node) -> int | None:
    spec = facts.get(node).spec
    if spec is None:
        return None
    parts = spec.items if spec.kind == "tuple" else (spec,)
    total = 0
    for part in parts:
        size = _BYTES.get(part.dtype, 1)
        for n in part.shape:
            size *= n
        total += size
    return total


@dataclass
class Splitter:
    """Takes fissions out of one loop; :meth:`run` does all of it."""

    loop: LoopView
    found: list[Fission]
    rewrite: Rewriter
    lists: dict[fx.Node, fx.Node] = field(default_factory=dict)
    whole: dict[fx.Node, fx.Node] = field(default_factory=dict)
    parts: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def run(self) -> None:
        """Keep the inputs, call once behind the loop, then go through the trips again."""
        behind = self.loop.node.next
        order = {n: k for k, n in enumerate(self.loop.graph.nodes)}
        for plan in self.found:
            for value in plan.kept:
                self._keep(value, plan, order)
        for plan in self.found:
            for node in plan.batched:
                self._call(node, behind)
        self._replay(behind, sorted((n for f in self.found for n in f.replayed), key=order.get))
        gone = {n for f in self.found for n in f.nodes}
        for node in reversed(list(self.loop.graph.nodes)):
            if node in gone or (is_item(node) and node.args[0] in gone):
                self.rewrite.erase(node)

    def _keep(self, value: fx.Node, plan: Fission, order: dict[fx.Node, int]) -> None:
        if value in self.lists:
            return
        made = self.rewrite.call(
            NEW_LIST, before=self.loop.node, like=self.loop.node, name=f"kept_{value.name}"
        )
        self.rewrite.set_facts(
            made, state=bodies.fresh_state(self.rewrite.program, f"%{made.name}")
        )
        self.lists[value] = made
        users = [n for n in plan.nodes if value in n.all_input_nodes]
        at = min(users, key=lambda n: order[n])
        entry = value
        if value in plan.copied:
            spec = facts.get(value).spec
            entry = self.rewrite.call(SNAPSHOT, value, before=at, like=at, spec=spec)
        self.rewrite.call(APPEND, made, entry, before=at, like=at)

    def _joined(self, value: fx.Node, behind: fx.Node, like: fx.Node) -> fx.Node:
        if value not in self.whole:
            rows = _rows_known(value)
            trips = next(f.trips for f in self.found if value in f.kept)
            spec = with_rows(facts.get(value).spec, (rows or 0) * trips)
            self.whole[value] = self.rewrite.call(
                JOIN_ROWS, self.lists[value], before=behind, like=like, spec=spec
            )
        return self.whole[value]

    def _call(self, node: fx.Node, behind: fx.Node) -> None:
        args: list[Value] = []
        for used in node.args:
            if isinstance(used, fx.Node) and used in self.lists:
                args.append(self._joined(used, behind, node))
            elif isinstance(used, fx.Node) and used in self.whole:
                args.append(self.whole[used])
            else:
                args.append(self._outside(used, behind))
        trips = next(f.trips for f in self.found if node in f.nodes)
        rows = (_rows(node) or 0) * trips
        spec = with_rows(facts.get(node).spec, rows)
        made = self.rewrite.call(
            op_of(node), *args, before=behind, like=node, name=node.name, spec=spec
        )
        self.whole[node] = made
        for picked in items(node):
            position = picked.args[1]
            assert isinstance(position, int)
            one = self.rewrite.item(made, position)
            self.rewrite.set_facts(one, spec=with_rows(facts.get(picked).spec, rows))
            self.whole[picked] = one

    def _outside(self, used: Value, behind: fx.Node) -> Value:
        if not isinstance(used, fx.Node):
            return used
        if is_call(used, STATE):
            root = self.loop.outer(used.args[0])  # type: ignore[arg-type]
            known = facts.get(used)
            return self.rewrite.call(
                STATE, root, used.args[1], before=behind, name=used.name, state=known.state
            )
        return self.loop.outer(used)

    def _replay(self, behind: fx.Node, nodes: list[fx.Node]) -> None:
        if not nodes:
            return
        for node in nodes:
            for used in _values(node, self.loop):
                if used in nodes or used in self.parts:
                    continue
                rows = self.lists.get(used)
                whole = self._joined(used, behind, node) if rows is not None else self.whole[used]
                counted = rows if rows is not None else next(iter(self.lists.values()))
                self.parts[used] = self.rewrite.call(
                    SPLIT_ROWS, whole, counted, before=behind, like=node, name=f"{used.name}_rows"
                )
        known = self.loop.facts
        label = f"{known.label or self.loop.node.name}_late"
        body = self.rewrite.new_loop(
            before=behind,
            bounds=self.loop.bounds,
            known=LoopFacts("range", label, known.index),
            like=self.loop.node,
        )
        start, _, step = self.loop.bounds
        made: dict[fx.Node, Any] = {self.loop.index: body.index}
        for used, parts in self.parts.items():
            spec = facts.get(used).spec
            made[used] = body.call(PIECE, parts, body.index, start, step, name=used.name, spec=spec)
        for node in nodes:
            if is_item(node):
                made[node] = body.item(made[node.args[0]], node.args[1], node.name)  # type: ignore[index, arg-type]
                continue
            args = [
                made[a] if isinstance(a, fx.Node) and a in made else self._outside(a, behind)
                for a in node.args
            ]
            old = facts.get(node)
            made[node] = body.call(
                op_of(node), *args, like=node, name=node.name, spec=old.spec, alias=old.alias
            )
        body.close()
