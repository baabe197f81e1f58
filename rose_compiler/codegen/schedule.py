"""From a program to plain lists of what is launched, awaited and kept, one list a body.

A body whose nodes have slots is issued by their order; one without, in program order. What runs on
a lane is submitted there and awaited in front of the first operation that depends on it, by value
or by state, on this trip or the next. An action of stage ``s`` runs in emitted trip ``e`` for
program trip ``e - s``; an await counts as an action with a stage of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch.fx as fx

from rose_compiler.base.errors import VerifyError, fail
from rose_compiler.ir import facts
from rose_compiler.ir.deps import Dependences
from rose_compiler.ir.ops import BRANCH, LOOP, SHARD, STATE
from rose_compiler.ir.program import (
    LoopView,
    Program,
    children,
    is_call,
    is_exit,
    is_item,
)

END = float("inf")
Place = tuple[float, int, float, int]


@dataclass(frozen=True)
class Action:
    """One thing that a body does: ``"run"`` a node on the coordinator (loops and branches too),
    ``"submit"`` it to its lane, or ``"await"`` it there. ``position`` is the node's place in
    program order; ``stage`` and ``order`` say when (``order`` is the place in the list)."""

    what: str
    node: fx.Node
    position: int
    stage: int = 0
    order: int = 0
    lane: str = ""


@dataclass(frozen=True)
class Body:
    """What one graph does, in issue order.

    ``depth`` is how many trips its stages spread over, ``available`` the stage and place from which
    on a result is there, and ``copied`` the same for carried values that become another one's next.
    ``passed`` has (node, user) where the result goes to a later task of the same lane and nobody
    waits for it on the way.
    """

    graph: fx.Graph
    loop: LoopView | None
    scheduled: bool
    actions: tuple[Action, ...]
    depth: int = 0
    available: dict[fx.Node, tuple[int, int]] = field(default_factory=dict)
    copied: dict[fx.Node, tuple[int, int]] = field(default_factory=dict)
    passed: frozenset[tuple[fx.Node, fx.Node]] = frozenset()
    once: bool = False  # the loop has one trip at most

    @property
    def head(self) -> tuple[Action, ...]:
        """What the body does before it first waits; nothing for one that is not scheduled."""
        if not self.scheduled:
            return ()
        waits = (k for k, a in enumerate(self.actions) if a.what == "await")
        return self.actions[: next(waits, 0)]

    def describe(self) -> list[str]:
        """One line an action, for people and tests."""
        lines = []
        for a in self.actions:
            when = f" stage {a.stage}" if a.stage else ""
            lane = f" {a.lane}" if a.lane else ""
            lines.append(f"{a.what} {a.node.name}{lane}{when}")
        return lines


@dataclass(frozen=True)
class Schedule:
    """The bodies of a program, outermost first, and the lanes they use."""

    program: Program
    deps: Dependences
    bodies: dict[fx.Graph, Body]
    lanes: tuple[str, ...]

    @property
    def plain(self) -> bool:
        """Whether everything runs in program order on the coordinator."""
        return not any(b.scheduled for b in self.bodies.values())

    def describe(self) -> str:
        """All bodies as text."""
        lines = []
        for body in self.bodies.values():
            lines.append(f"{body.loop.label if body.loop else self.program.name}:")
            lines += [f"    {line}" for line in body.describe()]
        return "\n".join(lines)


def schedule(program: Program) -> Schedule:
    """The schedule of a program, captured or scheduled.

    Raises:
        VerifyError: where a slot breaks a dependence, or a body that can be left early spreads over
            several trips.
    """
    bodies: dict[fx.Graph, Body] = {}
    deps = Dependences(program)
    for owner, module in _outer_first(program):
        loop = LoopView(owner) if owner is not None and is_call(owner, LOOP) else None
        bodies[module.graph] = _Planner(module.graph, loop, deps).body()
    lanes = dict.fromkeys(a.lane for b in bodies.values() for a in b.actions if a.lane)
    return Schedule(program, deps, bodies, tuple(lanes))


def _outer_first(program: Program) -> Iterator[tuple[fx.Node | None, fx.GraphModule]]:
    def below(module: fx.GraphModule) -> Iterator[tuple[fx.Node | None, fx.GraphModule]]:
        for owner, child in children(module):
            yield owner, child
            yield from below(child)

    yield None, program.root
    yield from below(program.root)


def is_pick(node: fx.Node) -> bool:
    """Whether a node picks a part of a result by a constant: it has no time of its own."""
    return (
        is_item(node)
        and isinstance(node.args[1], int)
        and isinstance(node.args[0], fx.Node)
        and (is_pick(node.args[0]) or acts(node.args[0]))
    )


def acts(node: fx.Node) -> bool:
    """Whether a node does something of its own at a point in time."""
    if node.op not in ("call_function", "call_method"):
        return False
    return not is_call(node, STATE) and not is_call(node, SHARD) and not is_pick(node)


def aside(action: Action) -> bool:
    """Whether an action hands a whole loop or branch to a thread's lane, or waits for it there."""
    structured = is_call(action.node, LOOP) or is_call(action.node, BRANCH)
    return structured and action.lane.startswith("thread:")


def source_of(node: fx.Node) -> fx.Node:
    """The node whose result a pick, or a pick of a pick, is a part of."""
    while is_pick(node):
        assert isinstance(node.args[0], fx.Node)
        node = node.args[0]
    return node


def uses_of(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes that use a result or a part of it, picks left out; the output among them."""
    for user in node.users:
        if is_pick(user):
            yield from uses_of(user)
        else:
            yield user


def _broken(what: str, node: fx.Node) -> VerifyError:
    error = fail("verify-scheduled", what, where=facts.get(node).origin.where)
    assert isinstance(error, VerifyError)
    return error


class _Planner:
    """Plans one body."""

    def __init__(self, graph: fx.Graph, loop: LoopView | None, deps: Dependences) -> None:
        self.graph, self.loop, self.deps = graph, loop, deps
        self.nodes = [n for n in graph.nodes if acts(n)]
        self.position = {n: k for k, n in enumerate(self.nodes)}
        trips = deps.scope.iteration[graph].trips if loop is not None else None
        self.once = trips is not None and trips <= 1
        slots = {n: facts.get(n).slot for n in self.nodes}
        self.scheduled = any(s is not None for s in slots.values())
        self.slots = {n: s or facts.Slot(order=self.position[n]) for n, s in slots.items()}
        # what may leave the loop or end its trip
        self.leaving = [
            n for n in self.nodes if is_exit(n) or (is_call(n, BRANCH) and _exits_inside(n))
        ]
        if self.scheduled and (bare := [n for n, s in slots.items() if s is None]):
            raise _broken(f"{bare[0]} has no slot in a scheduled body", bare[0])

    def body(self) -> Body:
        if not self.scheduled:
            plain = tuple(Action("run", n, k, order=k) for k, n in enumerate(self.nodes))
            return Body(self.graph, self.loop, False, plain)
        # (order, before or at it, ties) -> action; an await stands in front of what it is for
        timed: list[tuple[Place, Action]] = []
        for node in self.nodes:
            slot, position = self.slots[node], self.position[node]
            what = "submit" if slot.lane else "run"
            action = Action(what, node, position, slot.stage, lane=slot.lane)
            timed.append(((slot.order, 1, position, 0), action))
            if slot.lane:
                trips, order = self._wanted(node)
                wait = Action("await", node, position, slot.stage + trips, lane=slot.lane)
                timed.append(((order, 0, slot.order, 0), wait))
        timed += self._copies({a.node: (key, a) for key, a in timed if a.what != "submit"})
        timed.sort(key=lambda item: item[0])
        actions = tuple(
            Action(a.what, a.node, a.position, a.stage, k, a.lane) for k, (_, a) in enumerate(timed)
        )
        depth = max(a.stage for a in actions)
        if depth:
            self._may_spread(actions)
        copied = {a.node: (a.stage, a.order) for a in actions if a.what == "copy"}
        available = {
            a.node: (a.stage, a.order) for a in actions if a.what not in ("submit", "copy")
        }
        passed = frozenset(
            (n, u)
            for n in self.nodes
            for u in uses_of(n)
            if self.slots[n].lane and u in self.slots and self.passed_on(n, u)
        )
        return Body(
            self.graph, self.loop, True, actions, depth, available, copied, passed, self.once
        )

    def _copies(self, made: dict[fx.Node, tuple[Place, Action]]) -> list[tuple[Place, Action]]:
        """Copies of carried values that are handed on to others, where that can't wait for the end
        of the trip: right behind the operation that makes the next value, one trip early."""
        found: dict[fx.Node, tuple[Place, Action]] = {}
        if self.loop is None or self.once:
            return []
        nexts = dict(zip(self.loop.carried, self.loop.carried_next, strict=True))
        for value in nexts.values():
            # from the value handed on down to the operation that makes it
            chain: list[fx.Node] = []
            while isinstance(value, fx.Node) and value in nexts and value not in chain:
                chain.append(value)
                value = nexts[value]
            if not isinstance(value, fx.Node) or source_of(value) not in made:
                continue
            place, action = made[source_of(value)]
            for far, param in enumerate(reversed(chain), 1):
                if action.stage >= far:
                    copy = Action("copy", param, action.position, action.stage - far)
                    found[param] = ((*place[:3], far), copy)
        return list(found.values())

    def _may_spread(self, actions: tuple[Action, ...]) -> None:
        late = next(a.node for a in actions if a.stage)
        if self.loop is None:
            raise _broken(f"{late} is put off by trips, and there is no loop around it", late)
        if self.leaving or self.loop.facts.kind == "while":
            raise _broken(f"{late} is put off by trips in a loop that can be left early", late)

    def _wanted(self, node: fx.Node) -> tuple[int, float]:
        """When the result of what runs on a lane is first needed: trips later, and in front of
        which order."""
        slot = self.slots[node]
        times: list[tuple[int, float]] = []
        leaving = [self.slots[n].order for n in self.leaving if self.slots[n].order > slot.order]
        if self.loop is None or self.leaving or self.once:
            times.append((0, min(leaving, default=END)))
        else:
            times.append((1, slot.order))  # in front of the next one at the latest
        for user in uses_of(node):
            if user.op == "output":
                times += self._handed_on(node)
                continue
            if self.passed_on(node, user):
                continue
            times.append((self.slots[user].stage - slot.stage, self.slots[user].order))
        for edge in self.deps.edges(self.graph):
            if edge.src is not node or edge.kind == "value" or edge.dst not in self.slots:
                continue
            other = self.slots[edge.dst]
            if other.lane == slot.lane:
                continue  # a lane runs in order
            times.append((edge.least + other.stage - slot.stage, other.order))
        first = min(times)
        if first <= (0, slot.order):
            raise _broken(f"something that depends on {node} is issued before it", node)
        return first

    def passed_on(self, node: fx.Node, user: fx.Node) -> bool:
        """Whether a user takes the result on the same lane, so that nobody has to wait for it."""
        a, b = self.slots[node], self.slots[user]
        return (
            a.lane == b.lane
            and not a.lane.startswith(("shard:", "host:"))
            and a.stage == b.stage
            and a.order < b.order
        )

    def _handed_on(self, node: fx.Node) -> Iterator[tuple[int, float]]:
        """When a result is needed as next carried value, or as a result of the body."""
        slot = self.slots[node]
        if self.loop is None or self.once:  # there is no next trip
            yield (0, END)
            return
        nexts = list(zip(self.loop.carried, self.loop.carried_next, strict=True))
        todo = [(p, 1) for p, v in nexts if isinstance(v, fx.Node) and source_of(v) is node]
        while todo:
            param, trips = todo.pop()
            for user in uses_of(param):
                if user.op != "output":
                    yield (trips + self.slots[user].stage - slot.stage, self.slots[user].order)
            if trips <= len(nexts):
                todo += [(p, trips + 1) for p, v in nexts if v is param]


def _exits_inside(node: fx.Node) -> bool:
    owner = node.graph.owning_module
    assert owner is not None
    for attribute in (node.args[1], node.args[2]):
        child = getattr(owner, str(attribute.target))  # type: ignore[union-attr]
        for inner in child.graph.nodes:
            if is_exit(inner) or (is_call(inner, BRANCH) and _exits_inside(inner)):
                return True
    return False
