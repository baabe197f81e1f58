"""Software pipelining: the trips of a loop overlap over lanes, as a modulo schedule says.

What a trip does is placed on the coordinator and on threads by :mod:`passes.iterative`, from the
dependences of the body with their distances and from what each operation takes. The result is
stages and places, as ``late`` gives them: the verifier holds each dependence against them, and the
emitter makes prologue, steady state and epilogue of them, with values of earlier trips in variables
of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch.fx as fx

from rose_compiler.base.decision import Pipelined
from rose_compiler.base.remarks import Blocker, Remark
from rose_compiler.ir import bodies, facts
from rose_compiler.ir.deps import Dependences, Edge, place, title
from rose_compiler.ir.edges import takes_part
from rose_compiler.ir.facts import Slot
from rose_compiler.ir.keys import loops_by_key
from rose_compiler.ir.program import LoopView, Program, is_hosted, is_item
from rose_compiler.ir.rewriter import Rewriter
from rose_compiler.passes.base import Pass, PassContext, context_of, raising
from rose_compiler.passes.hosts import component
from rose_compiler.passes.iterative import (
    COORDINATOR,
    Hand,
    Least,
    Operation,
    Placement,
    Wait,
    least_interval,
    modulo_schedule,
)
from rose_compiler.passes.lanes import why_not_on_a_thread

#: Microseconds of the coordinator to hand an operation to a thread, and until it begins there: what
#: a hand-over takes on a busy machine, as measured (``python -m bench.overheads``).
HAND = Hand(submit=10, launch=60)
#: The lanes beside the coordinator: threads of these names.
LANE = "thread:pipe{}"
#: What is not at least this many microseconds shorter than program order is no gain.
LEAST_GAIN = 20


@dataclass(frozen=True)
class Work:
    """A loop's body as the scheduler sees it. ``nodes`` has each operation's node by name,
    ``stays`` why the longer ones of the coordinator's can't run on a thread."""

    loop: LoopView
    nodes: dict[str, fx.Node]
    operations: tuple[Operation, ...]
    waits: tuple[Wait, ...]
    edges: tuple[Edge, ...]
    stays: dict[fx.Node, Blocker]

    @property
    def sequential(self) -> int:
        """Microseconds of a trip, one operation after the other."""
        return sum(op.length for op in self.operations)

    def least(self) -> Least:
        """ResMII and RecMII."""
        return least_interval(self.operations, self.waits, HAND)


@dataclass(frozen=True)
class PipelineLoops(Pass):
    """Overlap the trips of the loops that the decision names, over threads."""

    name: ClassVar[str] = "pipeline_loops"

    def run_program(self, program: Program, rewrite: Rewriter) -> None:
        wanted = {one.loop: one for one in context_of(rewrite).options.pipeline}
        if not wanted:
            return
        for key, loop in loops_by_key(program).items():
            if key in wanted:
                self._loop(loop, wanted[key], rewrite)

    def _loop(self, loop: LoopView, wanted: Pipelined, rewrite: Rewriter) -> None:
        found = plan(loop, wanted, rewrite.deps, context_of(rewrite))
        if isinstance(found, Blocker):
            rewrite.missed(loop.node, found)
            return
        work, placed = found
        if not rewrite.spend():
            return
        slots = slots_of(work, placed)
        for node in work.nodes.values():
            if facts.get(node).slot != slots.get(node):
                rewrite.set_facts(node, slot=slots.get(node))
        rewrite.program.stage = "scheduled"
        self._tell(work, placed, rewrite)

    def _tell(self, work: Work, placed: Placement, rewrite: Rewriter) -> None:
        away = {n: lane for n, lane in placed.lane.items() if lane != COORDINATOR}
        lanes = len(set(away.values()))
        rewrite.applied(
            work.loop.node,
            f"trips of {work.loop.label} begin every {placed.interval} µs instead of every "
            f"{work.sequential} µs, on the coordinator and {lanes} more lane{'s' * (lanes != 1)}, "
            f"and spread over {placed.depth + 1}; {told(work, work.least())}",
        )
        for name, lane in away.items():
            node = work.nodes[name]
            stage = placed.stage(name)
            later = f", {stage} trip{'s' * (stage != 1)} later" if stage else ""
            where = place(node)
            why = f"{title(node)} runs on lane {lane!r}{later}"
            at = (where,) if where else ()
            rewrite.log.add(Remark("applied", self.name, at, self.name, why))
        for node, blocker in work.stays.items():
            rewrite.missed(node, blocker)


def plan(
    loop: LoopView, wanted: Pipelined, deps: Dependences, context: PassContext
) -> tuple[Work, Placement] | Blocker:
    """A loop's body and its modulo schedule, or why there is none."""
    found = work_of(loop, wanted, deps, context)
    if isinstance(found, Blocker):
        return found
    least = found.least()
    most = found.sequential - LEAST_GAIN
    if least.ticks > most:
        return nothing_to_gain(found, least)
    placed = modulo_schedule(found.operations, found.waits, HAND, most=most)
    if placed is None:
        return Blocker(
            "predicted-slower",
            f"no schedule of {loop.label} was found that begins a trip sooner than every "
            f"{found.sequential} µs, what one takes; {told(found, least)}",
        )
    if blocker := _broken(found, placed):
        return blocker
    return found, placed


def work_of(
    loop: LoopView, wanted: Pipelined, deps: Dependences, context: PassContext
) -> Work | Blocker:
    """What there is to schedule in a loop's body, or why its trips can't overlap."""
    nodes = [n for n in loop.graph.nodes if takes_part(n)]
    if blocker := _one_at_a_time(loop, nodes, deps, context):
        return blocker
    inside = set(nodes)
    edges = deps.edges(loop.graph)
    # the next item of an iterator is taken without waiting for what runs on lanes
    before_item = {e.src for e in edges if e.dst is loop.index}
    micros = dict(wanted.micros)
    lanes = tuple(LANE.format(k + 1) for k in range(wanted.lanes))
    operations = []
    stays: dict[fx.Node, Blocker] = {}
    for node in nodes:
        length = micros.get(node.name, 0)
        fixed = _own_lane(node, deps, context)
        where: tuple[str, ...] = (COORDINATOR,)
        if node in before_item:
            pass
        elif fixed:
            where = (fixed,)
        elif length > HAND.submit + HAND.launch and not is_item(node):
            blocker = why_not_on_a_thread(node, deps)
            if blocker is None:
                where = (COORDINATOR, *lanes)
            else:
                stays[node] = blocker
        operations.append(Operation(node.name, length, where))
    kept = tuple(e for e in edges if e.src in inside and e.dst in inside)
    nearest: dict[tuple[str, str], int] = {}
    for e in kept:
        if e.src is not e.dst or e.least:
            key = e.src.name, e.dst.name
            nearest[key] = min(e.least, nearest.get(key, e.least))
    waits = tuple(Wait(src, dst, far) for (src, dst), far in nearest.items())
    heads = tuple(e for e in edges if e.dst is loop.index and e.src in inside)
    if all(len(op.lanes) == 1 and op.lanes[0] == COORDINATOR for op in operations):
        for blocker in stays.values():
            return Blocker(
                blocker.code,
                f"no operation of {loop.label} can run on another lane: {blocker.why}",
                blocker.allow,
                where=blocker.where,
            )
        return Blocker(
            "too-small",
            f"no operation of {loop.label} takes longer than handing it to another lane, "
            f"{HAND.submit + HAND.launch} µs",
        )
    return Work(loop, {n.name: n for n in nodes}, tuple(operations), waits, (*kept, *heads), stays)


def slots_of(work: Work, placed: Placement) -> dict[fx.Node, Slot]:
    """Lane, stage and place of every operation. A part of a result stands with the operation that
    makes it, unless that runs on a lane: then it waits where it is scheduled."""
    found: dict[fx.Node, Slot] = {}
    for name in placed.order:
        node = work.nodes[name]
        if not _stands_with(node, placed, work):
            found[node] = Slot(placed.lane[name], placed.stage(name), len(found))
    return found


def _stands_with(node: fx.Node, placed: Placement, work: Work) -> bool:
    """Whether a node is a part of a result that the coordinator makes, and so is there with it."""
    if not is_item(node) or not isinstance(node.args[1], int):
        return False
    source = node.args[0]
    if not isinstance(source, fx.Node) or source.name not in work.nodes:
        return False
    return placed.lane[source.name] == COORDINATOR


def told(work: Work, least: Least) -> str:
    """What bounds the interval, in words, with the user's lines."""
    by = max(least.resources, key=lambda name: least.resources[name], default="")
    if by == COORDINATOR:
        pinned = [op for op in work.operations if op.lanes == (COORDINATOR,) and op.length]
        pinned.sort(key=lambda op: -op.length)
        names = ", ".join(title(work.nodes[op.name]) for op in pinned[:3])
        resource = f"what only the coordinator runs: {names}" if names else "the coordinator"
    elif by in work.nodes:
        resource = f"the longest operation, {title(work.nodes[by])}"
    elif by == "lanes":
        resource = "all work over all lanes"
    else:
        resource = f"lane {by!r}"
    text = f"ResMII {least.res_mii} µs ({resource}), RecMII {least.rec_mii} µs"
    if least.recurrence is None:
        return f"{text} (nothing is handed from trip to trip)"
    return f"{text} ({cycle_told(least.recurrence.names, least.recurrence.distance, work.nodes)})"


def cycle_told(names: Sequence[str], distance: int, nodes: Mapping[str, fx.Node]) -> str:
    """A recurrence by its operations, with the user's lines and the trips it spans."""
    there = dict.fromkeys(title(nodes[n]) for n in names if n in nodes)
    far = f"{distance} trip{'s' * (distance != 1)} later"
    return f"{' -> '.join(there)} -> again {far}"


def nothing_to_gain(work: Work, least: Least) -> Blocker:
    """Why no schedule of a loop is shorter than its trips one after the other."""
    recurrence = least.recurrence
    if recurrence is not None and least.rec_mii > least.res_mii:
        where = [place(work.nodes[n]) for n in recurrence.names]
        return Blocker(
            "carried-dependence",
            f"trips of {work.loop.label} can't begin sooner than every {least.rec_mii} µs, and one "
            f"takes {work.sequential} µs: {told(work, least)}",
            where=tuple(dict.fromkeys(w for w in where if w is not None)),
        )
    return Blocker(
        "resource-full",
        f"trips of {work.loop.label} can't begin sooner than every {least.ticks} µs, and one takes "
        f"{work.sequential} µs: {told(work, least)}",
    )


def _one_at_a_time(
    loop: LoopView, nodes: Sequence[fx.Node], deps: Dependences, context: PassContext
) -> Blocker | None:
    """Why a trip of a loop has to end before the next begins, or None."""
    exits = bodies.exits(loop.graph)
    if exits or loop.facts.kind == "while":
        at = title(exits[0]) if exits else "its own test"
        where = (place(n) for n in exits)
        return Blocker(
            "early-exit",
            f"{loop.label} may stop at {at}, and nothing past it is begun",
            where=tuple(w for w in where if w is not None),
        )
    trips = context.trips.get(loop.label) or deps.scope.iteration[loop.graph].trips
    if trips is not None and trips < 2:
        return Blocker("single-trip", f"{loop.label} makes {trips} trip")
    if context.run_ahead:
        return None
    for node in nodes:
        if (first := raising(node)) is not None:
            return Blocker(
                "may-raise",
                f"{title(first)} may raise, and run_ahead=False begins no trip before it is over",
                "run_ahead=True",
                where=tuple(w for w in (place(first),) if w is not None),
            )
    return None


def _own_lane(node: fx.Node, deps: Dependences, context: PassContext) -> str:
    """The lane that an operation is bound to: that of a component in a host, of a step that is
    asynchronous by itself; empty for the rest."""
    if is_hosted(node) and context.options.hosted:
        return f"host:{component(node, deps)}"
    slot = facts.get(node).slot
    return "" if slot is None else slot.lane


def _broken(work: Work, placed: Placement) -> Blocker | None:
    """A dependence that a schedule does not keep: the verifier asks the same. It can only be one of
    the next item of an iterator, which comes before all that a trip does."""
    slots = slots_of(work, placed)
    times = {n: (slot.stage, slot.order, 0) for n, slot in slots.items()}
    for node in work.nodes.values():
        if node not in times:
            stage, order, depth = times[node.args[0]]  # type: ignore[index]
            times[node] = stage, order, depth + 1
    for edge in work.edges:
        if edge.dst is work.loop.index and placed.stage(edge.src.name) >= edge.least:
            return Blocker(
                "effects-conflict",
                f"the next item of {work.loop.label} is taken behind {title(edge.src)}: both "
                f"touch {edge.state}",
                where=tuple(w for w in (place(edge.src),) if w is not None),
            )
        if edge.dst is work.loop.index:
            continue
        stage, *rest = times[edge.dst]
        if times[edge.src] >= (edge.least + stage, *rest):
            return Blocker(
                "unsupported-shape", f"{title(edge.dst)} would not wait for {title(edge.src)}"
            )
    return None
