"""Device work on streams of its own: what a chain of steps or updates does not wait for.

On a device each stream runs its kernels in order, and the coordinator only queues them. With one
stream, a critic that nobody needs before the update stands in the way of the next step. Here it
gets a lane ``stream:<name>``, whose kernels the device runs beside those of the coordinator's
stream; what crosses lanes waits on an event, never the coordinator itself. Three things qualify:

* in a loop, what its heaviest recurrence does not lead through (values and log-probabilities beside
  simulator and policy), cut off its traced graph where it is a part of one;
* in any body, what lies off the longest path of one trip (log-probabilities of a reference model
  beside those of the policy);
* in a loop that advances a simulator in groups of shards, what belongs to one group.

A stream takes up what is issued behind all that the coordinator's own stream was given before. So
such work is issued as soon as its inputs are, and what needs its results as late as possible.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch.fx as fx

from rose_compiler.base.remarks import Blocker
from rose_compiler.ir import facts
from rose_compiler.ir.deps import Dependences, Edge, place, title
from rose_compiler.ir.ops import LOOP, STATE
from rose_compiler.ir.program import LoopView, Program, children, is_call, is_item, op_of
from rose_compiler.ir.rewriter import Rewriter
from rose_compiler.ir.slice import Split as Sliced
from rose_compiler.passes.base import Pass, PassContext, context_of
from rose_compiler.passes.late import write_slots
from rose_compiler.passes.modulo import Modulo
from rose_compiler.passes.overlap import drains, leading_to
from rose_compiler.passes.recurrence import is_step
from rose_compiler.passes.split import Split, apply
from rose_compiler.passes.stream_work import (
    WORTH,
    by_group,
    cycle,
    groups,
    longest_path,
    source,
    untied,
    weight,
    weight_of,
    why_not,
)

#: Streams of one body beside the coordinator's, those of groups of shards apart.
MOST = 3


@dataclass(frozen=True)
class Body:
    """One body, and the operations that already have a place in it."""

    owner: fx.Node | None
    graph: fx.Graph
    deps: Dependences
    device: str
    nodes: tuple[fx.Node, ...]
    edges: tuple[Edge, ...]
    placed: dict[fx.Node, facts.Slot]

    def free(self, node: fx.Node) -> bool:
        """Whether no other lane runs a node."""
        slot = self.placed.get(node)
        return slot is None or not slot.lane


@dataclass(frozen=True)
class Found:
    """``lanes`` has the lane of each operation that goes to one; ``missed`` why others do not."""

    lanes: dict[fx.Node, str] = field(default_factory=dict)
    missed: dict[fx.Node, Blocker] = field(default_factory=dict)


@dataclass(frozen=True)
class Streams(Pass):
    """Give device work that others do not wait for streams of its own, ``stream:<name>``."""

    name: ClassVar[str] = "streams"
    worth: int = WORTH  # what a lane, and what runs beside it, have to weigh

    def run_program(self, program: Program, rewrite: Rewriter) -> None:
        context = context_of(rewrite)
        if not context.device:
            return
        off = _switched_off(context)
        for owner, graph in list(bodies_of(program)):
            if off is None:
                self._cut(owner, graph, rewrite)
            body = body_of(owner, graph, rewrite.deps, context.device)
            found = find(body, self.worth)
            if off is not None:
                half = cuttable(owner, graph, rewrite.deps, context, worth=self.worth)
                if found.lanes or half is not None:
                    rewrite.missed(next(iter(found.lanes)) if half is None else half[0], off)
                    return
                continue
            for node, blocker in found.missed.items():
                rewrite.missed(node, blocker)
            if found.lanes and self._body(body, found.lanes, rewrite):
                program.stage = "scheduled"

    def _cut(self, owner: fx.Node | None, graph: fx.Graph, rewrite: Rewriter) -> None:
        """Cut traced graphs on the way round a loop in two: what a next trip needs, and more."""
        tried: set[fx.Node] = set()
        while found := cuttable(
            owner, graph, rewrite.deps, context_of(rewrite), tried, worth=self.worth
        ):
            node, sliced = found
            if not rewrite.spend():
                return
            results = len(sliced.late_outputs) + len(sliced.early_outputs)
            early, late = apply(node, sliced, rewrite)
            tried |= {early, late}
            rewrite.applied(
                early,
                f"`{op_of(late).name}` makes what no later trip waits for: "
                f"{len(sliced.late_outputs)} of {results} results",
            )

    def _body(self, body: Body, wanted: dict[fx.Node, str], rewrite: Rewriter) -> bool:
        modulo = _modulo(body, wanted)
        for lane in dict.fromkeys(wanted.values()):
            mine = [n for n in modulo.order if wanted.get(n) == lane]
            first = max(mine, key=weight)
            beside = _beside(body, modulo, mine)
            if sum(map(weight, beside)) < self.worth:
                rewrite.missed(first, Blocker("no-window", "everything else waits for it"))
            elif rewrite.spend():
                most = sorted(beside, key=weight, reverse=True)
                told = ", ".join(dict.fromkeys(map(title, most[:2])))
                more = len(beside) - 2
                told += f" and {more} more" if more > 0 else ""
                rewrite.applied(first, f"runs on lane {lane!r} beside {told}")
                continue
            wanted = {n: name for n, name in wanted.items() if name != lane}
        if not wanted:
            return False
        if body.placed:
            for node, lane in wanted.items():
                rewrite.set_facts(node, slot=replace(body.placed[node], lane=lane))
        else:
            write_slots(_modulo(body, wanted), wanted, rewrite)
        return True


def _switched_off(context: PassContext) -> Blocker | None:
    if not context.options.streams:
        return Blocker("switched-off", "the decision leaves all device work on one stream")
    if not context.run_ahead:
        return Blocker("may-raise", "run_ahead=False starts nothing beside a call")
    return None


def bodies_of(program: Program) -> Iterator[tuple[fx.Node | None, fx.Graph]]:
    """The program's own body and those of its loops over ranges and iterators; none of what runs
    on a lane as a whole, which has no lanes of its own."""

    def below(module: fx.GraphModule) -> Iterator[tuple[fx.Node | None, fx.Graph]]:
        for owner, child in children(module):
            slot = facts.get(owner).slot if is_call(owner) else None
            if slot is not None and slot.lane:
                continue
            if is_call(owner, LOOP) and LoopView(owner).facts.kind != "while":
                yield owner, child.graph
            yield from below(child)

    yield None, program.root.graph
    yield from below(program.root)


def body_of(owner: fx.Node | None, graph: fx.Graph, deps: Dependences, device: str) -> Body:
    """A body with what is known of it now."""
    nodes = tuple(n for n in graph.nodes if n.op == "call_function" and not is_call(n, STATE))
    inside = set(nodes)
    edges = tuple(e for e in deps.edges(graph) if e.src in inside and e.dst in inside)
    placed = {n: slot for n in nodes if (slot := facts.get(n).slot) is not None}
    return Body(owner, graph, deps, device, nodes, edges, placed)


def cuttable(
    owner: fx.Node | None,
    graph: fx.Graph,
    deps: Dependences,
    context: PassContext,
    tried: Collection[fx.Node] = (),
    *,
    worth: int = WORTH,
) -> tuple[fx.Node, Sliced] | None:
    """A traced graph on the way round a loop, the last one first, that makes enough of what the
    next trip does not need; with both halves. Loops that step a simulator were cut by ``split``."""
    if owner is None or any(is_step(n) or facts.get(n).slot is not None for n in graph.nodes):
        return None
    body = body_of(owner, graph, deps, context.device)
    turning = cycle(body.nodes, body.edges, worth)
    needed = leading_to(list(turning), body.edges) if turning else set()
    for node in reversed(body.nodes):
        if node not in needed or node in tried or not is_call(node):
            continue
        if op_of(node).kind != "graph" or why_not(node, deps, context.device):
            continue
        if not Split().has_late(node, needed):
            continue
        sliced = Split().slice(node, needed, run_ahead=context.run_ahead)
        if not isinstance(sliced, Blocker) and weight_of(sliced.late) >= worth:
            return node, sliced
    return None


# -- what goes where


def find(body: Body, worth: int = WORTH) -> Found:
    """The operations of one body that may run on streams of their own."""
    found = Found()
    steps = [n for n in body.nodes if is_step(n)]
    if body.placed and len(steps) > 1:
        _of_groups(body, steps, found, worth)
    turning = cycle(body.nodes, body.edges, worth)
    if steps:
        turning |= frozenset(steps)
    taken: list[list[fx.Node]] = []
    late: set[fx.Node] = set()
    if turning:
        needed = leading_to(list(turning), body.edges)
        rest = [n for n in body.nodes if n not in needed and n not in found.lanes]
        ready = _allowed(body, rest, found)
        late = set(ready)
        taken += groups(ready, body.edges)
    if not steps:  # there is nothing else to run beside on the way from step to step
        main = [n for n in body.nodes if n not in late]
        within = [e for e in body.edges if e.src not in late and e.dst not in late]
        path = longest_path(main, within)
        off = [n for n in main if n not in path]
        for group in groups(_allowed(body, off, found), within):
            heaviest = max(group, key=weight)
            others = [n for n in untied(heaviest, main, within) if n not in group]
            if sum(map(weight, others)) >= worth:
                taken.append(group)
    heavy = [group for group in taken if sum(map(weight, group)) >= worth]
    heavy.sort(key=lambda group: -sum(map(weight, group)))
    for group in heavy[:MOST]:
        heaviest = max(group, key=weight)
        found.lanes.update(dict.fromkeys(group, _lane(heaviest, found.lanes)))
    for group in heavy[MOST:]:
        heaviest = max(group, key=weight)
        found.missed[heaviest] = Blocker(
            "no-lane",
            f"{MOST} heavier ones have streams, and {title(heaviest)} stays on that of "
            "the coordinator",
        )
    return found


def _allowed(body: Body, nodes: Sequence[fx.Node], found: Found) -> list[fx.Node]:
    """Which of these operations a stream may run; why not, of those that would be worth it."""
    ready = []
    for node in nodes:
        if not body.free(node) or not weight(node):
            continue
        blocker = why_not(node, body.deps, body.device)
        if blocker is None:
            ready.append(node)
        elif weight(node) >= WORTH and not is_step(node) and blocker.code != "unsupported-shape":
            found.missed[node] = blocker
    return ready


def _of_groups(body: Body, steps: Sequence[fx.Node], found: Found, worth: int) -> None:
    """One stream for each group of shards that has work of its own, where several have."""
    members = [
        [
            node
            for node in group
            if body.free(node) and weight(node) and not why_not(node, body.deps, body.device)
        ]
        for group in by_group(steps, body.edges)
    ]
    heavy = [group for group in members if sum(map(weight, group)) >= worth]
    if len(heavy) > 1:
        for k, group in enumerate(heavy):
            found.lanes.update(dict.fromkeys(group, f"stream:group{k}"))


def _lane(node: fx.Node, taken: dict[fx.Node, str]) -> str:
    """A lane that no operation has yet, by the user's line."""
    where = place(node)
    name = f"stream:{node.name}" if where is None else f"stream:line{where.line}"
    return name if name not in taken.values() else f"{name}.{node.name}"


# -- when it is issued


def _modulo(body: Body, wanted: dict[fx.Node, str]) -> Modulo:
    """The issue order of a body: the one it has, or streams first."""
    if not body.placed:
        order = issue_order(body.nodes, body.edges, wanted)
        return Modulo(order, dict.fromkeys(body.nodes, 0), body.edges)
    order = tuple(sorted(body.placed, key=lambda n: body.placed[n].order))
    inside = set(order)
    within = tuple(e for e in body.edges if e.src in inside and e.dst in inside)
    return Modulo(order, {n: body.placed[n].stage for n in order}, within)


def issue_order(
    nodes: Sequence[fx.Node], edges: Sequence[Edge], lanes: Collection[fx.Node]
) -> tuple[fx.Node, ...]:
    """What is on lanes as soon as it is ready, what waits for that last; in program order
    otherwise."""
    users: dict[fx.Node, list[fx.Node]] = {n: [] for n in nodes}
    needs = dict.fromkeys(nodes, 0)
    for src, dst in dict.fromkeys((e.src, e.dst) for e in edges if not e.least):
        if src is not dst:
            users[src].append(dst)
            needs[dst] += 1
    waits: set[fx.Node] = set()
    for node in nodes:  # program order: users stand behind
        if source(node) in lanes or node in waits:
            waits.update(users[node])
    rank = {n: k for k, n in enumerate(nodes)}

    def key(node: fx.Node) -> tuple[int, int, fx.Node]:
        first = node in lanes or is_item(node)  # a pick takes no time
        return (0 if first else 1 + (node in waits), rank[node], node)

    ready = [key(n) for n in nodes if not needs[n]]
    heapq.heapify(ready)
    order = []
    while ready:
        node = heapq.heappop(ready)[2]
        order.append(node)
        for user in users[node]:
            needs[user] -= 1
            if not needs[user]:
                heapq.heappush(ready, key(user))
    return tuple(order)


def _beside(body: Body, modulo: Modulo, mine: Sequence[fx.Node]) -> list[fx.Node]:
    """What is issued between operations of one lane and the first that waits for them, on others'
    lanes or the coordinator's: the device may run it meanwhile."""
    alone = drains(body.owner, body.graph, body.deps)
    at, size = {n: k for k, n in enumerate(modulo.order)}, len(modulo.order)
    own = set(mine)
    found: dict[fx.Node, None] = {}
    for node in mine:
        gap = size - at[node] if alone else size
        for edge in modulo.edges:
            if edge.src is node and source(edge.dst) not in own and not is_item(edge.dst):
                trips = edge.least + modulo.stage[edge.dst] - modulo.stage[node]
                gap = min(gap, at[edge.dst] - at[node] + trips * size)
        for k in range(1, gap):
            other = modulo.order[(at[node] + k) % size]
            if other not in own and weight(other):
                found[other] = None
    return list(found)
