"""Core quotas as candidates: proposed from a profile, tried, in force while they run."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rose_compiler
from rose_compiler.api import cores
from rose_compiler.api.cores import CoreQuotas
from rose_compiler.api.options import Options
from rose_compiler.api.points import Points
from rose_compiler.api.tuning import Tuning
from rose_compiler.base.decision import Decision
from rose_compiler.base.errors import ConfigError, fail
from rose_compiler.base.profile import OpTime, Profile, Span, Timeline
from rose_compiler.base.remarks import RemarkLog
from rose_compiler.runtime.hosts.hosted import Hosted
from rose_compiler.sim import ShardedEnv
from rose_compiler.tune.chooser import Chooser
from tests.api.loops import Drift, Training
from tests.api.loops import iteration as iteration_of_shards

CORES = os.sched_getaffinity(0)
pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="one core can't be divided")


class Far:
    """A small simulator that knows where it runs."""

    def __init__(self) -> None:
        self.state = torch.zeros(4, 3)

    def step(self, action: torch.Tensor) -> torch.Tensor:
        self.state = torch.tanh(self.state + action)
        return self.state

    def where(self) -> tuple[set[int], int]:
        return os.sched_getaffinity(0), torch.get_num_threads()


def bind_shards(decision: Decision | None) -> Decision | None:
    return None if decision is None else replace(decision, cores=(("shards", 1),))


@pytest.fixture(scope="module")
def far() -> Iterator[Hosted]:
    with rose_compiler.hosted(Far, threads=2) as made:
        made.where()
        yield made


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def iteration(policy: Any, far: Any, seen: list[Any]) -> float:
    """Steps beside work, and notes where this thread runs."""
    with torch.no_grad():
        a = far.step(policy.weight.detach())
        b = policy(torch.ones(2, 3))
        seen.append((os.sched_getaffinity(0), torch.get_num_threads()))
    return float(a.sum() + b.sum())


QUOTAS = Decision(hosted=True, cores=(("coordinator", 1), ("host:far", 1)))


def test_quotas_hold_while_an_iteration_runs(far: Hosted, threads: None, tmp_path: Path) -> None:
    path = tmp_path / "decision.json"
    QUOTAS.save(path)
    policy, seen = nn.Linear(3, 4), []
    step = rose_compiler.compile(iteration, tune=str(path))
    first = step(policy, far, seen)
    step(policy, far, seen)
    mine, theirs = seen[-1], far.where()
    assert (len(mine[0]), mine[1]) == (1, 1)
    assert (len(theirs[0]), theirs[1]) == (1, 1)
    assert not mine[0] & theirs[0]
    assert os.sched_getaffinity(0) == CORES
    assert torch.get_num_threads() == 2
    step.close()
    assert far.where() == (CORES, 2)
    assert isinstance(first, float)


def test_a_search_tries_what_the_profile_speaks_for(far: Hosted, threads: None) -> None:
    policy, seen = nn.Linear(3, 4), []
    step = rose_compiler.compile(iteration, tune=True)
    for _ in range(12):
        step(policy, far, seen)
    alone = [(len(cores), threads) for cores, threads in seen[2:8]]
    assert alone == [(1, 1)] * 3 + [(2, 2)] * 3  # in program order, with one and two cores
    table = step.explain()
    assert "cores=" in table
    assert "host:far/" in table
    (planned,) = step._last.unit.cores.plans.values()
    assert planned.given == 2
    assert planned.predicted_s is not None
    few = "responses from 2 numbers of cores: there are no more"
    assert (few in planned.notes) is (few in " ".join(table.split())) is (len(CORES) == 2)
    step.close()
    assert far.where() == (CORES, 2)


def test_what_a_call_takes_on_its_way_is_told_from_what_the_component_takes(far: Hosted) -> None:
    points = Points(frozenset(sorted(CORES)[:2]))
    op, lane = "loop/step", "host:far"
    while points.count is not None:
        with points.held({lane: far}):
            for _ in range(3):
                far.where()
            assert far.rose_calls is not None
            calls = [*far.rose_calls]
        assert far.rose_calls is None
        assert all(a <= b <= c <= d for a, b, c, d in calls)
        spans = tuple(Span(op, "", call[0], call[3]) for call in calls)
        whole = statistics.median(span.duration_s for span in spans)
        timeline = Timeline((*spans, Span("act", "", 0.0, 1.0)))
        points.took(Profile("here", (1.0,), (OpTime(op, 3, whole, whole),), timeline))
    points.release()
    beside = Timeline((Span(op, lane, 0.0, 1.0), Span("act", "", 0.0, 1.0)))
    alone, ways = points.responses(beside)
    assert set(ways) == {op}
    assert min(ways[op]) > 0
    assert alone[op].seconds(1) < points.responses(None)[0][op].seconds(1), "a round trip"


@pytest.mark.parametrize("trips", [3, 8])
def test_a_budget_that_ends_while_quotas_are_looked_for_ends_that_too(
    far: Hosted, threads: None, trips: int
) -> None:
    """It ends among the points, or with the last profile; nothing joins the search any more."""
    policy, seen = nn.Linear(3, 4), []
    step = rose_compiler.compile(iteration, tune=True)
    step(policy, far, seen)
    tuning = step._last.unit.tuning()
    tuning.limit(10 * trips)
    for done in range(2, 14):
        step(policy, far, seen)
        assert tuning.settled is (done > trips)  # the first call was eager
    assert seen[-1] == (CORES, 2), "no cores of a point stay"
    assert far.where() == (CORES, 2)
    step.close()


def test_a_drift_has_cores_planned_anew(far: Hosted, threads: None) -> None:
    policy, seen = nn.Linear(3, 4), []
    step = rose_compiler.compile(iteration, tune=True)
    step(policy, far, seen)
    tuning = step._last.unit.tuning()
    chooser = tuning._chooser
    assert chooser is not None
    chooser.adopt(QUOTAS, "told to")
    for _ in range(3):
        step(policy, far, seen)
    assert len(seen[-1][0]) == 1  # in force
    chooser.drifts += 1
    seen.clear()
    for _ in range(7):  # the last one is profiled with the component beside the rest
        assert tuning.settled
        step(policy, far, seen)
    alone = [(len(cores), threads) for cores, threads in seen[:6]]
    assert alone == [(1, 1)] * 3 + [(2, 2)] * 3
    assert seen[6] == (CORES, 2)
    (planned,) = step._last.unit.cores.plans
    assert not tuning.settled
    rivals = {chooser.candidates[c] for c in set(chooser._queue)}
    # quotas that are in force already meet the same schedule without any
    assert rivals == {QUOTAS, replace(QUOTAS, cores=()) if planned == QUOTAS else planned}
    assert "operations are measured anew" in " ".join(step.explain().split())
    chooser._settle(chooser.best, "enough")
    for _ in range(3):
        step(policy, far, seen)
    assert tuning.settled, "one drift is answered once"
    step.close()
    assert far.where() == (CORES, 2)


def test_a_second_run_starts_with_the_cores_that_the_first_one_found(
    far: Hosted, threads: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROSE_CACHE", str(tmp_path))
    policy, seen = nn.Linear(3, 4), []

    def begun() -> Any:
        made = rose_compiler.compile(iteration, tune=True)
        for _ in range(2):
            made(policy, far, seen)
        return made

    step = begun()
    for _ in range(10):
        step(policy, far, seen)
    unit = step._last.unit
    (decision,) = unit.cores.plans
    chooser = unit.tuning()._chooser
    chooser._settle(chooser.eager, "for now")
    chooser.challenge(decision)
    for _ in range(200):
        if chooser.settled:
            break
        chooser.trial_s = 0.0
        chooser.record(chooser.current, 1.0 if chooser.current == chooser.eager else 0.5)
    chooser.challenge(Decision(groups=9, hosted=True))  # loses, and what is settled on is kept
    unit.tuning().record(None, 1.0)
    while not unit.tuning().settled:
        took = 0.5 if chooser.candidates[chooser.current] == decision else 2.0
        unit.tuning().record(chooser.candidates[chooser.current], took)
    planned = step.quota_plan
    step.close()
    assert far.where() == (CORES, 2)

    step = begun()
    assert step.settled
    assert step.decision == decision
    assert len(seen[-1][0]) == 1  # in the second iteration already: the first one is watched
    assert len(far.where()[0]) == 1
    assert step.quota_plan == planned
    step.close()

    (path,) = (p for p in tmp_path.iterdir() if p.suffix == ".json")
    good = path.read_text()
    backend = '"backend": "cores"', '"backend": "green-context"'
    for found, other in (backend, ('"host:far"', '"host:near"')):
        path.write_text(good.replace(found, other, 1))
        step = begun()
        assert not step.settled
        assert not path.exists()
        assert "it is deleted, and tuning begins anew" in " ".join(step.explain().split())
        step.close()


def test_after_a_drift_what_is_bound_meets_the_same_unbound() -> None:
    tuning = Tuning(Options(), 2, True, RemarkLog(), True)
    chooser = tuning._chooser
    assert chooser is not None
    bound = Decision(groups=2, cores=(("shards", 1),))
    tuning.follow_ups.bound = bind_shards
    chooser.adopt(bound, "told to")
    tuning.follow_ups._bind(chooser, tuning._adopted)
    assert not chooser.settled
    chooser._settle(chooser.candidates.index(bound), "enough")
    tuning.follow_ups._bind(chooser, tuning._adopted)
    assert chooser.settled
    chooser.drifts += 1
    tuning.follow_ups._bind(chooser, tuning._adopted)
    rivals = {chooser.candidates[c] for c in set(chooser._queue)}
    assert rivals == {bound, replace(bound, cores=())}


def test_bits_keep_their_thread_counts(far: Hosted, threads: None) -> None:
    policy, seen = nn.Linear(3, 4), []
    step = rose_compiler.compile(iteration, tune=True, numerics="bitwise")
    for _ in range(6):
        step(policy, far, seen)
    text = step.explain()
    assert "cores=" not in text
    assert "sums hang on them" in text
    step.close()


def test_quotas_that_the_machine_refuses_cost_the_quota_only(
    far: Hosted, threads: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "decision.json"
    Decision(hosted=True, cores=(("coordinator", 900), ("host:far", 1))).save(path)
    policy, seen = nn.Linear(3, 4), []
    step = rose_compiler.compile(iteration, tune=str(path))
    for _ in range(3):
        step(policy, far, seen)
    assert seen[-1] == (CORES, 2)
    assert far.where() == (CORES, 2)
    assert step.explain().count("not-available") == 1
    step.close()

    def refuse(*_: Any) -> Any:
        raise fail("quota-cores", "the system does not let these cores be assigned")

    monkeypatch.setattr(cores.Cores, "apply", refuse)
    QUOTAS.save(path)
    step = rose_compiler.compile(iteration, tune=str(path))
    for _ in range(3):
        step(policy, far, seen)
    assert "can't be had: the system does not let" in " ".join(step.explain().split())
    assert seen[-1] == (CORES, 2)
    step.close()


def test_a_fresh_process_is_bound_again(far: Hosted) -> None:
    quotas = CoreQuotas(RemarkLog())
    assert quotas.bind({"far": far}, QUOTAS) is None
    assert len(far.where()[0]) == 1
    assert quotas.bind({"far": far}, QUOTAS) is None
    far.restart()
    assert quotas.bind({"far": far}, QUOTAS) is None
    assert len(far.where()[0]) == 1
    assert quotas.bind({"far": far}, None) is None
    assert far.where() == (CORES, 2)


def test_a_candidate_joins_before_any_is_seen() -> None:
    chooser = Chooser([None, Decision()])
    chooser.offer(QUOTAS)
    chooser.record(0, 1.0)
    chooser.record(1, 1.0)
    assert chooser.candidates[chooser.current] == QUOTAS
    with pytest.raises(ValueError, match="under way"):
        chooser.offer(QUOTAS)


@pytest.mark.parametrize("found", [[["a", 0]], [["a", 1], ["a", 1]], ["a"], 3, [["", 1]]])
def test_malformed_cores_are_refused(found: Any) -> None:
    with pytest.raises(ConfigError):
        Decision.from_dict({"cores": found})
    assert Decision.from_dict({"cores": [["a", 2]]}).cores == (("a", 2),)


def test_shards_in_processes_are_bound_and_the_coordinator_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = ShardedEnv.split([Drift] * 4, shards=2, hosts="process")
    quotas, objects = CoreQuotas(RemarkLog()), {"envs": env}
    pids = [shard.host.pid for shard in env.shards()]

    def where() -> list[set[int]]:
        return [os.sched_getaffinity(pid) for pid in pids]

    plain = Decision(groups=2, rollout_threads=1)
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda pid: {0, 1})
    assert quotas.with_shards(plain, objects) == replace(plain, cores=(("shards", 1),))
    assert quotas.with_shards(Decision(), objects) is None  # nothing steps beside anything
    assert quotas.with_shards(None, objects) is None
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda pid: {0, 1, 2})
    assert quotas.with_shards(plain, objects) is None  # each has a core already
    three = quotas.with_shards(replace(plain, rollout_threads=2), objects)
    assert three is not None
    assert three.cores == (("shard:0", 1), ("shard:1", 1))
    monkeypatch.undo()
    assert quotas.bind(objects, replace(plain, cores=(("shards", 1),))) is None
    (first, second) = where()
    assert first == second
    assert len(first) == 1
    with quotas.entered():
        assert os.sched_getaffinity(0) == CORES
    assert quotas.bind(objects, replace(plain, cores=(("shard:0", 1), ("shard:1", 1)))) is None
    assert not set.intersection(*where())
    quotas.release()
    assert where() == [CORES, CORES]
    env.close()


def test_the_number_of_cores_that_is_expected_to_be_best_is_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    env = ShardedEnv.split([Drift] * 4, shards=4, hosts="process")
    quotas, objects = CoreQuotas(RemarkLog()), {"envs": env}
    plain = Decision(groups=2, rollout_threads=2)
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda pid: set(range(4)))

    def ahead(decision: Decision) -> float:
        return abs(2 - decision.cores[0][1])

    assert quotas.with_shards(plain, objects) == replace(plain, cores=(("shards", 3),))
    assert quotas.with_shards(plain, objects, ahead) == replace(plain, cores=(("shards", 2),))
    env.close()


def test_bound_shards_have_a_prediction_before_they_are_tried(training: Training) -> None:
    """It is in the plan and the remark, beside what was measured."""
    fast = rose_compiler.compile(iteration_of_shards, numerics="bitwise")
    training.run(fast)
    unit = fast._last.unit
    tuning, kept = unit.tuning(), Decision(groups=2, late="shadow")
    tuning.by_windows = False  # every schedule is tried, whatever the machine does meanwhile
    training.run(fast)
    chooser = tuning._chooser
    bound = replace(kept, cores=(("shards", 1),))
    tuning.follow_ups.bound = lambda one: None if one is None else replace(one, cores=bound.cores)
    while not chooser.trials[chooser.candidates.index(kept)]:
        mine = chooser.candidates[chooser.current]
        chooser.record(chooser.current, 0.6 if mine == kept else 0.9)
    chooser._settle(chooser.candidates.index(kept), "told to")
    tuning.follow_ups._bind(chooser, tuning._adopted)
    assert not chooser.settled
    plan = unit.cores.plans[bound]
    ratio = unit.forecast(bound) / unit.forecast(kept)
    assert plan.before_s == pytest.approx(0.6)
    assert plan.predicted_s == pytest.approx(0.6 * ratio)
    assert "predicted" in plan.explain()
    while not tuning.settled:
        mine = chooser.candidates[chooser.current]
        tuning.record(mine, 0.5 if mine == bound else 0.6)
    assert tuning.chosen == bound
    assert fast.quota_plan == plan
    text = " ".join(fast.explain().split())
    assert f"predicted {1e3 * plan.predicted_s:.3g} ms an iteration with these cores" in text
    assert "measured 500 ms" in text
    fast.close()


def test_what_another_schedule_bound_is_not_renewed(
    monkeypatch: pytest.MonkeyPatch, far: Hosted
) -> None:
    monkeypatch.setattr(Hosted, "rose_limit", lambda *_: False)  # its libraries count by themselves
    moved: list[str] = []
    monkeypatch.setattr(cores, "move", lambda fixed, *_: moved.extend(fixed) or [])
    env = ShardedEnv.split([Drift] * 2, shards=2, hosts="process")
    quotas, objects = CoreQuotas(RemarkLog()), {"far": far, "envs": env}
    assert quotas.bind(objects, QUOTAS) is None
    assert quotas.bind(objects, Decision(hosted=True)) is None
    assert quotas.bind(objects, Decision(groups=2, cores=(("shards", 1),))) is None
    quotas.renew()
    assert moved == []
    assert quotas.bind(objects, QUOTAS) is None
    quotas.renew()
    assert moved == ["host:far"]
    quotas.release()
    env.close()


def test_what_is_settled_on_meets_the_same_with_bound_shards() -> None:
    tuning = Tuning(Options(), 2, True, RemarkLog(), True)
    tuning.follow_ups.bound = bind_shards
    assert tuning._chooser is not None
    for _ in range(400):
        decision = tuning.next()
        fast = decision is not None and decision.groups == 2 and decision.defer
        bound = decision is not None and bool(decision.cores)
        seconds = 1.0 if not fast else 0.5 if not bound else 0.4
        tuning._chooser.record(tuning._chooser.candidates.index(decision), seconds)
        if tuning.settled:
            tuning.follow_ups._bind(tuning._chooser, tuning._adopted)
        if tuning.settled:
            break
    tuning.interrupted()  # nothing watches optimizers any more
    assert tuning.chosen is not None
    assert tuning.chosen.cores == (("shards", 1),)
