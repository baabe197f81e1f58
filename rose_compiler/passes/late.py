"""Work that no step waits for, moved into the shadow of the simulator.

While a step runs on its lane, the coordinator does what hangs off the recurrence: values and
log-probabilities of this trip, stores, rewards and infos of the trip before. What needs a step's
result runs one trip later, so that the next step is under way by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import networkx as nx
import torch.fx as fx

from rose_compiler.base.remarks import Blocker, Remark
from rose_compiler.ir import bodies
from rose_compiler.ir.deps import Dependences, Edge, place, title, why
from rose_compiler.ir.facts import Slot
from rose_compiler.ir.program import LoopView, is_call, is_item, op_of
from rose_compiler.ir.rewriter import Rewriter
from rose_compiler.passes.base import Pass, PassContext, context_of, is_work, raising
from rose_compiler.passes.borrowed import borrowed_edge, lends, own, why_not_copied
from rose_compiler.passes.lanes import lane_of
from rose_compiler.passes.modulo import Modulo, later_stage, schedule
from rose_compiler.passes.recurrence import is_step, value_graph


@dataclass(frozen=True)
class LateWork(Pass):
    """Overlap the trips of a stepping loop: late work runs beside the simulator."""

    name: ClassVar[str] = "late"

    def run(self, loop: LoopView, rewrite: Rewriter) -> None:
        steps = [n for n in loop.graph.nodes if is_step(n)]
        if not steps:
            return
        context = context_of(rewrite)
        found = self.plan(loop, steps, rewrite.deps, context, ignore_borrowed=True)
        if isinstance(found, Blocker):
            rewrite.missed(steps[0], found)
            return
        if not rewrite.spend():
            return
        if own(loop, steps, rewrite):
            found = self.plan(loop, steps, rewrite.deps, context)
            if isinstance(found, Blocker):
                # a value still leads to the simulator's buffers: program order stays
                rewrite.missed(steps[0], found)
                return
        modulo, lanes = found
        self._tell(loop, steps, modulo, rewrite)
        write_slots(modulo, lanes, rewrite)
        rewrite.program.stage = "scheduled"

    def plan(
        self,
        loop: LoopView,
        steps: Sequence[fx.Node],
        deps: Dependences,
        context: PassContext,
        *,
        ignore_borrowed: bool = False,
    ) -> tuple[Modulo, dict[fx.Node, str]] | Blocker:
        """The schedule of a loop's body and the lanes of its steps, or why there is none.

        ``ignore_borrowed`` asks what could be done if no value lay in a simulator's buffers.
        """
        found = staged(loop, steps, deps, context, ignore_borrowed=ignore_borrowed)
        if isinstance(found, Blocker):
            return found
        nodes, edges, stage = found.nodes, found.edges, found.stage
        if not context.run_ahead and (blocker := _raises(nodes, stage, steps)):
            return blocker
        modulo = schedule(nodes, edges, stage, steps)
        beside = [n for s in steps for n in modulo.beside(s)]
        if found.within is not None:
            # what is issued in front of the first step of the next trip is beside nothing
            last = max(map(modulo.position, steps))
            beside = [n for n in beside if modulo.position(n) > last]
        if not any(map(is_work, beside)):
            return found.within or self._held(loop, steps, modulo, deps)
        return modulo, found.lanes

    def _held(
        self, loop: LoopView, steps: Sequence[fx.Node], modulo: Modulo, deps: Dependences
    ) -> Blocker:
        for node, blocker in self._missed(loop, steps, modulo, deps):
            return Blocker(
                blocker.code,
                f"no operation can run beside {title(steps[0])}; {title(node)}: {blocker.why}",
                blocker.allow,
                where=blocker.where,
            )
        return Blocker("no-window", f"every operation of {loop.label} is on the way to its step")

    def _missed(
        self, loop: LoopView, steps: Sequence[fx.Node], modulo: Modulo, deps: Dependences
    ) -> list[tuple[fx.Node, Blocker]]:
        """Late work that something other than a value holds in front of a step."""
        values = value_graph(loop)
        needed = {n for s in steps for n in nx.ancestors(values, s) if s in values}
        last = max(modulo.position(s) for s in steps)
        found = []
        for node in modulo.order[:last]:
            if not is_work(node) or node in needed:
                continue
            for step in steps:
                if blocker := why(deps, node, step, distance=modulo.stage[node]):
                    found.append((node, blocker))
                    break
        return found

    def _tell(
        self, loop: LoopView, steps: Sequence[fx.Node], modulo: Modulo, rewrite: Rewriter
    ) -> None:
        beside: dict[fx.Node, fx.Node] = {}
        for step in steps:
            for node in modulo.beside(step):
                if is_work(node):
                    beside.setdefault(node, step)
        values = value_graph(loop)
        needed = {n for s in steps for n in nx.ancestors(values, s) if s in values}
        late = [n for n in beside if n not in needed]
        rewrite.applied(
            loop.node,
            f"{len(beside)} operations run while {title(steps[0])} is under way, "
            f"{sum(modulo.stage[n] for n in beside)} of them one trip later",
        )
        for node in late:
            when = ", one trip later" if modulo.stage[node] else ""
            where = place(node)
            rewrite.log.add(
                Remark(
                    "applied",
                    self.name,
                    (where,) if where else (),
                    self.name,
                    f"`{op_of(node).name}` runs while the simulator steps{when}",
                )
            )
        for node, blocker in self._missed(loop, steps, modulo, rewrite.deps):
            rewrite.missed(node, blocker)


@dataclass(frozen=True)
class Staged:
    """The operations of a body with their dependences, the stage of each, and the lanes of its
    steps. ``within`` says why a trip has to end before the next begins, if it has to."""

    nodes: list[fx.Node]
    edges: list[Edge]
    stage: dict[fx.Node, int]
    lanes: dict[fx.Node, str]
    within: Blocker | None


def staged(
    loop: LoopView,
    steps: Sequence[fx.Node],
    deps: Dependences,
    context: PassContext,
    *,
    ignore_borrowed: bool = True,
) -> Staged | Blocker:
    """What of a body has to wait for its steps, or why nothing can run beside them.

    ``ignore_borrowed`` asks what it would be if no value lay in a simulator's buffers.
    """
    if context.options.late != "shadow":
        return Blocker("switched-off", "the decision leaves late work where it stands")
    within = _one_at_a_time(loop, deps, context)
    lanes: dict[fx.Node, str] = {}
    for step in steps:
        lane = lane_of(step, deps.scope, context)
        if isinstance(lane, Blocker):
            return lane
        lanes[step] = lane
    edges = list(deps.edges(loop.graph))
    if ignore_borrowed and lends(loop, steps, deps.scope):
        if blocker := why_not_copied(loop, steps, deps):
            return blocker
        edges = [e for e in edges if not borrowed_edge(e, steps)]
    nodes = [n for n in loop.graph.nodes if n.op == "call_function" and _takes_part(n)]
    stage = later_stage(nodes, edges, set() if within else set(steps))
    if blocker := _head_waits(loop, edges, stage):
        return blocker
    edges = [e for e in edges if e.src in stage and e.dst in stage]
    return Staged(nodes, edges, stage, lanes, within)


def write_slots(modulo: Modulo, lanes: dict[fx.Node, str], rewrite: Rewriter) -> None:
    """Give every operation its slot. A pick stands with what it picks from, unless that is on a
    lane: then it waits where it is needed."""
    k = 0
    for node in modulo.order:
        if is_item(node) and node.args[0] not in lanes:
            continue
        rewrite.set_facts(node, slot=Slot(lanes.get(node, ""), modulo.stage[node], k))
        k += 1


def _one_at_a_time(loop: LoopView, deps: Dependences, context: PassContext) -> Blocker | None:
    """Why a trip of a loop has to end before the next begins, if it has to."""
    if exits := bodies.exits(loop.graph):
        return Blocker(
            "early-exit",
            f"{loop.label} may stop at {title(exits[0])}, and nothing past it is begun",
            where=_places(exits),
        )
    trips = context.trips.get(loop.label) or deps.scope.iteration[loop.graph].trips
    if trips is not None and trips < 2:
        return Blocker("single-trip", f"{loop.label} makes {trips} trip")
    return None


def _takes_part(node: fx.Node) -> bool:
    return is_item(node) or not is_call(node) or op_of(node).name != "state"


def _places(nodes: Sequence[fx.Node]) -> tuple:
    return tuple(w for n in nodes if (w := place(n)) is not None)


def _head_waits(loop: LoopView, edges: Sequence[Edge], stage: dict[fx.Node, int]) -> Blocker | None:
    """Taking the next item of an iterator can't be held back until late work has ended."""
    for edge in edges:
        if edge.dst is loop.index and stage.get(edge.src):
            return Blocker(
                "effects-conflict",
                f"the next item of {loop.label} is taken behind {title(edge.src)}: "
                f"both touch {edge.state}",
                where=_places([edge.src]),
            )
    return None


def _raises(
    nodes: Sequence[fx.Node], stage: dict[fx.Node, int], steps: Sequence[fx.Node]
) -> Blocker | None:
    for node in nodes:
        late = stage[node] or node not in steps
        if late and (first := raising(node)) is not None:
            return Blocker(
                "may-raise",
                f"{title(first)} may raise, and run_ahead=False starts no step before it is over",
                "run_ahead=True",
                where=_places([first]),
            )
    return None
