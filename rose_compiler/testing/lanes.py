"""Random schedules of programs, and emitted code on lanes."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch.fx as fx

from rose_compiler.codegen import emit, load
from rose_compiler.codegen.schedule import acts, source_of
from rose_compiler.codegen.unbound import exits_of
from rose_compiler.ir import facts
from rose_compiler.ir.deps import Dependences
from rose_compiler.ir.facts import Slot
from rose_compiler.ir.program import LoopView, Program, is_call, is_structure
from rose_compiler.passes.stream_work import VIRTUAL, why_not
from rose_compiler.runtime.support import Runtime

LANES = ("", "", "", "thread:a", "thread:b")
STREAMS = ("", "", "stream:a", "stream:b")


def execute(
    program: Program, args: Mapping[str, Any], objects: Mapping[str, Any], runtime: Runtime
) -> Any:
    """Run the emitted code of a program on a runtime."""
    values = [args[n] for n in program.value_params]
    return load(emit(program))(runtime, *values, *(objects[n] for n in program.state_params))


def schedule_at_random(program: Program, seed: int, lanes: Sequence[str] = LANES) -> int:
    """Give the bodies of a program random slots that keep its dependences, on some of ``lanes``;
    the deepest stage."""
    draw = random.Random(seed)
    deps = Dependences(program)
    depth = 0
    bodies: list[tuple[fx.Graph, LoopView | None]] = [(v.graph, v) for v in program.loops()]
    for graph, loop in [*bodies, (program.graph, None)]:
        nodes = [n for n in graph.nodes if acts(n)]
        for _ in range(30):
            slots = _random_slots(draw, nodes, deps, graph, loop, lanes)
            if slots is not None:
                for node, slot in slots.items():
                    facts.put(node, slot=slot)
                    depth = max(depth, slot.stage)
                break
    program.stage = "scheduled"
    return depth


def _random_slots(
    draw: random.Random,
    nodes: list[fx.Node],
    deps: Dependences,
    graph: fx.Graph,
    loop: LoopView | None,
    lanes: Sequence[str],
) -> dict[fx.Node, Slot] | None:
    edges = [
        (source_of(e.src), source_of(e.dst), e.least)
        for e in deps.edges(graph)
        if source_of(e.src) in nodes and source_of(e.dst) in nodes
    ]
    edges = [e for e in edges if e[0] is not e[1] or e[2] > 0]
    spread = loop is not None and loop.facts.kind != "while" and not list(exits_of(loop.body))
    chance = draw.choice((0, 0.1, 0.3)) if spread else 0
    stage: dict[fx.Node, int] = {}
    for node in nodes:
        least = [stage[s] - d for s, t, d in edges if t is node and s in stage]
        stage[node] = max([0, *least]) + (draw.random() < chance)
    before: dict[fx.Node, set[fx.Node]] = {n: set() for n in nodes}
    for src, dst, distance in edges:
        gap = distance + stage[dst] - stage[src]
        if gap < 0 or (gap == 0 and src is dst):
            return None
        if gap == 0:
            before[dst].add(src)
    order: dict[fx.Node, int] = {}
    while len(order) < len(nodes):
        ready = [n for n in nodes if n not in order and before[n] <= set(order)]
        if not ready:
            return None
        order[draw.choice(ready[:4])] = len(order)
    return {n: Slot(_lane(draw, n, lanes, deps), stage[n], 2 * order[n]) for n in nodes}


def _lane(draw: random.Random, node: fx.Node, lanes: Sequence[str], deps: Dependences) -> str:
    if not is_call(node) or is_structure(node):
        return ""
    lane = draw.choice(lanes)
    # a thread may run anything; graphs and their gradients belong to the stream they are made on
    if lane.startswith("stream:") and why_not(node, deps, VIRTUAL) is not None:
        return ""
    return lane
