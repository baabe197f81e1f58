"""Forwards over what a loop collects, taken into that loop, trip by trip.

A frozen reference looks at what was collected, minibatch by minibatch, in a loop behind the one
that collects. Where both make the same trips and a trip of the second reads only what the same trip
of the first has left, one loop of both does the same (loop fusion): the reference's work of a trip
hangs on no later step, and so can run while the simulator steps, as late work.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch.fx as fx

from rose_compiler.base.remarks import Blocker, RemarkLog
from rose_compiler.ir import bodies, facts
from rose_compiler.ir.deps import Dependences, place, title
from rose_compiler.ir.ops import LOOP
from rose_compiler.ir.program import LoopView, Program, is_call
from rose_compiler.ir.recorded import records
from rose_compiler.ir.rewriter import Rewriter
from rose_compiler.passes.base import Pass, context_of, raising
from rose_compiler.passes.fusion import Site, fuse, same_trips
from rose_compiler.passes.overlap import is_heavy, kinds
from rose_compiler.passes.place import TRAINING


@dataclass(frozen=True)
class Interleave(Pass):
    """Take a loop of forwards into the loop in front of it that steps a simulator."""

    name: ClassVar[str] = "interleave"

    def run_program(self, program: Program, rewrite: Rewriter) -> None:
        context = context_of(rewrite)
        kept: set[fx.Node] = set()
        while (site := _next(program, rewrite.deps, kept)) is not None:
            kept.add(site.update)
            blocker: Blocker | None = None
            if not context.options.accumulate:
                blocker = Blocker("switched-off", "the decision leaves it behind the collection")
            elif not context.run_ahead:
                what = f"{title(raising(site.update) or site.update)} in front of a later step"
                blocker = Blocker("may-raise", f"run_ahead=False runs no {what}", "run_ahead=True")
            else:
                blocker = why_not_taken(program, site, rewrite.deps)
            if blocker is not None:
                rewrite.missed(site.update, blocker)
            elif rewrite.spend():
                into, taken = LoopView(site.collect).label, LoopView(site.update).label
                rewrite.applied(site.update, f"{taken} runs trip by trip in {into}")
                fuse(site, rewrite, unversioned=False)
            else:
                return


def _next(program: Program, deps: Dependences, kept: set[fx.Node]) -> Site | None:
    return next((s for s in sites(program, deps) if s.update not in kept), None)


def sites(program: Program, deps: Dependences) -> Iterator[Site]:
    """Loops that step a simulator, each with those behind it that make the same trips and do
    nothing but look at what was collected."""
    for graph in list(program.graphs()):
        loops = [n for n in graph.nodes if is_call(n, LOOP)]
        for k, node in enumerate(loops):
            if "step" not in kinds(node) or kinds(node) & TRAINING:
                continue
            for behind in loops[k + 1 :]:
                if kinds(behind) & TRAINING or "step" in kinds(behind):
                    break
                if is_heavy(behind) and same_trips(node, behind, deps):
                    yield Site(node, behind)


def interleaves(program: Program) -> bool:
    """Whether forwards of a program may run while what they look at is collected."""
    deps = Dependences(program)
    return any(why_not_taken(program, site, deps) is None for site in sites(program, deps))


def why_not_taken(program: Program, site: Site, deps: Dependences) -> Blocker | None:
    """Why a loop stays behind the one that collects, or None: fused on a copy, that has to keep all
    dependences."""
    if blocker := _shape(site, deps):
        return blocker
    copy = bodies.copy_program(program)
    there = dict(zip(program.nodes(), copy.nodes(), strict=True))
    moved = Site(there[site.collect], there[site.update])
    fused = fuse(moved, Rewriter(copy, RemarkLog(), Interleave.name), unversioned=False)
    return fused if isinstance(fused, Blocker) else None


def _shape(site: Site, deps: Dependences) -> Blocker | None:
    """What about the loops themselves keeps them apart."""
    collect, behind = LoopView(site.collect), LoopView(site.update)
    for loop in (collect, behind):
        if exits := bodies.exits(loop.graph):
            where = tuple(w for n in exits if (w := place(n)))
            return Blocker("early-exit", f"{loop.label} may stop at {title(exits[0])}", where=where)
    if behind.facts.wrapper:
        return Blocker("unsupported-shape", f"{behind.label} shows its progress by itself")
    trips = deps.scope.iteration[collect.graph].trips
    if trips is not None and trips < 2:
        return Blocker("single-trip", f"{collect.label} makes {trips} trip")
    if records(site.update) or records(site.collect):
        return Blocker(
            "grad-graph",
            f"{(behind if records(site.update) else collect).label} records gradients, and their "
            "order would be another one",
            "`with torch.no_grad():` around it, if no gradient is wanted",
        )
    if any(facts.get(n).slot is not None for n in collect.graph.nodes):
        return Blocker("unsupported-shape", f"{collect.label} has lanes of its own already")
    return None
