"""Rules of a scheduled program: where operations run, and when, keeps every dependence.

A node of stage s runs, for trip t of its loop, in emitted trip t + s; within an emitted trip nodes
are issued by their order. A dependence of distance d from ``src`` to ``dst`` holds when
``(stage(src), order(src)) < (d + stage(dst), order(dst))``. Dependences into and out of a loop hold
because it drains before it ends.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch.fx as fx

from rose_compiler.ir import bodies, facts, program
from rose_compiler.ir.casts import under_autocast
from rose_compiler.ir.edges import Edge, takes_part
from rose_compiler.ir.ops import BRANCH, LOOP, SHARD
from rose_compiler.ir.program import is_call, is_item
from rose_compiler.ir.recorded import records, same_graph
from rose_compiler.ir.scope import nodes_in
from rose_compiler.ir.verify_rules import Body, Fault, Rule, Subject

_LANE = re.compile(r"(?P<kind>shard|thread|stream|host):(?P<name>[^\s:]+)")


def _scheduled(subject: Subject) -> Iterator[Body]:
    for body in subject.bodies:
        if any(facts.get(n).slot is not None for n in body.graph.nodes):
            yield body


def _unscheduled(subject: Subject) -> Iterator[Fault]:
    for body in _scheduled(subject):
        yield Fault(f"{body.path} has slots, and the program is not of stage 'scheduled'")


def _free(node: fx.Node) -> bool:
    return not takes_part(node) or is_item(node)


def _complete(subject: Subject) -> Iterator[Fault]:
    for body in _scheduled(subject):
        orders: dict[int, fx.Node] = {}
        for node in body.graph.nodes:
            slot = facts.get(node).slot
            if slot is None:
                if not _free(node):
                    yield Fault(f"{node} has no slot in the scheduled body {body.path}", node)
                continue
            if not takes_part(node) and node.op != "call_function":
                yield Fault(f"{node} can't have a slot", node, "a call", node.op)
            if slot.stage < 0:
                yield Fault(f"the stage of {node}", node, "0 or more", slot.stage)
            if slot.stage and body.graph not in subject.deps.scope.iteration:
                yield Fault(f"{node} outside a loop is put off by trips", node, 0, slot.stage)
            if not _free(node):
                other = orders.setdefault(slot.order, node)
                if other is not node:
                    yield Fault(f"{other} and {node} have the same place {slot.order}", node)


def _lanes(subject: Subject) -> Iterator[Fault]:
    for body in _scheduled(subject):
        for node in body.graph.nodes:
            slot = facts.get(node).slot
            if slot is None or not slot.lane:
                continue
            match = _LANE.fullmatch(slot.lane)
            if match is None:
                expected = '"", "shard:<g>", "thread:<name>", "stream:<name>" or "host:<state>"'
                yield Fault(f"the lane of {node}", node, expected, slot.lane)
            elif match["kind"] == "host" and is_call(node, BRANCH):
                continue  # it is left with calls of a component under way
            elif records(node) and match["kind"] != "thread":
                yield Fault(f"{node} records gradients on a lane", node, "no lane", slot.lane)
            elif records(node) and (other := _torn(subject, node, slot.lane)) is not None:
                what = f"{node} records gradients on a lane, and {other} with it somewhere else"
                yield Fault(what, node, "one lane for both", slot.lane)
            elif _shares_casts(subject, node, match["kind"]):
                yield Fault(f"{node} runs under autocast", node, "no lane", slot.lane)
            elif match["kind"] == "thread" and (is_call(node, LOOP) or is_call(node, BRANCH)):
                yield from _aside(node, slot.lane)
            elif program.is_structure(node) or _free(node):
                yield Fault(f"{node} is no operation a lane can run", node, "no lane", slot.lane)
            elif match["kind"] == "host" and not program.is_hosted(node):
                what = f"{node} is no call of a component in a host"
                yield Fault(what, node, "no lane, or another kind", slot.lane)
            elif match["kind"] == "shard":
                yield from _shard_lane(subject, node, match["name"])


def _shares_casts(subject: Subject, node: fx.Node, kind: str) -> bool:
    """Whether an operation needs the casts of weights that the coordinator's region of autocast
    keeps, or would leave some to it."""
    if kind == "thread":
        simulates = is_call(node) and program.op_of(node).kind in ("step", "reset")
        return under_autocast(node) and not simulates
    return kind == "stream" and subject.deps.casts.keeps(node)


def _torn(subject: Subject, node: fx.Node, lane: str) -> fx.Node | None:
    """What shares a graph of gradients with an operation, and runs on another thread."""
    for other in same_graph(node, subject.deps.edges(node.graph)):
        slot = facts.get(other).slot
        if slot is None or slot.lane != lane:
            return other
    return None


def _aside(node: fx.Node, lane: str) -> Iterator[Fault]:
    """A whole loop or branch runs on a thread as it stands: that thread has no lanes of its own."""
    for graph in bodies.graphs_of(node):
        for inner in graph.nodes:
            if facts.get(inner).slot is not None or program.is_hosted(inner):
                yield Fault(f"{inner} in {node}, which is on a lane, has one", inner, "none", lane)
            if program.is_exit(inner) and is_call(node, BRANCH):
                yield Fault(f"{node} is left by {inner} on a lane", node, "no lane", lane)
            if is_call(inner, LOOP) or is_call(inner, BRANCH):
                yield from _aside(inner, lane)


def _shard_lane(subject: Subject, node: fx.Node, name: str) -> Iterator[Fault]:
    op = program.op_of(node)
    if op.kind != "step":
        yield Fault(f"{op.name!r} is no step, so no shard runs it", node, "a step", op.kind)
        return
    for used in nodes_in(node.args):
        shard = subject.deps.scope.resolve(used)
        if isinstance(shard, fx.Node) and is_call(shard, SHARD):
            names = (str(shard.args[1]), facts.get(shard).state)
            if name not in names:
                yield Fault(f"{node} steps another shard than its lane", node, names, name)


def _modulo(subject: Subject) -> Iterator[Fault]:
    for body in _scheduled(subject):
        times = _times(body.graph)
        for edge in subject.deps.edges(body.graph):
            src, dst = times.get(edge.src), times.get(edge.dst)
            if src is None or dst is None:
                continue
            trips = edge.least
            if src >= (trips + dst[0], *dst[1:]):
                yield Fault(
                    f"{edge.dst} has to wait for {edge.src}: {_because(edge)}",
                    edge.dst,
                    f"behind stage {src[0]}, order {src[1]}",
                    f"stage {dst[0]}, order {dst[1]}" + (f", {trips} trips later" if trips else ""),
                )


def _times(graph: fx.Graph) -> dict[fx.Node, tuple[float, float, int]]:
    """Stage, order and depth of picks; the next item of an iterator comes before all else."""
    found: dict[fx.Node, tuple[float, float, int]] = {}
    for node in graph.nodes:
        slot = facts.get(node).slot
        if node.op == "placeholder":
            found[node] = (0, float("-inf"), 0)
        elif slot is not None:
            found[node] = (slot.stage, slot.order, 0)
        if is_item(node) and isinstance(node.args[0], fx.Node) and node.args[0] in found:
            # a pick stands directly behind what it picks from, unless it has a slot of its own
            stage, order, depth = found.get(node, found[node.args[0]])
            found[node] = (stage, order, depth + 1)
    return found


def _because(edge: Edge) -> str:
    through = f" through {edge.state}" if edge.state else ""
    far = "" if edge.distance == 0 else f", {edge.least} or more trips apart"
    return f"{edge.kind}{through}{far}"


UNSCHEDULED: tuple[Rule, ...] = (
    Rule("unscheduled", "a captured program has no slots", _unscheduled),
)
SCHEDULE: tuple[Rule, ...] = (
    Rule("slots", "every operation of a scheduled body has one place of its own", _complete),
    Rule("lanes", "lanes are known, and can run what is put on them", _lanes),
    Rule("modulo", "the order of stages and places keeps every dependence", _modulo),
)
