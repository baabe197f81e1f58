"""Hold a schedule to a quota plan: thread counts within the coordinator's cores, and who has none.

Not part of the pipeline: a plan is made from a schedule that has been profiled. It is asked for
with ``compile(..., passes=[*pipeline(), Quota(plan)])``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch.fx as fx

from rose_compiler.base.quota import COORDINATOR, QuotaPlan
from rose_compiler.base.remarks import Blocker
from rose_compiler.ir import facts
from rose_compiler.ir.program import LoopView, Program, children, is_call, op_of
from rose_compiler.ir.rewriter import Rewriter
from rose_compiler.passes.base import Pass, context_of


@dataclass(frozen=True)
class Quota(Pass):
    """Bound torch's threads in loops that drive lanes to the coordinator's cores.

    A lane that the plan leaves out would take what others were given; it is remarked on, and then
    nothing is bounded.
    """

    name: ClassVar[str] = "quota"
    plan: QuotaPlan | None = None

    def run_program(self, program: Program, rewrite: Rewriter) -> None:
        if self.plan is None:
            return
        complete = True
        for node, lane in _lanes(program.root.graph):
            if blocker := self.why_not(lane):
                rewrite.missed(node, blocker)
                complete = False
        if not complete or self.plan.backend != "cores":
            return
        cores = {share.lane: share.units for share in self.plan.shares}.get(COORDINATOR)
        if cores is None:
            return
        for node, threads in _driving(program.root.graph):
            loop = LoopView(node)
            if 0 < threads <= cores:
                continue
            if blocker := self.why_threads_stay(rewrite):
                rewrite.missed(node, blocker)
            elif rewrite.spend():
                rewrite.set_facts(node, loop=replace(loop.facts, threads=cores))
                why = f"torch uses {cores} threads while {loop.label} runs, the coordinator's cores"
                rewrite.applied(node, why)

    def why_not(self, lane: str) -> Blocker | None:
        """Why a lane can't run under the plan, or None."""
        assert self.plan is not None
        if any(share.lane == lane for share in self.plan.shares):
            return None
        named = ", ".join(share.lane for share in self.plan.shares) or "no lane"
        return Blocker(
            "over-committed",
            f"the plan has shares for {named}, and lane {lane!r} would run on what they were given",
            "a plan for this schedule: `compiled.quota_plan`",
        )

    def why_threads_stay(self, rewrite: Rewriter) -> Blocker | None:
        """Why thread counts can't be bounded, or None."""
        if context_of(rewrite).numerics == "bitwise":
            return Blocker(
                "switched-off",
                'numerics="bitwise" keeps the thread counts of eager execution: sums hang on them',
                'numerics="close"',
            )
        return None


def _lanes(graph: fx.Graph) -> Iterator[tuple[fx.Node, str]]:
    """The first operation of each lane beside the coordinator's, bodies included."""
    seen: set[str] = set()
    for node in _nodes(graph):
        slot = facts.get(node).slot
        if slot is not None and slot.lane and slot.lane not in (COORDINATOR, *seen):
            seen.add(slot.lane)
            yield node, slot.lane


def _nodes(graph: fx.Graph) -> Iterator[fx.Node]:
    yield from graph.nodes
    if graph.owning_module is not None:
        for _, child in children(graph.owning_module):
            yield from _nodes(child.graph)


def _driving(graph: fx.Graph, threads: int = 0) -> Iterator[tuple[fx.Node, int]]:
    """The loops that hand operations of their own body to lanes, and the threads in force there.

    Those are the loop's own, or of the loop around it that says how many.
    """
    if graph.owning_module is None:
        return
    for node, child in children(graph.owning_module):
        is_loop = is_call(node) and op_of(node).name == "loop"
        own = (LoopView(node).facts.threads if is_loop else 0) or threads
        yield from _driving(child.graph, own)
        slots = [facts.get(n).slot for n in child.graph.nodes]
        handed = any(slot.lane not in ("", COORDINATOR) for slot in slots if slot is not None)
        if handed and is_loop:
            yield node, own
