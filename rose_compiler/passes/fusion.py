"""Makes one loop of a loop that collects and of the one that trains on what was collected.

Loop fusion, with the first trip of a loop over epochs taken out in front (peeling). What it would
turn round comes back as a blocker: the dependences of the fused body are asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.fx as fx

from rose_compiler.base.remarks import Blocker
from rose_compiler.ir import bodies, facts
from rose_compiler.ir.contexts import UNVERSIONED
from rose_compiler.ir.deps import Dependences, Edge, place, title
from rose_compiler.ir.edges import takes_part
from rose_compiler.ir.effects import EVERYTHING
from rose_compiler.ir.facts import Context
from rose_compiler.ir.ops import BRANCH, LOOP, STATE
from rose_compiler.ir.program import LoopView, is_call, is_item, output_node
from rose_compiler.ir.rewriter import Rewriter
from rose_compiler.passes.overlap import kinds
from rose_compiler.passes.same import same_value


@dataclass(frozen=True)
class Site:
    """A loop that collects, the one behind it that trains on what was collected, and the loop over
    epochs around that, if there is one."""

    collect: fx.Node
    update: fx.Node
    epochs: fx.Node | None = None

    @property
    def behind(self) -> fx.Node:
        """What stands in the body of the loop that collects."""
        return self.update if self.epochs is None else self.epochs


@dataclass(frozen=True)
class Fused:
    """The one loop that is left, and the operations of its body that collect and that train."""

    loop: fx.Node
    collect: tuple[fx.Node, ...]
    update: tuple[fx.Node, ...]
    epochs: fx.Node | None


def same_trips(a: fx.Node, b: fx.Node, deps: Dependences) -> bool:
    """Whether two loops make the same trips."""
    one, other = LoopView(a), LoopView(b)
    if {one.facts.kind, other.facts.kind} != {"range"} or len(one.bounds) != len(other.bounds):
        return False
    pairs = zip(one.bounds, other.bounds, strict=True)
    return all(same_value(x, y, deps) for x, y in pairs)


def fuse(site: Site, rewrite: Rewriter, *, unversioned: bool = True) -> Fused | Blocker:
    """Make one loop of both, or say which dependence that would turn round. The program is left
    half changed then. ``unversioned``: graphs of the second loop save without versions."""
    update = site.update if site.epochs is None else _peel(site.epochs, site.update, rewrite)
    found = _clear(site.collect, update, rewrite)
    if isinstance(found, Blocker):
        return found
    for loop in found:
        made = _join(site.collect, loop, rewrite)
        if isinstance(made, Blocker):
            return made
    collect = tuple(n for n in LoopView(site.collect).graph.nodes if n.op == "call_function")
    if unversioned:
        _unversioned(update, rewrite)
    made = _join(site.collect, update, rewrite)
    if isinstance(made, Blocker):
        return made
    return Fused(site.collect, collect, made, site.epochs)


def _unversioned(loop: fx.Node, rewrite: Rewriter) -> None:
    """Let the graphs of a loop's trips save without versions: rows are written beside them."""
    todo = [LoopView(loop).graph]
    while todo:
        for node in todo.pop().nodes:
            if is_call(node) and not is_call(node, STATE):
                known = facts.get(node).context
                rewrite.set_facts(node, context=(*known, Context(UNVERSIONED)))
                if is_call(node, LOOP) or is_call(node, BRANCH):
                    todo += bodies.graphs_of(node)


def _peel(epochs: fx.Node, update: fx.Node, rewrite: Rewriter) -> fx.Node:
    """Take the first trip of a loop out in front of it; the copy of ``update`` there."""
    loop = LoopView(epochs)
    start, stop, step = loop.bounds
    assert isinstance(start, int)
    assert isinstance(stop, int)
    assert isinstance(step, int)
    made: dict[fx.Node, object] = {loop.index: start}
    made.update(zip(loop.carried, loop.carried_init, strict=True))
    made.update(zip(loop.captured_params, loop.captured, strict=True))
    for node in [n for n in loop.graph.nodes if n.op == "call_function"]:
        made[node] = rewrite.clone(node, made, before=epochs)
    first = tuple(made.get(v, v) if isinstance(v, fx.Node) else v for v in loop.carried_next)
    if len(range(start, stop, step)) > 1:
        rewrite.begin(epochs, (start + step, stop, step), first)
    else:
        for pick in [u for u in epochs.users if is_item(u)]:
            rewrite.replace(pick, first[pick.args[1]])  # type: ignore[index]
            rewrite.erase(pick)
        rewrite.erase(epochs)
    found = made[update]
    assert isinstance(found, fx.Node)
    return found


def _clear(collect: fx.Node, update: fx.Node, rewrite: Rewriter) -> list[fx.Node] | Blocker:
    """Move what stands between two loops in front of the first or behind the second. What fits
    neither place is a loop of the same trips, to be fused too, or in the way."""
    nodes = list(collect.graph.nodes)
    between = nodes[nodes.index(collect) + 1 : nodes.index(update)]
    edges = [e for e in rewrite.deps.edges(collect.graph) if e.applies(0)]
    waits: dict[fx.Node, list[Edge]] = {}
    for edge in edges:
        waits.setdefault(edge.dst, []).append(edge)
    front = [n for n in between if is_call(n, STATE)]
    behind: list[fx.Node] = [collect]
    for node in between:
        if not takes_part(node):
            continue
        if "clock" in kinds(node):
            return _timed(collect, update, node)
        if any(e.src in behind for e in waits.get(node, ())):
            behind.append(node)
        else:
            front.append(node)
    # what the update waits for among those that wait for the collection
    held = [update]
    for node in reversed(behind[1:]):
        if any(e.src is node for n in held for e in waits.get(n, ())):
            held.append(node)
    joined = list(reversed(held[1:]))
    for node in joined:
        fits = is_call(node, LOOP) and same_trips(collect, node, rewrite.deps)
        if not fits or bodies.exits(LoopView(node).graph) or LoopView(node).facts.wrapper:
            return _coupled(collect, update, node, rewrite.deps)
    for edge in waits.get(update, ()):
        if edge.src is collect and edge.kind == "value":
            return Blocker(
                "value-dependence",
                f"{title(update)} uses what {title(collect)} hands on when all is collected",
            )
    for node in front:
        rewrite.move(node, before=collect)
    for node in reversed([n for n in behind[1:] if n not in joined]):
        rewrite.move(node, after=update)  # the last first: it may wait for those in front of it
    return joined


def _timed(collect: fx.Node, update: fx.Node, node: fx.Node) -> Blocker:
    """Why a reading of the clock keeps the loops around it apart."""
    return Blocker(
        "effects-conflict",
        f"{title(node)} tells how long {title(collect)} takes, and would stand in front of it or "
        f"behind {title(update)}",
        "one reading in front of both loops and one behind them",
        where=(at,) if (at := place(node)) else (),
    )


def _coupled(collect: fx.Node, update: fx.Node, node: fx.Node, deps: Dependences) -> Blocker:
    """Why something between the loops keeps every loss behind the whole collection."""
    where = (at,) if (at := place(node)) else ()
    if any(e.state == EVERYTHING for e in deps.effects(node)):
        return Blocker(
            "unknown-effects",
            f"nothing is known of what {title(node)} reads and writes, between {title(collect)} "
            f"and {title(update)}",
            "declare its reads and writes with `rose_compiler.component` or `declare`",
            where=where,
        )
    return Blocker(
        "whole-collection",
        f"{title(update)} uses what {title(node)} makes of all that {title(collect)} collects",
        "the same for each group by itself, in the loop that collects it (this changes training)",
        where=where,
    )


def _join(collect: fx.Node, behind: fx.Node, rewrite: Rewriter) -> tuple[fx.Node, ...] | Blocker:
    """Put the body of a loop behind that of another one of the same trips; its operations there."""
    into, loop = LoopView(collect), LoopView(behind)
    if any(v in loop.carried and v is not p for p, v in zip(loop.carried, loop.carried_next)):  # noqa: B905
        return Blocker("unsupported-shape", f"{loop.label} hands values on from one to another")
    earlier = {n for n in into.graph.nodes if n.op == "call_function"}
    made: dict[fx.Node, object] = {loop.index: into.index}
    made.update(zip(loop.captured_params, loop.captured, strict=True))
    finals: list[fx.Node] = []
    for param, init in zip(loop.carried, loop.carried_init, strict=True):
        held, final = rewrite.add_carried(collect, init, lambda p: p, name=param.name)
        facts.put(held, spec=facts.get(param).spec)
        made[param] = held
        finals.append(final)
    for node in [n for n in loop.graph.nodes if n.op == "call_function"]:
        made[node] = rewrite.clone(node, made, before=output_node(into.graph))
    for param, value in zip(loop.carried, loop.carried_next, strict=True):
        if value is not param:
            new = made[value] if isinstance(value, fx.Node) else value
            rewrite.replace(made[param], new, users=[output_node(into.graph)])  # type: ignore[arg-type]
    for pick in [u for u in behind.users if is_item(u)]:
        rewrite.replace(pick, finals[pick.args[1]])  # type: ignore[index]
        rewrite.erase(pick)
    rewrite.erase(behind)
    later = tuple(n for n in into.graph.nodes if n.op == "call_function" and n not in earlier)
    edges = rewrite.deps.edges(into.graph)
    turned = [e for e in edges if e.src in later and e.dst in earlier]
    return _turned(turned, rewrite.deps) or later


def _turned(edges: Sequence[Edge], deps: Dependences) -> Blocker | None:
    """Why a group's loss has to wait for the collection of later groups, if it has to."""
    if not edges:
        return None

    def weight(edge: Edge) -> int:
        # what tells most: the unknown, then draws, then what is written by training
        unknown = any(e.state == EVERYTHING for n in edge[:2] for e in deps.effects(n))
        drawn = (edge.state or "").startswith("rng:")
        return 0 if unknown else 1 if drawn else 2 if edge.kind != "anti" else 3

    edge = min(edges, key=weight)
    where = tuple(dict.fromkeys(w for n in edge[:2] if (w := place(n))))
    src, dst = title(edge.src), title(edge.dst)
    kind = weight(edge)
    if kind == 0:
        return Blocker(
            "unknown-effects",
            f"nothing is known of what {src} or {dst} reads and writes",
            "declare its reads and writes with `rose_compiler.component` or `declare`",
            where=where,
        )
    if kind == 1:
        return Blocker(
            "draw-order",
            f"{src} and {dst}, for a later group, draw from {edge.state}",
            "a generator of its own for one of them (this changes the numbers)",
            where=where,
        )
    if edge.kind == "flow" and any(p in (edge.state or "") for p in (".params", ".buffers")):
        return Blocker(
            "parameters-change",
            f"{src} changes {edge.state}, which {dst} of a later group reads",
            "one step of the optimizer behind all groups (this changes training)",
            where=where,
        )
    if edge.kind == "anti":
        return Blocker(
            "incomplete-group",
            f"{src} may read of {edge.state} what {dst} collects on a later trip",
            "data of a group in rows of their own, indexed by the group",
            where=where,
        )
    return Blocker(
        "effects-conflict", f"{src} and {dst} of a later group touch {edge.state}", where=where
    )
