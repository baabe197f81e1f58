"""SMs of their own for stream lanes: measured under several plans, judged in pairs, taken back."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import rose_compiler
from rose_compiler.api.cache import Entry
from rose_compiler.api.profiling import Instrumented
from rose_compiler.api.stream_quotas import StreamQuotas
from rose_compiler.base.decision import Decision
from rose_compiler.base.errors import fail
from rose_compiler.base.machine import load_machine
from rose_compiler.base.profile import Timeline
from rose_compiler.base.quota import QuotaPlan
from rose_compiler.base.remarks import Remark
from rose_compiler.runtime.quotas import Probe
from rose_compiler.runtime.recording import RecordingStreams
from rose_compiler.runtime.support import Runtime
from rose_compiler.tune import blocks
from tests.api.stream_loop import Policy, World, rollout

H200 = load_machine("h200")


class Applied:
    """A stream for each lane of a plan."""

    def __init__(self, plan: QuotaPlan, streams: RecordingStreams) -> None:
        self.of = {share.lane: streams.stream() for share in plan.shares}

    def stream(self, lane: str) -> int:
        return self.of[lane]


class Lever:
    """In place of green contexts: what was asked of it."""

    def __init__(self, streams: RecordingStreams) -> None:
        self.streams = streams
        self.there = Probe(True, "here")
        self.count = 16
        self.refuses = False
        self.asked = 0
        self.made: dict[str, Applied] = {}

    def probe(self) -> Probe:
        self.asked += 1
        return self.there

    def groups(self, chunk: int) -> int:
        return self.count

    def lasting(self, plan: QuotaPlan) -> Applied:
        if self.refuses:
            raise fail("quota-green", "cuGreenCtxCreate failed")
        shares = str([(share.lane, share.units) for share in plan.shares])
        return self.made.setdefault(shares, Applied(plan, self.streams))


class Case:
    """A compiled rollout by a schedule with a stream lane, on a device that is not there."""

    def __init__(self, made: Any, streams: RecordingStreams) -> None:
        self.made, self.streams, self.lever = made, streams, Lever(streams)
        self.policy, self.world, self.values = Policy(), World(), torch.zeros(4)
        self.obs = torch.ones(3)
        self.work = 3.0  # SM-seconds of an operation of the coordinator; of other lanes' 1
        self.step()
        self.unit = made._last.unit
        self.use(self.lever)

    def use(self, lever: Lever, **given: Any) -> None:
        """Have quotas looked for as if there were a device."""
        given = {"machine": lambda device: H200, **given}
        self.quotas = StreamQuotas(
            self.made._log, levers=lambda index: lever, on_device=self.on_device, **given
        )
        self.unit.streams = self.quotas

    def on_device(self, made: Instrumented) -> Timeline:
        """What operations take with the SMs that their lane has."""
        plan = self.quotas._turn()
        units = {} if plan is None else {s.lane: s.units for s in plan.shares}
        at: dict[str, float] = {}
        spans = []
        for span in sorted(made.timelines[-1].spans, key=lambda s: s.start_s):
            lane = span.lane or "coordinator"
            start = at.get(lane, 0.0)
            at[lane] = start + (1.0 if span.lane else self.work) / units.get(lane, 128)
            spans.append(replace(span, start_s=start, end_s=at[lane], activity=0.9))
        return Timeline(tuple(spans))

    def step(self) -> None:
        self.obs = self.made(self.policy, self.world, self.values, self.obs)

    def run(self, seconds: Callable[[QuotaPlan | None], float]) -> list[QuotaPlan | None]:
        """Iterations until nothing is compared any more: under what each ran, those before plans
        took turns left out."""
        record = self.quotas.record
        seen: list[QuotaPlan | None] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.quotas, "record", lambda _: record(seconds(self.quotas._lent[0])))
            for _ in range(60):
                self.step()
                if self.quotas.comparing:
                    seen.append(self.quotas._lent[0])
                elif self.quotas._done:
                    break
        assert not self.quotas.comparing
        return seen

    def lanes(self) -> dict[str, Any]:
        lanes = self.made.runtime._lanes
        return {name: lane for name, lane in lanes.items() if name.startswith("stream:")}

    def remarks(self) -> list[Remark]:
        return [remark for remark in self.made._log if remark.pass_name == "quota"]


@contextmanager
def compiled(folder: Path, streams: RecordingStreams, **options: Any) -> Iterator[Case]:
    Decision(streams=True).save(folder / "decision.json")
    made = rose_compiler.compile(
        rollout, tune=str(folder / "decision.json"), backend="virtual:h200", **options
    )
    made._runtime = Runtime(streams=streams)
    yield Case(made, streams)
    made.close()


@pytest.fixture
def streams() -> RecordingStreams:
    return RecordingStreams()


@pytest.fixture
def case(
    tmp_path: Path, streams: RecordingStreams, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Case]:
    monkeypatch.setattr(blocks, "LEAST", 1)
    monkeypatch.setattr(blocks, "LEAST_S", 0.0)
    monkeypatch.setattr(blocks, "COLD", 0)
    with compiled(tmp_path, streams) as made:
        yield made


def faster(plan: QuotaPlan | None) -> float:
    return 1.0 if plan is None else 0.5


def test_a_plan_that_wins_is_in_force_for_the_lanes(case: Case, streams: RecordingStreams) -> None:
    with streams:
        seen = case.run(faster)
        plan = case.quotas.plan
        assert plan is not None
        streams.issued.clear()
        before = case.obs
        case.step()
    streams.check()
    turns = [p for p, _ in itertools.groupby(seen)]
    measured = turns[: turns.index(None)]
    assert 3 <= len(measured) <= 5
    assert [p is None for p in turns[len(measured) :][:5]] == [True, False, True, False, True]
    (name, lane), *_ = case.lanes().items()
    assert lane.stream != lane.own
    assert lane.stream in {number for number, _ in streams.issued}
    assert lane.own not in {number for number, _ in streams.issued}
    assert 0 in {number for number, _ in streams.issued}  # the coordinator stays where it was
    assert plan.backend == "green-context"
    assert plan.share("coordinator").units > plan.share(name).units
    assert (plan.before_s, plan.given) == (1.0, 128)
    last = case.remarks()[-1]
    assert (last.kind, last.code, last.gain) == ("applied", "sm-quotas", pytest.approx(0.5))
    assert "2.000 [2.000, 2.000] times the speed in 4 pairs of blocks" in last.why
    assert "ms predicted" in last.why
    world = World()
    world.position = before
    assert torch.equal(case.obs, rollout(Policy(), world, torch.zeros(4), before))


def test_with_few_groups_all_quotas_are_measured_and_that_is_told(case: Case) -> None:
    case.lever.count = 3
    case.run(faster)
    few = [remark.why for remark in case.remarks() if remark.code == "few-points"]
    assert len(few) == 1
    assert few[0].endswith("2 different quotas: there are 2")


def test_quotas_end_with_the_lanes_and_come_back_with_them(case: Case) -> None:
    case.run(faster)
    lent = {name: lane.stream for name, lane in case.lanes().items()}
    runtime = case.made.runtime
    case.made.close()
    assert runtime._lanes == {}
    case.made._runtime = Runtime(streams=case.streams)
    case.step()
    assert {name: lane.stream for name, lane in case.lanes().items()} == lent


def test_a_second_run_starts_with_the_plan_that_the_first_one_found(
    case: Case, tmp_path: Path
) -> None:
    tuning = case.unit.tuning()
    tuning._entry = Entry(tmp_path, "rollout", {}, case.made._log)
    tuning._entry.store(tuning.best, "won")
    case.run(faster)
    plan = case.quotas.plan

    def again(**given: Any) -> QuotaPlan | None:
        tuning._entry = Entry(tmp_path, "rollout", {}, case.made._log)
        assert tuning._entry.load([tuning.best]) == 0
        case.use(Lever(case.streams), **given)
        case.step()
        return case.quotas.plan

    assert plan is not None
    assert again() == plan
    assert all(lane.stream != lane.own for lane in case.lanes().values())
    assert "which won earlier" in case.remarks()[-1].why
    assert again(machine=lambda _: replace(H200, name="another")) is None
    assert "it is deleted" in case.made._log[-1].why
    assert again() is None


def test_what_makes_iterations_slower_is_taken_back(case: Case) -> None:
    case.run(lambda plan: 1.0 if plan is None else 1.2)
    case.step()
    assert case.quotas.plan is None
    assert all(lane.stream == lane.own for lane in case.lanes().values())
    assert [remark.code for remark in case.remarks()] == ["measured-slower"]
    assert "times the speed in 2 pairs of blocks" in case.remarks()[0].why


def test_a_refusal_costs_the_quota_only(case: Case) -> None:
    case.lever.refuses = True
    assert case.run(faster) == []
    case.step()
    assert case.quotas.plan is None
    assert all(lane.stream == lane.own for lane in case.lanes().values())
    assert [remark.code for remark in case.remarks()] == ["not-available"]
    assert "cuGreenCtxCreate failed" in case.remarks()[0].why


def test_a_drift_has_quotas_planned_anew(case: Case) -> None:
    case.run(faster)
    old = case.quotas.plan
    assert old is not None
    case.quotas._drifts = -1  # tuning counts another number of them
    case.run(lambda plan: 1.0 if plan is None else 0.5)
    assert "replanned" in [remark.code for remark in case.remarks()]
    assert case.quotas.plan is old, "it met the schedule without quotas"
    case.work = 1 / 3
    case.quotas._drifts = -1
    seen = case.run(lambda plan: 1.0 if plan is old else 0.5)
    assert None not in seen
    new = case.quotas.plan
    assert new is not None
    assert new.share("coordinator").units < old.share("coordinator").units
    case.step()
    assert case.quotas._lent[0] is new


def test_a_search_that_begins_ends_the_comparison(case: Case) -> None:
    while case.quotas._trial is None:
        case.step()
    tuning = case.unit.tuning()
    arguments = (case.made.runtime, tuning, case.unit.profiling, case.unit.processes)
    case.quotas.between(None, *arguments)
    assert not case.quotas.comparing
    assert case.quotas.plan is None
    assert all(lane.stream == lane.own for lane in case.lanes().values())


@pytest.mark.parametrize(
    ("change", "code", "why"),
    [
        ({"there": Probe(False, "no cuda.bindings")}, "not-available", "no cuda.bindings"),
        ({"count": 1}, "over-committed", "can't share 1 groups of 8 SMs"),
    ],
)
def test_what_the_device_lacks_is_told(
    case: Case, change: dict[str, Any], code: str, why: str
) -> None:
    vars(case.lever).update(change)
    assert case.run(faster) == []
    assert [remark.code for remark in case.remarks()] == [code]
    assert why in case.remarks()[0].why
    assert case.lever.made == {}


def test_plans_are_compared_within_the_time_for_tuning(case: Case) -> None:
    case.unit.tuning()._alone.budget_s = -1.0
    assert case.run(faster) == []
    assert [remark.code for remark in case.remarks()] == ["switched-off"]
    case.unit.tuning()._alone.budget_s = 9.0
    case.use(case.lever)
    while case.quotas._points is None:
        case.step()
    case.unit.tuning().spend(9.0)
    case.step()
    assert not case.quotas.comparing
    assert case.remarks()[-1].code == "switched-off"
    assert case.run(faster) == []


def test_bits_are_kept_where_they_are_asked_for(case: Case) -> None:
    case.use(case.lever, close=False)
    assert case.run(faster) == []
    assert [remark.code for remark in case.remarks()] == ["switched-off"]


def test_without_a_device_nothing_happens(case: Case) -> None:
    case.use(case.lever, machine=lambda device: None)
    assert case.run(faster) == []
    assert case.lever.asked == 0
    assert case.remarks() == []
