"""The first epoch of an accumulated gradient, begun while data are still collected.

A loop collects group after group, and an update adds up the gradients of all groups before its
optimizer steps. Until that step the parameters are those that collect, so a group's loss and
backward may run as soon as its own data are complete. The update's body moves into the loop that
collects (loop fusion), one trip later, and collecting the next group runs on a thread beside it;
what records gradients stays on the coordinator, in the order of the groups. Of a loop over epochs
the first trip is taken out in front of it.

Fusion turns no dependence round if nothing of an update's trip has to wait for a later trip of
collecting: that is what the dependences of the fused body are asked, on a copy of the program.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch.fx as fx

from rose_compiler.base.remarks import Blocker, RemarkLog
from rose_compiler.ir import bodies, facts
from rose_compiler.ir.contexts import UNVERSIONED
from rose_compiler.ir.deps import Dependences, place, title
from rose_compiler.ir.edges import takes_part
from rose_compiler.ir.effects import related
from rose_compiler.ir.ops import LOOP
from rose_compiler.ir.program import LoopView, Program, is_call
from rose_compiler.ir.recorded import records
from rose_compiler.ir.rewriter import Rewriter
from rose_compiler.ir.scope import root_of
from rose_compiler.passes.base import Pass, context_of, raising
from rose_compiler.passes.fusion import Fused, Site, fuse, same_trips
from rose_compiler.passes.lanes import why_casts
from rose_compiler.passes.late import write_slots
from rose_compiler.passes.modulo import Modulo
from rose_compiler.passes.overlap import below, beside_of, drains, kinds, why_not
from rose_compiler.passes.place import TRAINING

#: Kinds of operations that go back through a graph.
BACKWARD = frozenset({"backward", "loss"})
_CONTAINERS = frozenset({"builtins.list", "builtins.dict", "builtins.set", "collections.deque"})
#: In the names of states: the gradients of what stands in front.
GRADS = ".grads"


@dataclass(frozen=True)
class Accumulate(Pass):
    """Run the backward of a group beside the collection of the next one."""

    name: ClassVar[str] = "accumulate"

    def run_program(self, program: Program, rewrite: Rewriter) -> None:
        context = context_of(rewrite)
        for site in list(sites(program, rewrite.deps)):
            blocker: Blocker | None = None
            if not context.options.accumulate:
                blocker = Blocker("switched-off", "the decision trains when all is collected")
            elif not context.run_ahead and (first := raising(site.collect)) is not None:
                blocker = Blocker("may-raise", f"run_ahead=False: {title(first)} may raise")
            else:
                blocker = why_not_fused(program, site, rewrite.deps)
            if blocker is not None:
                rewrite.missed(site.update, blocker)
            elif rewrite.spend():
                threads = _threads(site)
                fused = fuse(site, rewrite)
                assert isinstance(fused, Fused)
                _place(fused, threads, rewrite)


def _place(fused: Fused, threads: tuple[int, int], rewrite: Rewriter) -> None:
    """Collecting on a thread, training one trip later on the coordinator."""
    loop = LoopView(fused.loop)
    modulo, lanes = _schedule(fused, rewrite.deps)
    trained = title(next(n for n in fused.update if kinds(n) & BACKWARD))
    rewrite.applied(
        fused.loop,
        f"{trained} of one trip of {loop.label} runs beside the next trip, which collects on lane "
        f"{next(iter(lanes.values()))!r}" + (", in the first epoch" if fused.epochs else ""),
    )
    if not _saves_rows(fused, rewrite.deps):
        for node in fused.update:
            for each in (node, *below(node)):
                modes = facts.get(each).context
                kept = tuple(c for c in modes if c.kind != UNVERSIONED)
                if kept != modes:
                    rewrite.set_facts(each, context=kept)
    rewrite.set_facts(fused.loop, loop=replace(loop.facts, threads=threads[1]))
    for node in lanes:
        if is_call(node, LOOP) and threads[0]:
            known = LoopView(node).facts
            rewrite.set_facts(node, loop=replace(known, threads=threads[0]))
        for inner in below(node):
            if facts.get(inner).slot is not None:  # a thread has no lanes of its own
                rewrite.set_facts(inner, slot=None)
    write_slots(modulo, lanes, rewrite)
    rewrite.program.stage = "scheduled"


def _threads(site: Site) -> tuple[int, int]:
    """Threads of torch's operations that the loops ask for: collecting, and training."""
    of = [LoopView(n).facts.threads for n in (site.collect, site.update, site.behind)]
    return of[0], of[1] or of[2]


def _schedule(fused: Fused, deps: Dependences) -> tuple[Modulo, dict[fx.Node, str]]:
    collect = [n for n in fused.collect if takes_part(n)]
    update = [n for n in fused.update if takes_part(n)]
    where = place(fused.loop)
    lane = f"thread:{fused.loop.name}" if where is None else f"thread:line{where.line}"
    lanes = {n: lane for n in collect if is_call(n)}
    stage = dict.fromkeys(collect, 0) | dict.fromkeys(update, 1)
    edges = tuple(e for e in deps.edges(LoopView(fused.loop).graph) if {e.src, e.dst} <= set(stage))
    return Modulo((*collect, *update), stage, edges), lanes


def _saves_rows(fused: Fused, deps: Dependences) -> bool:
    """Whether the graphs of a trip hold a part of a state, and collecting writes other parts."""
    written = [e.state for n in fused.collect for e in deps.effects(n) if e.write]
    return any(
        not e.write and e.region is not None and any(related(e.state, w) for w in written)
        for node in fused.update
        if kinds(node) & BACKWARD
        for e in deps.effects(node)
    )


def _overwritten(fused: Fused, deps: Dependences) -> Blocker | None:
    """What in an update writes memory that its graph may hold: autograd's own check of that would
    be gone."""
    held = [
        e.state
        for node in fused.update
        if kinds(node) & BACKWARD
        for e in deps.effects(node)
        if not e.write and GRADS not in e.state
    ]
    for node in fused.update:
        for effect in deps.effects(node):
            if not effect.write or GRADS in effect.state or _container(effect.state, deps):
                continue
            if effect.state.startswith("%") or any(related(effect.state, h) for h in held):
                where = (at,) if (at := place(node)) else ()
                return Blocker(
                    "grad-graph",
                    f"{title(node)} writes {effect.state}, which the graph of the loss may hold",
                    where=where,
                )
    return None


def _container(state: str, deps: Dependences) -> bool:
    """Whether a state is a container of the program's: a write to it tells what it holds, and
    changes the memory of nothing."""
    born = (n for n in deps.program.nodes() if n.op == "call_function")
    names = (root_of(state), root_of(state).removeprefix("%"))
    specs = [
        facts.get(n).spec for n in born if facts.get(n).state == names[0] or n.name == names[1]
    ]
    return bool(specs) and all(s is not None and s.type_name in _CONTAINERS for s in specs)


# -- where


def sites(program: Program, deps: Dependences) -> Iterator[Site]:
    """The loops of a program that collect for an update which adds up gradients trip by trip."""
    for graph in list(program.graphs()):
        loops = [n for n in graph.nodes if is_call(n, LOOP)]
        for k, node in enumerate(loops):
            if "step" not in kinds(node) or kinds(node) & TRAINING:
                continue
            behind = next((n for n in loops[k + 1 :] if kinds(n) & TRAINING), None)
            if behind is None or not kinds(behind) & BACKWARD or "step" in kinds(behind):
                continue
            if same_trips(node, behind, deps):
                yield Site(node, behind)
                break
            inner = [n for n in LoopView(behind).graph.nodes if is_call(n, LOOP)]
            found = next((n for n in inner if kinds(n) & BACKWARD), None)
            if found is not None and same_trips(node, found, deps):
                yield Site(node, found, behind)
                break


def accumulates(program: Program) -> bool:
    """Whether a gradient of a program may be accumulated while its data are collected."""
    deps = Dependences(program)
    return any(why_not_fused(program, site, deps) is None for site in sites(program, deps))


def why_not_fused(program: Program, site: Site, deps: Dependences) -> Blocker | None:
    """Why a site's loops stay apart, or None: fused on a copy, that has to keep all dependences."""
    if blocker := _shape(site, deps):
        return blocker
    copy = bodies.copy_program(program)
    there = dict(zip(program.nodes(), copy.nodes(), strict=True))
    epochs = None if site.epochs is None else there[site.epochs]
    moved = Site(there[site.collect], there[site.update], epochs)
    trial = Rewriter(copy, RemarkLog(), Accumulate.name)
    fused = fuse(moved, trial)
    if isinstance(fused, Blocker):
        return fused
    for node in fused.collect:
        if takes_part(node) and is_call(node) and (blocker := why_not(node, trial.deps)):
            return blocker
    if _saves_rows(fused, trial.deps) and (blocker := _overwritten(fused, trial.deps)):
        return blocker
    modulo, lanes = _schedule(fused, trial.deps)
    for edge in modulo.edges:  # the schedule's own question, as the verifier asks it
        before = modulo.stage[edge.src], modulo.position(edge.src)
        after = edge.least + modulo.stage[edge.dst], modulo.position(edge.dst)
        if before >= after:
            return Blocker("unsupported-shape", f"{title(edge.dst)} waits for {title(edge.src)}")
    beside = beside_of(
        modulo, list(lanes), lanes, drains(fused.loop, LoopView(fused.loop).graph, trial.deps)
    )
    if not any(n in fused.update for n in beside):
        return Blocker("no-window", "every loss waits for the collection of the next group")
    return None


def _shape(site: Site, deps: Dependences) -> Blocker | None:
    """What about the loops themselves keeps them apart."""
    collect, update = LoopView(site.collect), LoopView(site.update)
    loops = [collect, update] + ([LoopView(site.epochs)] if site.epochs else [])
    for loop in loops:
        if exits := bodies.exits(loop.graph):
            where = tuple(w for n in exits if (w := place(n)))
            return Blocker("early-exit", f"{loop.label} may stop at {title(exits[0])}", where=where)
        if any(facts.get(n).slot is not None for n in loop.graph.nodes):
            return Blocker("unsupported-shape", f"{loop.label} has lanes of its own already")
    if any(facts.get(n).slot is not None for n in site.collect.graph.nodes):
        return Blocker("unsupported-shape", "what stands around the loops has lanes already")
    if update.facts.wrapper:
        return Blocker("unsupported-shape", f"{update.label} shows its progress by itself")
    if len({facts.get(loop.node).context for loop in loops}) > 1:
        return Blocker("mode-change", f"{collect.label} and {update.label} run under other modes")
    trips = deps.scope.iteration[collect.graph].trips
    if trips is not None and trips < 2:
        return Blocker("single-trip", f"{collect.label} makes {trips} trip")
    if site.epochs is not None:
        epochs = LoopView(site.epochs)
        if not deps.scope.iteration[epochs.graph].trips:
            return Blocker("may-not-run", f"it is not known that {epochs.label} makes a trip")
        if epochs.facts.wrapper:
            return Blocker("unsupported-shape", f"{epochs.label} shows its progress by itself")
    if records(site.collect):
        return Blocker(
            "grad-graph",
            f"{collect.label} records gradients, and would on another thread",
            "`with torch.no_grad():` around what acts",
        )
    return why_casts(site.collect)
