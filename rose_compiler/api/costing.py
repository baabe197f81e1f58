"""The cost model of a schedule: from its plan and its profile to a formula and its bounds."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO

import sympy
import torch.fx as fx
from rich.console import Console
from rich.table import Table

from rose_compiler.base.machine import Machine
from rose_compiler.base.marks import key_of
from rose_compiler.base.profile import Profile
from rose_compiler.base.remarks import Remark
from rose_compiler.codegen.schedule import Action, Body, Schedule, aside
from rose_compiler.ir import bodies
from rose_compiler.ir.deps import place, title_name
from rose_compiler.ir.keys import loops_by_key, nodes_by_key
from rose_compiler.ir.ops import BRANCH, LOOP
from rose_compiler.ir.program import BranchView, LoopView, Program, is_call
from rose_compiler.tune.bounds import Bound, Interval, bound
from rose_compiler.tune.formula import Formula, LoopFormula, formula
from rose_compiler.tune.local import Local
from rose_compiler.tune.nest import Cost, Costs, Nest, Step, What
from rose_compiler.tune.predict import Prediction, predict
from rose_compiler.tune.transfer import LAUNCH_S, loop_trips, transfer

_WHAT: dict[str, What] = {"run": "run", "submit": "submit", "await": "wait"}
#: A loop could be pipelined if the bound is at most this share of what a trip takes.
WORTH = 0.95
#: Operations named as what fills a lane.
SHOWN = 3


def nest_of(
    plan: Schedule,
    profile: Profile,
    times: Mapping[str, float] | None = None,
    trips: Mapping[str, tuple[float, float]] | None = None,
) -> Nest:
    """What a plan launches, with the numbers of trips that a profile has seen.

    ``times`` says how often each operation runs a trip, ``trips`` how often each loop begins and
    its trips each time, for a profile of another plan.
    """
    return _Converter(plan, profile, times, trips).body(plan.program.graph, "", ())


def forecast(
    base: Profile,
    profiled: Program,
    plan: Schedule,
    machine: Machine,
    shards: int,
    shard_cores: float | None = None,
    local: Local | None = None,
) -> float:
    """Seconds of an iteration of a plan that has not run, from the profile of another.

    ``shards`` is the number of parts of the simulator, ``shard_cores`` how many cores they are kept
    to, if any. ``local``: what operations were measured to take on other rows or threads.
    """
    costs, times = transfer(base, profiled, plan.program, shards, local)
    trips = loop_trips(base, profiled, plan.program)
    made = _Converter(plan, base, times, trips)
    nest = made.body(plan.program.graph, "", ())
    # a loop on a lane takes what is in it, one after the other
    whole = {key: predict(inner, costs, machine).seconds for key, inner in made.aside.items()}
    lanes = {key: Cost(s, s, launch_s=LAUNCH_S) for key, s in whole.items()}
    return predict(nest, Costs({**costs, **lanes}), machine, shard_cores=shard_cores).seconds


class _Converter:
    def __init__(
        self,
        plan: Schedule,
        profile: Profile,
        times: Mapping[str, float] | None,
        trips: Mapping[str, tuple[float, float]] | None,
    ) -> None:
        self.plan, self.times = plan, times
        self.aside: dict[str, Nest] = {}  # what is in loops and branches on lanes, by key
        if trips is None:
            trips = {one.loop: (one.runs, one.trips) for one in profile.loops}
        self.trips = {loop: each for loop, (_, each) in trips.items()}
        self.runs = {loop: runs * each for loop, (runs, each) in trips.items()}
        iterations = max(1, len(profile.iteration_s))
        self.counts = {o.op: o.count / iterations for o in profile.ops}

    def body(self, graph: fx.Graph, key: str, path: tuple[str, ...]) -> Nest:
        steps = tuple(s for a in self.plan.bodies[graph].actions for s in self._steps(a, path))
        if not key:
            return Nest("", steps)
        known = self.plan.deps.scope.iteration[graph].trips
        return Nest(key, steps, self.trips.get(key, float(known or 0)))

    def _steps(self, action: Action, path: tuple[str, ...]) -> Sequence[Step]:
        node = action.node
        if action.what == "copy" or not is_call(node):
            return ()
        key = key_of(path, node.name)
        if aside(action):
            self.aside.setdefault(key, self._inside(node, key, path))
            return (Step(_WHAT[action.what], key, action.lane, action.stage),)
        if is_call(node, LOOP):
            inner = self.body(LoopView(node).graph, key, (*path, node.name))
            return (Step("loop", key, "", action.stage, 1.0, inner),)
        if is_call(node, BRANCH):
            view = BranchView(node)
            return [
                step
                for arm in (view.then, view.orelse)
                for inner in _part(self.plan.bodies[arm.graph], action.what)
                for step in self._steps(inner, path)
            ]
        what = _WHAT[action.what]
        if self.times is not None:
            return (Step(what, key, action.lane, action.stage, self.times.get(key, 0.0)),)
        around = self.runs.get("/".join(path), 1.0) if path else 1.0
        times = self.counts.get(key, 0.0) / around if around else 0.0
        return (Step(what, key, action.lane, action.stage, times),)

    def _inside(self, node: fx.Node, key: str, path: tuple[str, ...]) -> Nest:
        """A loop or branch as the thread that it is handed to runs it."""
        if is_call(node, LOOP):
            return self.body(LoopView(node).graph, key, (*path, node.name))
        view = BranchView(node)
        actions = [
            a for arm in (view.then, view.orelse) for a in self.plan.bodies[arm.graph].actions
        ]
        return Nest("", tuple(s for a in actions for s in self._steps(a, path)))


def _part(arm: Body, what: str) -> Sequence[Action]:
    """What an arm does: until its first wait where a branch is begun, the rest where it ends."""
    if what == "run":
        return arm.actions
    return arm.head if what == "submit" else arm.actions[len(arm.head) :]


@dataclass(frozen=True)
class CostModel:
    """What a schedule should take, what it took, and what nothing can beat. Seconds."""

    nest: Nest
    costs: Costs
    machine: Machine
    prediction: Prediction
    formula: Formula
    bound: Bound
    measured_s: float
    labels: Mapping[str, str]
    names: Mapping[str, str]  # of operations, with the user's lines
    overlapping: frozenset[str] = frozenset()  # loops that no exit keeps from being pipelined

    @classmethod
    def of(cls, plan: Schedule, program: Program, profile: Profile, machine: Machine) -> CostModel:
        """The model of a profiled schedule.

        Its operations were timed beside each other, so their times hold what sharing the cores
        costs already and the prediction does not count it again.
        """
        nest, costs = nest_of(plan, profile), Costs.of(profile)
        predicted = predict(nest, costs, machine, contention=False)
        return cls(
            nest,
            costs,
            machine,
            predicted,
            formula(nest, costs, machine, predicted),
            bound(program, nest, costs, machine),
            statistics.median(profile.iteration_s),
            {o.op: o.label for o in profile.ops},
            {key: _named(node) for key, node in nodes_by_key(program).items()},
            frozenset(
                key
                for key, loop in loops_by_key(program).items()
                if loop.facts.kind != "while" and not bodies.exits(loop.graph)
            ),
        )

    def __str__(self) -> str:
        return self.render()

    def render(self, width: int = 100) -> str:
        """The model as text: a line a loop, largest terms first, times in ms."""
        made, ms = self.formula, 1e3
        predicted, least = self.prediction.seconds, self.bound
        lines = [
            f"predicted {ms * predicted:.2f} ms, measured {ms * self.measured_s:.2f} ms, ratio"
            f" {predicted / max(self.measured_s, 1e-12):.2f}",
            f"lower bound {ms * least.seconds:.2f} ms, the larger of {ms * least.critical_s:.2f} ms"
            f" on the critical path and {ms * least.work_s:.2f} ms, all work on"
            f" {self.machine.capacity} cores (loops taken as wholes)",
            "",
            f"iteration = {self._terms(made.expr)}",
        ]
        runs = {loop.trips: loop for loop in made.loops.values()}
        for run, expr in sorted(made.of_loop.items(), key=lambda item: -made.values[item[0]]):
            loop = next(runs[s] for s in expr.free_symbols if s in runs)
            lines += self._loop_lines(loop, run.name, made.values[run])
        text = "\n".join(part for line in lines for part in _wrapped(line, width))
        table = self._intervals()
        if table.row_count:
            console = Console(width=width, file=StringIO(), color_system=None)
            with console.capture() as captured:
                console.print(table)
            text += "\n\n" + captured.get()
        return text.rstrip()

    def _loop_lines(self, loop: LoopFormula, run: str, seconds: float) -> list[str]:
        made = self.formula
        head = f"{run} ({1e3 * seconds:.2f} ms) = {loop.trips.name} ({made.values[loop.trips]:g})"
        if loop.fill is None:
            (only,) = loop.candidates
            return [f"{head} x ({self._terms(only.expr)})"]
        shown = loop.candidates[:4]
        names = ", ".join(dict.fromkeys(c.name for c in shown))
        rest = f" + {loop.fill.name} ({1e3 * made.values[loop.fill]:.2f} ms)"
        lines = [f"{head} x max({names}){rest}"]
        lines += [f"    {c.name} ({1e3 * c.seconds:.3f} ms) = {self._terms(c.expr)}" for c in shown]
        return lines

    def _terms(self, expr: sympy.Expr, most: int = 6) -> str:
        """A sum with its largest terms by name and value, the rest as one number."""
        terms = expr.args if expr.is_Add else (expr,)
        valued = [(float(t.subs(self.formula.values)), t) for t in terms]
        valued.sort(key=lambda item: -item[0])
        shown = [f"{self._shown(t)} ({1e3 * value:.3f})" for value, t in valued[:most] if value]
        rest = sum(value for value, _ in valued[most:])
        if len(valued) > most:
            shown.append(f"{len(valued) - most} more ({1e3 * rest:.3f})")
        return " + ".join(shown) or "0"

    def _shown(self, term: sympy.Expr) -> str:
        """A term by the user's line where its name says nothing."""
        label = self.labels.get(self.formula.keys.get(str(term), ""), "")
        return f"[{label}]" if ":" in label else str(term)

    def _intervals(self) -> Table:
        table = Table(
            title="least ms between trips of loops that are pipelined, or could be (*)",
            title_justify="left",
        )
        table.add_column("loop", overflow="fold")
        for name in ("ResMII", "RecMII", "MII"):
            table.add_column(name, justify="right")
        table.add_column("set by", overflow="fold")
        for least in self.least():
            table.add_row(
                least.loop + ("" if least.pipelined else " *"),
                *(f"{1e3 * s:.3f}" for s in (least.res_mii, least.rec_mii, least.mii)),
                least.set_by,
            )
        return table

    def least(self) -> Iterator[Least]:
        """What bounds the trips of each loop that is pipelined, or could be."""
        nests = {n.key: n for n in self.nest.walk()}
        for one in self.bound.intervals:
            nest = nests.get(one.loop)
            if nest is None or nest.trips < 2 or one.loop not in self.overlapping:
                continue
            name = self.names.get(one.loop, one.loop)
            if nest.lanes or nest.depth:
                resource = one.tightest if one.rec_mii <= one.res_mii else ""
                by = self._resource(one, resource) if resource else self._recurrence(one)
                yield Least(one.loop, name, one.res_mii, one.rec_mii, by, True)
                continue
            own = one.resources.get("coordinator", 0.0)
            taken = {k: self._taken(nest, k) for k in one.fills.get("coordinator", ())}
            longest = max(taken, key=lambda k: taken[k], default="")
            found = max(one.resources["cores"], taken.get(longest, 0.0))
            if max(found, one.rec_mii) > WORTH * own:
                continue
            if one.rec_mii > found:
                by = self._recurrence(one)
            elif found > one.resources["cores"]:
                by = f"the longest operation: {self.names.get(longest, longest)}"
            else:
                by = self._resource(one, "cores")
            yield Least(one.loop, name, found, one.rec_mii, by, False)

    def _taken(self, nest: Nest, key: str) -> float:
        """Seconds a trip of one operation, or loop, of a body."""
        if key in self.prediction.loops:
            return self.prediction.loops[key]
        return sum(s.times for s in nest.steps if s.key == key) * self.costs[key].run_s

    def _resource(self, interval: Interval, name: str) -> str:
        if name == "cores":
            return f"all work on {self.machine.capacity:g} cores"
        fills = interval.fills.get(name, ())
        named = [self.names.get(key, key) for key in fills[:SHOWN]]
        if len(fills) > SHOWN:
            named.append(f"{len(fills) - SHOWN} more")
        return f"{name}: {', '.join(named)}"

    def _recurrence(self, interval: Interval) -> str:
        cycle = interval.recurrence
        assert cycle is not None
        named = " -> ".join(self.names.get(key, key) for key in cycle.keys)
        far = "the next trip" if cycle.distance == 1 else f"{cycle.distance} trips later"
        return f"recurrence: {named} -> again {far}"

    def remarks(self, *, pipelined: bool = False) -> Iterator[Remark]:
        """What bounds the trips of each loop, as remarks; of pipelined ones alone, if asked."""
        for one in self.least():
            if pipelined and not one.pipelined:
                continue
            what = "is pipelined" if one.pipelined else "could be pipelined"
            why = (
                f"{one.name} {what}: a trip at most every {1e3 * one.mii:.3g} ms (ResMII "
                f"{1e3 * one.res_mii:.3g}, RecMII {1e3 * one.rec_mii:.3g}), set by {one.set_by}"
            )
            yield Remark("note", "cost", (), "interval", why)


@dataclass(frozen=True)
class Least:
    """The least seconds between two trips of a loop, and what sets them."""

    loop: str
    name: str
    res_mii: float
    rec_mii: float
    set_by: str
    pipelined: bool

    @property
    def mii(self) -> float:
        """The larger one."""
        return max(self.res_mii, self.rec_mii)


def _named(node: fx.Node) -> str:
    """A node with the user's line."""
    where = place(node)
    return title_name(node) if where is None else f"{title_name(node)} (line {where.line})"


def _wrapped(line: str, width: int) -> list[str]:
    indent = len(line) - len(line.lstrip())
    return textwrap.wrap(
        line,
        max(width, 40),
        subsequent_indent=" " * (indent + 4),
        break_long_words=False,
        break_on_hyphens=False,
    ) or [""]
