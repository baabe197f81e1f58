"""Lanes for what no other pass has placed, thread counts of loops, and the step to a schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch.fx as fx

from rose_compiler.base.remarks import Blocker
from rose_compiler.ir import bodies, facts
from rose_compiler.ir.deps import title
from rose_compiler.ir.program import LoopView, Program, children, is_call, op_of
from rose_compiler.ir.rewriter import Rewriter
from rose_compiler.passes.base import Pass, context_of, is_work
from rose_compiler.passes.lanes import lane_of
from rose_compiler.passes.late import write_slots
from rose_compiler.passes.modulo import Modulo
from rose_compiler.passes.recurrence import is_step

#: Kinds of calls that train: a loop with one of these in it is no rollout.
TRAINING = frozenset({"backward", "optimizer"})


@dataclass(frozen=True)
class Place(Pass):
    """Give steps a lane where something can run beside them, and loops their thread counts."""

    name: ClassVar[str] = "place"
    required: ClassVar[bool] = True

    def run_program(self, program: Program, rewrite: Rewriter) -> None:
        for loop in program.loops():
            self._lanes(loop, rewrite)
        self._threads(program, rewrite)
        program.stage = "scheduled"

    def _lanes(self, loop: LoopView, rewrite: Rewriter) -> None:
        nodes = [n for n in loop.graph.nodes if n.op == "call_function" and not _is_state_call(n)]
        steps = [n for n in nodes if is_step(n)]
        if not steps or any(facts.get(n).slot is not None for n in nodes):
            return
        edges = tuple(
            e for e in rewrite.deps.edges(loop.graph) if e.src in nodes and e.dst in nodes
        )
        modulo = Modulo(tuple(nodes), dict.fromkeys(nodes, 0), edges)
        lanes = {}
        context = context_of(rewrite)
        exits = bodies.exits(loop.graph)
        for step in steps:
            lane = lane_of(step, rewrite.deps.scope, context)
            # nothing past the end of a trip: without stages the body drains there
            beside = [n for n in modulo.beside(step) if modulo.position(n) > modulo.position(step)]
            if isinstance(lane, str) and not any(map(is_work, beside)):
                lane = Blocker("no-window", "the next operation waits for the step")
            if isinstance(lane, str) and exits:
                lane = Blocker("early-exit", f"{loop.label} may stop at {title(exits[0])}")
            if isinstance(lane, str) and not context.run_ahead:
                lane = Blocker("may-raise", "run_ahead=False starts nothing beside a step")
            if isinstance(lane, Blocker):
                rewrite.missed(step, lane)
            elif rewrite.spend():
                lanes[step] = lane
                rewrite.applied(step, f"runs on lane {lane!r}")
        if not lanes:
            return
        write_slots(modulo, lanes, rewrite)

    def _threads(self, program: Program, rewrite: Rewriter) -> None:
        options = context_of(rewrite).options
        wanted = {"rollout": options.rollout_threads, "update": options.update_threads}
        for loop, kind in purposes(program):
            count = wanted[kind]
            if count is None:
                continue
            if not rewrite.spend():
                return
            rewrite.set_facts(loop.node, loop=replace(loop.facts, threads=count))
            rewrite.applied(loop.node, f"torch uses {count} threads while {loop.label} runs")


def purposes(program: Program) -> Iterator[tuple[LoopView, Literal["rollout", "update"]]]:
    """The outermost loops that either step a simulator or train: those with a thread count."""
    for node in _outermost(program.root.graph):
        kind = _purpose(LoopView(node))
        if kind == "rollout" or kind == "update":
            yield LoopView(node), kind


def _is_state_call(node: fx.Node) -> bool:
    return is_call(node) and op_of(node).name == "state"


def _calls(loop: LoopView) -> set[str]:
    """What the operations in a loop and in its bodies call, by kind."""
    found: set[str] = set()
    for graph in (loop.graph, *(g for g in _below(loop.body))):
        for node in graph.nodes:
            if is_call(node):
                found |= {op_of(node).kind, *op_of(node).attributes.get("calls", ())}
    return found


def _below(module: fx.GraphModule) -> list[fx.Graph]:
    return [g for _, child in children(module) for g in (child.graph, *_below(child))]


def _purpose(loop: LoopView) -> Literal["rollout", "update", "both"] | None:
    """Whether a loop steps a simulator or trains; None if neither, ``"both"`` if both."""
    calls = _calls(loop)
    steps, trains = "step" in calls, bool(calls & TRAINING)
    if steps and trains:
        return "both"
    return "rollout" if steps else "update" if trains else None


def _outermost(graph: fx.Graph) -> Sequence[fx.Node]:
    """The outermost loops with one purpose: a loop that both rolls out and trains is entered."""
    found = []
    for node, child in children(graph.owning_module):  # type: ignore[arg-type]
        if is_call(node) and op_of(node).name == "loop" and _purpose(LoopView(node)) != "both":
            found.append(node)
        else:
            found += _outermost(child.graph)
    return found
