"""The time of an iteration as a formula: symbols for costs and trip counts, sums and maxima.

A body whose coordinator does everything is a sum. In one with lanes, trips follow each other at the
rate of the slowest cycle of its event graph: the coordinator's own round, or one through a lane, by
way of what it waits for (the maximal cycle ratio of a timed marked graph; Ramamoorthy and Ho,
1980). The share of the cores is one more candidate. What is left, filling and draining, is one
symbol whose value comes from the simulation.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

import networkx as nx
import sympy

from rose_compiler.base.machine import Machine
from rose_compiler.tune.nest import Cost, Nest, Step
from rose_compiler.tune.predict import Prediction

#: Cycles of one body that are looked at.
CYCLES = 256


@dataclass(frozen=True)
class Candidate:
    """What may set the rate of a loop's trips: seconds a trip, as a formula and as a number."""

    name: str
    expr: sympy.Expr
    seconds: float


@dataclass(frozen=True)
class LoopFormula:
    """One loop: its trips, what may set the seconds of one, the largest first; the rest."""

    key: str
    trips: sympy.Symbol
    candidates: tuple[Candidate, ...]
    fill: sympy.Symbol | None


@dataclass
class Formula:
    """The time of an iteration. ``values`` has the seconds, or trips, of each symbol.

    ``expr`` is in terms of one symbol a loop, a run of it, which ``of_loop`` spells out;
    :meth:`full` has everything in terms of costs and trips.
    """

    expr: sympy.Expr
    of_loop: dict[sympy.Symbol, sympy.Expr] = field(default_factory=dict)
    loops: dict[str, LoopFormula] = field(default_factory=dict)
    values: dict[sympy.Symbol, float] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)  # the operation that a name stands for

    def full(self) -> sympy.Expr:
        """The formula in costs and trip counts alone."""
        expr = self.expr
        while expr.free_symbols & set(self.of_loop):
            expr = expr.xreplace(self.of_loop)
        return expr

    def seconds(self, **trips: float) -> float:
        """The value, some symbols changed by name: ``seconds(T_rollout=128)``.

        Raises ``KeyError`` for a name that the formula does not have.
        """
        by_name = {s.name: s for s in self.values}
        values = {**self.values, **{by_name[name]: value for name, value in trips.items()}}
        expr = self.full()
        symbols = sorted(expr.free_symbols, key=lambda s: s.name)
        function = sympy.lambdify(symbols, expr, modules=[{"Max": max}, "math"])
        return float(function(*(values[s] for s in symbols)))


def formula(
    nest: Nest, costs: Mapping[str, Cost], machine: Machine, prediction: Prediction
) -> Formula:
    """The formula of a schedule, whose value is what ``prediction`` says."""
    return _Maker(costs, machine, prediction).run(nest)


def symbol(name: str) -> sympy.Symbol:
    """The symbol of a cost or a number of trips, above zero."""
    return sympy.Symbol(name, positive=True)


class _Maker:
    def __init__(self, costs: Mapping[str, Cost], machine: Machine, prediction: Prediction) -> None:
        self.costs, self.machine, self.prediction = costs, machine, prediction
        self.made = Formula(sympy.Integer(0))

    def run(self, nest: Nest) -> Formula:
        expr, seconds = self._sum(nest)
        if nest.lanes:  # outside all loops there are no trips to overlap
            rest = self._value("overlap outside loops", self.prediction.seconds - seconds)
            expr = expr + rest
        self.made.expr = expr
        return self.made

    def _value(self, name: str, seconds: float) -> sympy.Symbol:
        made = symbol(name)
        self.made.values[made] = seconds
        return made

    def _name(self, key: str) -> str:
        """The node's own name, or the whole key where another node has that name."""
        short = key.rpartition("/")[2]
        name = short if self.made.keys.get(short, key) == key else key
        self.made.keys[name] = key
        return name

    def _cost(self, step: Step) -> tuple[sympy.Expr, float]:
        """What a step takes of the coordinator's time."""
        cost, name = self.costs[step.key], self._name(step.key)
        if step.inner is not None:
            return self._loop(step.inner)
        if step.what == "run":
            seconds = cost.run_s * step.times
            return (self._value(name, seconds) if seconds > 0 else sympy.Integer(0)), seconds
        seconds, word = (
            (cost.submit_s, "submit") if step.what == "submit" else (cost.receive_s, "receive")
        )
        return self._value(f"{word} {name}", seconds), seconds

    def _sum(self, nest: Nest) -> tuple[sympy.Expr, float]:
        parts = [self._cost(s) for s in nest.steps]
        return sympy.Add(*(e for e, _ in parts)), sum(v for _, v in parts)

    def _loop(self, nest: Nest) -> tuple[sympy.Expr, float]:
        name = nest.name()
        trips = self._value(f"T_{self._name(nest.key)}", nest.trips)
        seconds = self.prediction.loops.get(nest.key, 0.0)
        if not nest.lanes:
            expr, one = self._sum(nest)
            loop = LoopFormula(nest.key, trips, (Candidate("coordinator", expr, one),), None)
            whole = trips * expr
        else:
            candidates = self._candidates(nest)
            rate = candidates[0].seconds
            fill = self._value(f"fill {name}", seconds - nest.trips * rate)
            loop = LoopFormula(nest.key, trips, candidates, fill)
            whole = trips * sympy.Max(*(c.expr for c in candidates), evaluate=False) + fill
        run = self._value(f"run {self._name(nest.key)}", seconds)
        self.made.of_loop[run] = whole
        self.made.loops[nest.key] = loop
        return run, seconds

    def _candidates(self, nest: Nest) -> tuple[Candidate, ...]:
        graph, parts = self._events(nest)
        found: dict[sympy.Expr, Candidate] = {}
        for cycle in itertools.islice(nx.simple_cycles(graph), CYCLES):
            pairs = zip(cycle, [*cycle[1:], cycle[0]], strict=True)
            distance = sum(graph.edges[pair]["distance"] for pair in pairs)
            if distance == 0:
                continue
            lanes = dict.fromkeys(graph.nodes[n]["lane"] for n in cycle if graph.nodes[n]["lane"])
            own = any(not graph.nodes[n]["lane"] for n in cycle)
            if not lanes:
                name = "coordinator"
            else:
                name = " and ".join(lanes) if not own else f"through {' and '.join(lanes)}"
            expr = sympy.Add(*(parts[n][0] for n in cycle)) / distance
            seconds = sum(parts[n][1] for n in cycle) / distance
            found.setdefault(expr, Candidate(name, expr, seconds))
        work, seconds = self._work(nest)
        cores = Candidate("cores", work / self.machine.capacity, seconds / self.machine.capacity)
        return tuple(sorted((*found.values(), cores), key=lambda c: -c.seconds))

    def _events(self, nest: Nest) -> tuple[nx.DiGraph, dict[object, tuple[sympy.Expr, float]]]:
        """The event graph of one trip: edges with the emitted trips that lie between."""
        graph = nx.DiGraph()
        parts: dict[object, tuple[sympy.Expr, float]] = {}
        last: dict[str, str] = {}
        first: dict[str, str] = {}
        submitted: dict[str, tuple[str, int]] = {}
        ring = list(range(len(nest.steps)))
        for position, step in enumerate(nest.steps):
            parts[position] = self._cost(step)
            graph.add_node(position, lane="")
            graph.add_edge(position, ring[(position + 1) % len(ring)],
                           distance=int(position + 1 == len(ring)))  # fmt: skip
            if step.what == "submit":
                task, launch = f"task {step.key}", f"launch {step.key}"
                cost, name = self.costs[step.key], self._name(step.key)
                parts[task] = self._value(name, cost.run_s), cost.run_s
                parts[launch] = self._value(f"launch {name}", cost.launch_s), cost.launch_s
                graph.add_node(task, lane=step.lane)
                graph.add_node(launch, lane=step.lane)
                # it may begin before the coordinator is back from handing it over
                graph.add_edge(ring[position - 1], launch, distance=int(position == 0))
                graph.add_edge(launch, task, distance=0)
                if step.lane in last:
                    graph.add_edge(last[step.lane], task, distance=0)
                first.setdefault(step.lane, task)
                last[step.lane] = task
                submitted[step.key] = task, step.stage
        for lane, at in last.items():
            graph.add_edge(at, first[lane], distance=1)
        for position, step in enumerate(nest.steps):
            if step.what == "wait" and step.key in submitted:
                task, stage = submitted[step.key]
                graph.add_edge(task, position, distance=step.stage - stage)
        return graph, parts

    def _work(self, nest: Nest) -> tuple[sympy.Expr, float]:
        """Core seconds of a trip."""
        exprs: list[sympy.Expr] = []
        total = 0.0
        for step in nest.steps:
            if step.inner is not None:
                expr, seconds = self._work(step.inner)
                exprs.append(symbol(f"T_{self._name(step.inner.key)}") * expr)
                total += step.inner.trips * seconds
            elif step.what in ("run", "submit"):
                seconds = step.times * self.costs[step.key].work_s
                if seconds > 0:
                    exprs.append(self._value(f"work {self._name(step.key)}", seconds))
                total += seconds
        return sympy.Add(*exprs), total
