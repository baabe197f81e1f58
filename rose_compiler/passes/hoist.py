"""Work that is the same on every trip, moved in front of its loop."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch.fx as fx

from rose_compiler.base.remarks import Blocker
from rose_compiler.ir import bodies, facts
from rose_compiler.ir.deps import Dependences, place, title
from rose_compiler.ir.effects import related
from rose_compiler.ir.invariant import Parts
from rose_compiler.ir.motion import pinned
from rose_compiler.ir.ops import BRANCH, LOOP, STATE, STORES
from rose_compiler.ir.program import LoopView, is_call, is_structure, op_of
from rose_compiler.ir.recorded import records
from rose_compiler.ir.rewriter import Rewriter
from rose_compiler.ir.scope import nodes_in, root_of
from rose_compiler.passes import hoist_parts
from rose_compiler.passes.base import Pass, PassContext, context_of, erased, raising
from rose_compiler.passes.hoist_draws import hoist_draws

#: Types of values that hold no reference to anything else. None: unknown, as in parsed programs.
PLAIN = frozenset({"tensor", "array", "scalar", "none"})
_RAISES = re.compile(r"\b(raise|assert)\b")


@dataclass(frozen=True)
class HoistInvariant(Pass):
    """Move work that is the same on every trip in front of its loop."""

    name: ClassVar[str] = "hoist"

    def run(self, loop: LoopView, rewrite: Rewriter) -> None:
        for node in list(loop.graph.nodes):
            if erased(node) or not candidate(loop, node):
                continue
            blocker = self.why_varies(loop, node, rewrite.deps, context_of(rewrite))
            if blocker is not None:
                rewrite.missed(node, blocker)
            elif rewrite.spend():
                rewrite.applied(node, f"{title(node)} is the same on every trip of {loop.label}")
                rewrite.hoist(node, out_of=loop)
        # draws last: behind one that stands alone, nothing that may raise could leave
        if _trips(loop, rewrite.deps, context_of(rewrite)) != 1:
            self._hoist_parts(loop, rewrite)
        hoist_draws(loop, rewrite)

    def _hoist_parts(self, loop: LoopView, rewrite: Rewriter) -> None:
        for node in list(loop.graph.nodes):
            if not hoist_parts.candidate(node):
                continue
            # all that is the same, or else what of it can't raise
            for whole in (True, False):
                parts = hoist_parts.find(loop, node, rewrite.deps, raising=whole)
                if isinstance(parts, Blocker):
                    rewrite.missed(node, parts)
                if parts is None or isinstance(parts, Blocker) or not rewrite.spend():
                    break
                if self._put_in_front(loop, node, parts, rewrite):
                    break

    def _put_in_front(self, loop: LoopView, node: fx.Node, parts: Parts, rewrite: Rewriter) -> bool:
        call = hoist_parts.put_in_loop(node, parts, rewrite)
        blocker = self.why_varies(loop, call, rewrite.deps, context_of(rewrite))
        blocker = blocker or hoist_parts.overtakes(node, parts)
        if blocker is not None:
            hoist_parts.take_back(call, rewrite)
            rewrite.missed(node, blocker)
            return False
        rewrite.applied(node, hoist_parts.told(loop, node, call))
        moved = rewrite.hoist(call, out_of=loop)
        hoist_parts.hand_over(node, moved, parts, rewrite)
        return True

    def why_varies(
        self, loop: LoopView, node: fx.Node, deps: Dependences, context: PassContext
    ) -> Blocker | None:
        """Why an operation on values from outside the loop has to be done on every trip."""
        signature = op_of(node).signature
        where = tuple(w for w in (place(node),) if w)
        if signature.reads is None or signature.writes is None:
            return Blocker(
                "unknown-effects",
                f"nothing is known of what {title(node)} reads and writes",
                "declare its reads and writes with `rose_compiler.component` or `declare`",
            )
        if records(node):
            return Blocker(
                "grad-graph",
                f"{title(node)} records gradients: one graph for all trips could be gone back "
                "through once, and would add gradients up in another order",
                "`with torch.no_grad():` around it, if no gradient is wanted",
                where=where,
            )
        if held := pinned(deps, node):
            other, _ = held
            return Blocker(
                "reads-loop-state",
                f"{title(node)} reads what {title(other)} writes in {loop.label}",
                where=(*where, *(w for w in (place(other),) if w)),
            )
        if reason := changed_later(loop, node, deps):
            return reason
        if raising(node) is not None:
            first = next((n for n in loop.graph.nodes if _may_leave(n) or n is node), node)
            if first is not node:
                return Blocker(
                    "may-not-run", f"{title(first)} may leave {loop.label} before {title(node)}"
                )
            if not runs(loop, deps, context):
                return Blocker(
                    "may-not-run",
                    f"{loop.label} may make no trip, and {title(node)} may raise",
                    "a number of trips that is known and above zero",
                )
            if (before := seen_before(loop, node, deps)) is not None:
                return Blocker(
                    "may-not-run",
                    f"{title(node)} may raise, and {title(before)} comes before it on a trip",
                    where=(*where, *(w for w in (place(before),) if w)),
                )
        return None


def candidate(loop: LoopView, node: fx.Node) -> bool:
    """Whether a node is an operation on nothing but values from outside the loop."""
    if not is_call(node) or is_call(node, STATE) or is_structure(node):
        return False
    op = op_of(node)
    spec = facts.get(node).spec
    if op.kind in ("step", "builtin") or op.signature.results == 0 or facts.get(node).state:
        return False
    if spec is not None and spec.kind not in PLAIN:
        return False
    if op.signature.writes or any(r.startswith("rng:") for r in op.signature.reads or ()):
        return False
    outside = {*loop.captured_params}
    return all(n in outside or is_call(n, STATE) for n in node.all_input_nodes)


def changed_later(loop: LoopView, node: fx.Node, deps: Dependences) -> Blocker | None:
    """Whether the value is changed in the loop, so that each trip needs one of its own."""
    mine = {f"%{node.name}"}
    for alias in deps.scope.aliases(node):
        mine.add(alias)
    for other in loop.graph.nodes:
        for effect in deps.effects(other):
            if effect.write and effect.state != "*" and any(related(effect.state, m) for m in mine):
                return Blocker(
                    "may-alias",
                    f"{title(other)} writes {effect.state}, where the value of {title(node)} lies",
                    where=tuple(w for w in (place(node), place(other)) if w),
                )
    if _gathered(loop, node):
        return Blocker(
            "retained-instance",
            f"{loop.label} hands on a container that may hold what {title(node)} makes on each "
            "trip",
            where=tuple(w for w in (place(node),) if w),
        )
    unknown = [u for u in node.users if is_call(u) and any(e.state == "*" for e in deps.effects(u))]
    for user in (*unknown, *_keepers(loop.graph, node, deps)):
        return Blocker(
            "retained-instance",
            f"{title(user)} may change or keep the value of {title(node)}",
            where=tuple(w for w in (place(node), place(user)) if w),
        )
    return None


def _gathered(loop: LoopView, node: fx.Node) -> bool:
    """Whether a container that is made anew on every trip, of the one before, may hold the value,
    one a trip: ``kept = (*kept, value)``."""
    handed = [*loop.carried_next, *(v for n in bodies.exits(loop.graph) for v in n.args[1:])]
    todo = [
        value
        for value in nodes_in(handed)
        if (spec := facts.get(value).spec) is not None and spec.kind not in PLAIN
    ]
    seen: set[fx.Node] = set()
    while todo:
        at = todo.pop()
        if at is node:
            return True
        if at in seen or at.op != "call_function":
            continue
        seen.add(at)
        # what these make lies in memory of its own
        if not is_call(at) or op_of(at).kind not in ("step", "graph", "component"):
            todo += at.all_input_nodes
    return False


def _keepers(graph: fx.Graph, node: fx.Node, deps: Dependences) -> Iterator[fx.Node]:
    """The operations of a body that put the value where it stays, one a trip: into a container or
    an object. An attribute holds the last one only."""
    for other in graph.nodes:
        if not is_call(other) or is_call(other, STATE):
            continue
        if is_call(other, LOOP) or is_call(other, BRANCH):
            for inner in bodies.graphs_of(other):
                yield from _keepers(inner, node, deps)
            continue
        op = op_of(other)
        held = () if STORES in op.attributes else op.attributes.get("retains", ())
        kept = {*held, *(value for _, value in op.attributes.get("keeps", ()))}
        args = zip(op.signature.params, other.args, strict=False)
        given = [v for param, arg in args if param in kept for v in nodes_in(arg)]
        if any(node in deps.scope.definers(v) for v in given):
            yield other


def seen_before(loop: LoopView, node: fx.Node, deps: Dependences) -> fx.Node | None:
    """An operation in front of a node on a trip that leaves something when the node raises, or
    that may raise first."""
    private = deps.scope.private(loop.graph)
    for other in loop.graph.nodes:
        if other is node:
            return None
        seen = (e.write and root_of(e.state) not in private for e in deps.effects(other))
        if any(seen) or _raises(other):
            return other
    return None


def _raises(node: fx.Node) -> bool:
    """Whether an operation is there to raise, too: declared, traced with checks, or with a
    ``raise`` or an ``assert``. Statements that only call libraries fail for types and shapes."""
    if not is_call(node) or is_call(node, STATE):
        return False
    if is_structure(node):
        return any(_raises(n) for graph in bodies.graphs_of(node) for n in graph.nodes)
    op = op_of(node)
    told = op.signature.declared or op.body is not None or not op.source
    return raising(node) is not None and (told or any(_RAISES.search(s) for s in op.source))


def _may_leave(node: fx.Node) -> bool:
    if not is_structure(node):
        return False
    if node.args and is_call(node) and op_of(node).name in ("loop", "branch"):
        return any(bodies.exits(g) for g in bodies.graphs_of(node)) and op_of(node).name == "branch"
    return True


def runs(loop: LoopView, deps: Dependences, context: PassContext) -> bool:
    """Whether a loop is known to make at least one trip."""
    trips = _trips(loop, deps, context)
    return trips is not None and trips > 0


def _trips(loop: LoopView, deps: Dependences, context: PassContext) -> int | None:
    """How many trips a loop makes, where that is known."""
    trips = deps.scope.iteration[loop.graph].trips
    return context.trips.get(loop.label) if trips is None else trips
