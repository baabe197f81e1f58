"""Which loops are worth a modulo schedule: asked of the profile in program order, once.

Each loop that takes its share of an iteration is told what bounds its trips (ResMII, RecMII) and
why they don't overlap, where they can't. Those that a schedule makes shorter are one candidate
more, if the predictor sees a gain on the whole iteration; the chooser decides like on any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch.fx as fx

from rose_compiler.api.building import Building
from rose_compiler.api.costing import nest_of
from rose_compiler.api.profiling import Instrumented
from rose_compiler.api.schedules import Schedule
from rose_compiler.api.tuning import Tuning
from rose_compiler.base import knobs
from rose_compiler.base.decision import Decision, Pipelined
from rose_compiler.base.errors import SourceLocation
from rose_compiler.base.marks import key_of
from rose_compiler.base.profile import Profile
from rose_compiler.base.remarks import Blocker, Remark, RemarkLog
from rose_compiler.ir.deps import Dependences, place
from rose_compiler.ir.edges import takes_part
from rose_compiler.ir.keys import loops_by_key
from rose_compiler.ir.ops import BRANCH, LOOP
from rose_compiler.ir.program import BranchView, LoopView, is_call
from rose_compiler.passes.base import PassContext
from rose_compiler.passes.manager import select
from rose_compiler.passes.pipeline_loops import PipelineLoops, plan, told, work_of
from rose_compiler.tune.nest import Cost
from rose_compiler.tune.predict import predict
from rose_compiler.tune.transfer import loop_trips, transfer

PASS = PipelineLoops.name
#: Share of an iteration that a loop must take to be looked at.
LEAST_SHARE = 0.05
#: Share of an iteration that a schedule must be predicted to gain to be tried.
LEAST_GAIN = 0.03
#: More lanes than these beside the coordinator are not tried.
MOST_LANES = 3


@dataclass(frozen=True)
class Times:
    """What a profile in program order says of another schedule's program."""

    costs: Mapping[str, Cost]
    times: Mapping[str, float]
    loops: Mapping[str, float]  # seconds of one run of each loop
    trips: Mapping[str, tuple[float, float]]

    @classmethod
    def of(cls, base: Instrumented, built: Schedule, shards: int) -> Times:
        """As the predictor has them."""
        profile, program, plan_ = base.profile, built.program, built.emitted.plan
        assert plan_ is not None
        costs, times = transfer(profile, base.program, program, shards)
        trips = loop_trips(profile, base.program, program)
        found = predict(nest_of(plan_, profile, times, trips), costs, base.machine)
        return cls(costs, times, found.loops, trips)

    def micros(self, key: str, loop: LoopView) -> Iterator[tuple[str, int]]:
        """The operations of a loop's body with the microseconds that they take a trip."""
        path = tuple(key.split("/"))
        for node in loop.graph.nodes:
            if takes_part(node) and (each := round(1e6 * self._seconds(node, path))):
                yield node.name, each

    def _seconds(self, node: fx.Node, path: tuple[str, ...]) -> float:
        if not is_call(node):
            return 0.0
        key = key_of(path, node.name)
        if is_call(node, LOOP):
            return self.loops.get(key, 0.0)
        if is_call(node, BRANCH):
            view = BranchView(node)
            arms = (view.then.graph, view.orelse.graph)
            return sum(self._seconds(n, path) for graph in arms for n in graph.nodes)
        cost = self.costs.get(key)
        return 0.0 if cost is None else self.times.get(key, 1.0) * cost.run_s


class Pipelining:
    """Proposes loops to be pipelined, for one unit."""

    def __init__(self, log: RemarkLog) -> None:
        self._log = log

    def propose(self, unit: Building, base: Instrumented | None, tuning: Tuning) -> None:
        """Have one more schedule tried, if a loop's trips overlap at a gain. ``base`` has the
        profile in program order."""
        named = [one.name for one in select(unit.options.pipeline, knobs.current().passes)]
        first = tuning.plain
        if base is None or first is None or PASS not in named:
            return
        lanes = min(MOST_LANES, base.machine.cores - 1)
        if lanes < 1:
            self._miss(Blocker("no-lane", "there is one core: trips of loops do not overlap"))
            return
        try:
            self._propose(unit, base, tuning, first, lanes)
        except Exception as error:
            # whatever keeps a candidate from being built is no reason to stop training
            why = f"no loop is pipelined: {type(error).__name__}: {error}"
            self._miss(Blocker("candidate-failed", why))

    def _propose(
        self, unit: Building, base: Instrumented, tuning: Tuning, first: Decision, lanes: int
    ) -> None:
        built = unit.build(first)
        shards = max((len(s) for s in unit.shards().values()), default=1)
        seconds = Times.of(base, built, shards)
        context = unit.context(first, built.program)
        found = tuple(self._loops(built, seconds, lanes, base.profile, context))
        if not found:
            return
        decision = replace(first, pipeline=found)
        without, expected = tuning.forecast(first), tuning.forecast(decision)
        if without is None or expected is None:
            return
        if expected > (1.0 - LEAST_GAIN) * without:
            why = (
                f"[{decision}] is not tried: predicted {1e3 * expected:.3g} ms an iteration, "
                f"{1e3 * without:.3g} ms without"
            )
            self._log.add(
                Remark("missed", PASS, (), "predicted-slower", why, gain=without - expected)
            )
            return
        tuning.propose(decision)

    def _loops(
        self,
        built: Schedule,
        seconds: Times,
        lanes: int,
        base: Profile,
        context: PassContext,
    ) -> Iterator[Pipelined]:
        whole = sum(base.iteration_s) / max(1, len(base.iteration_s))
        deps = Dependences(built.program)
        for key, loop in loops_by_key(built.program).items():
            runs, trips = seconds.trips.get(key, (0.0, 0.0))
            if trips < 2 or seconds.loops.get(key, 0.0) * runs < LEAST_SHARE * whole:
                continue
            wanted = Pipelined(key, lanes, tuple(seconds.micros(key, loop)))
            if self._looked_at(loop, wanted, deps, context, seconds.loops[key] / trips):
                yield wanted

    def _looked_at(
        self,
        loop: LoopView,
        wanted: Pipelined,
        deps: Dependences,
        context: PassContext,
        trip_s: float,
    ) -> bool:
        """Whether a loop's trips can overlap at a gain over ``trip_s``, the seconds that one is
        predicted to take without; remarks say what bounds them."""
        work = work_of(loop, wanted, deps, context)
        where = tuple(w for w in (place(loop.node),) if w is not None)
        if isinstance(work, Blocker):
            self._miss(work, where)
            return False
        why = (
            f"a trip of {loop.label} takes {work.sequential} µs, one thing after the other; with "
            f"{wanted.lanes} more lane{'s' * (wanted.lanes != 1)}: {told(work, work.least())}"
        )
        self._log.add(Remark("note", PASS, where, "interval", why))
        placed = plan(loop, wanted, deps, context)
        if isinstance(placed, Blocker):
            self._miss(placed, where)
            return False
        interval = placed[1].interval
        if 1e-6 * interval > (1.0 - LEAST_GAIN) * trip_s:
            why = (
                f"pipelined, trips of {loop.label} begin every {interval} µs; without, they are "
                f"predicted to follow each other in {1e6 * trip_s:.0f} µs"
            )
            self._miss(Blocker("predicted-slower", why), where)
            return False
        return True

    def _miss(self, blocker: Blocker, where: Sequence[SourceLocation] = ()) -> None:
        self._log.add(Remark.from_blocker(PASS, blocker, where))
