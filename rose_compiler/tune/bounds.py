"""What no schedule can beat: dependences, and all the work over all the cores.

MII, the least seconds between two trips of a loop (Rau, "Iterative modulo scheduling", 1994), is
the larger of what resources allow (ResMII) and what recurrences allow (RecMII): the largest ratio
of latency to distance over the cycles of the dependence graph.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch.fx as fx

from rose_compiler.base.machine import Machine
from rose_compiler.base.marks import key_of
from rose_compiler.ir.cycles import max_ratio_cycle
from rose_compiler.ir.deps import Dependences
from rose_compiler.ir.ops import BRANCH, LOOP
from rose_compiler.ir.program import BranchView, LoopView, Program, is_call
from rose_compiler.tune.nest import Cost, Nest


@dataclass(frozen=True)
class Cycle:
    """A recurrence: what lies on it, in order, its latency in seconds, its distance in trips."""

    keys: tuple[str, ...]
    latency_s: float
    distance: int

    @property
    def ratio(self) -> float:
        """Seconds a trip."""
        return self.latency_s / self.distance


@dataclass(frozen=True)
class Interval:
    """The least seconds between two trips of one loop.

    ``resources`` has what each lane (``coordinator`` among them) and the cores together need a
    trip, ``fills`` the operations that take it, by key, the longest first; ``recurrence`` is the
    cycle that sets RecMII, ``None`` without one.
    """

    loop: str
    resources: Mapping[str, float]
    recurrence: Cycle | None
    fills: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def res_mii(self) -> float:
        """ResMII in seconds."""
        return max(self.resources.values(), default=0.0)

    @property
    def rec_mii(self) -> float:
        """RecMII in seconds."""
        return 0.0 if self.recurrence is None else self.recurrence.ratio

    @property
    def mii(self) -> float:
        """The larger one."""
        return max(self.res_mii, self.rec_mii)

    @property
    def tightest(self) -> str:
        """What sets it: a lane, ``cores`` or ``recurrence``."""
        if self.rec_mii > self.res_mii:
            return "recurrence"
        return max(self.resources, key=lambda name: self.resources[name], default="")


@dataclass(frozen=True)
class Bound:
    """The lower bound of an iteration: the critical path, and the work over the capacity.

    Loops are taken as wholes: a schedule that runs a loop beside what follows it may go below.
    An operation counts as work of one core at most, since the process's clock holds the time of
    other threads too: with several threads an operation the bound is lower than it could be.
    """

    critical_s: float
    work_s: float
    path: tuple[str, ...] = ()
    intervals: tuple[Interval, ...] = ()

    @property
    def seconds(self) -> float:
        """max(critical path, work / capacity)."""
        return max(self.critical_s, self.work_s)


def bound(program: Program, nest: Nest, costs: Mapping[str, Cost], machine: Machine) -> Bound:
    """The lower bound of a program at the granularity it has, and MII of each of its loops."""
    return _Bounder(program, nest, costs, machine).run()


class _Bounder:
    def __init__(
        self, program: Program, nest: Nest, costs: Mapping[str, Cost], machine: Machine
    ) -> None:
        self.program, self.costs, self.machine = program, costs, machine
        self.deps = Dependences(program)
        self.nests = {n.key: n for n in nest.walk()}
        self.times = {s.key: s.times for n in nest.walk() for s in n.steps}
        self.intervals: list[Interval] = []

    def run(self) -> Bound:
        critical, path, work = self._body(self.program.graph, ())
        return Bound(critical, work / self.machine.capacity, path, tuple(self.intervals))

    def _body(
        self, graph: fx.Graph, around: tuple[str, ...]
    ) -> tuple[float, tuple[str, ...], float]:
        """Longest path and what lies on it of one trip of a body, and its work in core seconds."""
        latency: dict[fx.Node, float] = {}
        keys: dict[fx.Node, str] = {}
        work = 0.0
        for node in graph.nodes:
            if not is_call(node):
                continue
            keys[node] = key = key_of(around, node.name)
            if is_call(node, LOOP) and not self.costs[key].run_s:  # not on a lane as a whole
                latency[node], more = self._loop(node, key, around)
            elif is_call(node, BRANCH) and not self.costs[key].run_s:
                view = BranchView(node)
                arms = [self._body(a.graph, around) for a in (view.then, view.orelse)]
                latency[node] = max(a[0] for a in arms)
                more = sum(a[2] for a in arms)
            else:
                # what runs seldom, in an arm, counts for the share of trips in which it does
                times = self.times.get(key, 1.0)
                latency[node] = times * self.costs[key].run_s
                # the process's clock counts other threads too: at most one core is its own
                more = times * min(self.costs[key].work_s, self.costs[key].run_s)
            work += more
        edges = [
            (e.src, e.dst)
            for e in self.deps.edges(graph)
            if (e.least if e.distance is None else e.distance) == 0
        ]
        seconds, chain = longest_path(graph.nodes, edges, lambda n: latency.get(n, 0.0))
        return seconds, tuple(keys[n] for n in chain if latency.get(n, 0.0) > 0), work

    def _loop(self, node: fx.Node, key: str, around: tuple[str, ...]) -> tuple[float, float]:
        view = LoopView(node)
        nest = self.nests.get(key)
        trips = nest.trips if nest is not None else 1.0
        inside = (*around, node.name)
        one, _, work = self._body(view.graph, inside)
        interval = self._interval(view, nest, inside, work)
        self.intervals.append(interval)
        return max(one, trips * interval.rec_mii), trips * work

    def _interval(
        self, view: LoopView, nest: Nest | None, inside: tuple[str, ...], work: float
    ) -> Interval:
        parts: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for step in () if nest is None else nest.steps:
            cost = self.costs[step.key]
            if step.what == "submit":
                parts["coordinator"][step.key] += cost.submit_s
                parts[step.lane][step.key] += cost.run_s
            elif step.what == "wait":
                parts["coordinator"][step.key] += cost.receive_s
            elif step.what == "run":
                parts["coordinator"][step.key] += step.times * cost.run_s
            elif step.inner is not None:
                parts["coordinator"][step.key] += self._sequential(step.inner)
        resources = {name: sum(taken.values()) for name, taken in parts.items()}
        resources["cores"] = work / self.machine.capacity
        fills = {
            name: tuple(sorted((k for k in taken if taken[k] > 0), key=lambda k: -taken[k]))
            for name, taken in parts.items()
        }
        edges = [
            (e.src, e.dst, e.least if e.distance is None else e.distance)
            for e in self.deps.edges(view.graph)
        ]

        def latency(node: fx.Node) -> float:
            key = key_of(inside, node.name)
            if key in self.nests:
                return self._sequential(self.nests[key])
            return self.times.get(key, 1.0) * self.costs[key].run_s

        found = max_ratio_cycle(edges, latency)
        cycle = None
        if found is not None:
            nodes, seconds, distance = found
            named = tuple(key_of(inside, n.name) for n in nodes if latency(n) > 0)
            cycle = Cycle(named, seconds, distance)
        return Interval("/".join(inside), resources, cycle, fills)

    def _sequential(self, nest: Nest) -> float:
        """Seconds of a loop whose work is all done one after the other."""
        one = 0.0
        for step in nest.steps:
            if step.inner is not None:
                one += self._sequential(step.inner)
            elif step.what in ("run", "submit"):
                one += step.times * self.costs[step.key].run_s
        return nest.trips * one


def longest_path(
    nodes: Iterable[fx.Node],
    edges: Iterable[tuple[fx.Node, fx.Node]],
    latency: Callable[[fx.Node], float],
) -> tuple[float, list[fx.Node]]:
    """The longest chain through nodes in topological order, by the latencies on it."""
    before: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    order = list(nodes)
    position = {n: k for k, n in enumerate(order)}
    for src, dst in edges:
        if src in position and dst in position and position[src] < position[dst]:
            before[dst].append(src)
    end: dict[fx.Node, float] = {}
    came: dict[fx.Node, fx.Node | None] = {}
    for node in order:
        came[node] = max(before[node], key=lambda n: end[n], default=None)
        ready = 0.0 if came[node] is None else end[came[node]]  # type: ignore[index]
        end[node] = ready + latency(node)
    last = max(end, key=lambda n: end[n], default=None)
    if last is None:
        return 0.0, []
    chain = [last]
    while (previous := came[chain[-1]]) is not None:
        chain.append(previous)
    return end[last], chain[::-1]
