"""Quotas that need another process: moved together between iterations, judged, and taken back."""

from __future__ import annotations

import itertools
import math
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import rose_compiler
from rose_compiler.api.cache import Entry
from rose_compiler.api.process_quotas import ProcessQuotas
from rose_compiler.api.profiling import PROFILED, WARM_UP, Profiling
from rose_compiler.base.decision import Decision
from rose_compiler.base.machine import load_machine
from rose_compiler.base.quota import QuotaPlan
from rose_compiler.base.remarks import RemarkLog
from rose_compiler.runtime.hosts.hosted import Hosted
from rose_compiler.runtime.hosts.moving import starts_with
from rose_compiler.runtime.quotas import Device, MpsPercentage
from tests.runtime.quotas.fake_mps import Fake
from tests.runtime.quotas.parts import Counter, Plain, Stuck

PERCENT = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
GPU = Device("GPU-1", "NVIDIA H200", (9, 0), 132, 4.8e12, 13010)
PLAN = QuotaPlan.divide(
    "mps-percentage",
    load_machine("h200"),
    {"coordinator": 8, "host:sim": 4, "host:net": 4},
)
OTHER = QuotaPlan.divide(
    "mps-percentage",
    load_machine("h200"),
    {"coordinator": 4, "host:sim": 8, "host:net": 4},
)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    return Fake(tmp_path)


@pytest.fixture
def parts() -> Iterator[dict[str, Hosted]]:
    with rose_compiler.hosted(Counter) as sim, rose_compiler.hosted(Stuck) as net:
        sim.step()
        net.step()
        yield {"sim": sim, "net": net}


def made(fake: Fake) -> tuple[ProcessQuotas, RemarkLog]:
    log = RemarkLog()

    def backends() -> list[Any]:
        return [MpsPercentage(str(fake.binary), lambda: [GPU], timeout=60.0, grace=0.2)]

    return ProcessQuotas(log, lambda: True, backends), log


class Purse:
    """So many seconds for tuning."""

    def __init__(self, seconds: float = math.inf) -> None:
        self.left = seconds

    def spend(self, seconds: float, iterations: int | None = 1) -> None:
        self.left -= seconds

    def allows(self, seconds: float) -> bool:
        return seconds <= self.left


def run(
    quotas: ProcessQuotas,
    parts: dict[str, Hosted],
    plan: QuotaPlan,
    took: Callable[[], float],
    seconds: float = math.inf,
) -> list[QuotaPlan | None]:
    """Iterations of a settled schedule until nothing is compared any more: what was in force in
    each."""
    purse = Purse(seconds)
    quotas.boundary(parts, lambda *_: plan, True, purse)
    seen = []
    while quotas.comparing:
        seen.append(quotas.plan)
        assert len(seen) < 200
        taken = took()
        quotas.record(taken)
        purse.spend(taken)
        quotas.boundary(parts, lambda *_: plan, True, purse)
    return seen


def driven(fake: Fake, parts: dict[str, Hosted], after: float) -> tuple[ProcessQuotas, RemarkLog]:
    """What a settled schedule does, whose iterations take 1 s without quotas and that long with."""
    quotas, log = made(fake)
    quotas.record(9.0)
    quotas.boundary(parts, lambda *_: PLAN, False, Purse())  # a schedule that was not profiled yet
    assert not quotas.comparing
    run(quotas, parts, PLAN, lambda: 1.0 if quotas.plan is None else after)
    return quotas, log


def test_who_can_be_moved_is_and_keeps_its_state(
    fake: Fake, parts: dict[str, Hosted], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)  # before there was a daemon
    pids = {name: part.pid for name, part in parts.items()}
    quotas, log = driven(fake, parts, 0.5)
    assert parts["sim"].seen(PERCENT) == str(PLAN.percentage("host:sim"))
    assert parts["sim"].step() == 2
    assert (parts["net"].pid, parts["net"].step()) == (pids["net"], 2)
    assert (quotas.plan, quotas.pending) == (PLAN, PLAN)  # the one that stays waits for it
    assert "2.000 [2.000, 2.000] times the speed in 4 pairs of blocks" in log[-1].why
    codes = [(remark.kind, remark.code) for remark in log]
    assert codes == [("note", "turns"), ("missed", "hosted-elsewhere"), ("applied", "moved")]
    assert log[2].gain == pytest.approx(0.5)
    assert not quotas._tell_of_turns(owned=False), "this process is a client like any other"
    quotas.release()
    assert parts["sim"].seen(PERCENT) is None  # moved back before the daemon ends
    assert parts["sim"].step() == 3
    assert fake.commands[-1] == "quit"
    quotas.release()


def test_what_makes_iterations_slower_is_taken_back(fake: Fake, parts: dict[str, Hosted]) -> None:
    quotas, log = driven(fake, parts, 1.2)
    assert quotas.plan is None
    assert parts["sim"].seen(PERCENT) is None
    assert parts["sim"].step() == 2
    assert log[-1].code == "measured-slower"
    assert (
        "0.833 [0.833, 0.833] times the speed in 2 pairs of blocks, and taken back" in log[-1].why
    )
    assert fake.commands[-1] == "quit"


def test_plans_take_turns_in_pairs(fake: Fake, parts: dict[str, Hosted]) -> None:
    """A B B A, twice; a machine that gets slower all the time decides nothing."""
    quotas, log = made(fake)
    seconds = iter(1.0 * 1.01**k for k in range(200))
    seen = run(quotas, parts, PLAN, lambda: next(seconds))
    turns = [plan for plan, _ in itertools.groupby(seen)]
    assert turns[:5] == [None, PLAN, None, PLAN, None]
    assert quotas.plan is None
    assert parts["sim"].step() == 2
    assert log[-1].code == "measured-slower"


def test_a_drift_has_a_plan_made_anew(fake: Fake, parts: dict[str, Hosted]) -> None:
    quotas, log = driven(fake, parts, 0.5)
    sim = parts["sim"]
    quotas.boundary(parts, lambda *_: OTHER, True, Purse())
    assert not quotas.comparing, "once, while nothing changes"
    quotas.again()
    seen = run(quotas, parts, OTHER, lambda: 1.0 if quotas.plan is PLAN else 0.8)
    assert set(seen) == {PLAN, OTHER}
    assert quotas.plan is OTHER
    assert sim.seen(PERCENT) == str(OTHER.percentage("host:sim"))
    assert sim.step() == 2
    quotas.again()
    assert set(run(quotas, parts, PLAN, lambda: 1.2 if quotas.plan is PLAN else 0.8)) == {
        PLAN,
        OTHER,
    }
    assert quotas.plan is OTHER, "the one that was in force comes back"
    assert sim.seen(PERCENT) == str(OTHER.percentage("host:sim"))
    pid = sim.pid
    quotas.again()
    assert run(quotas, parts, OTHER, lambda: 1.0) == []
    assert sim.pid == pid
    assert log[-1].code == "replanned"
    quotas.release()
    assert sim.seen(PERCENT) is None
    assert sim.step() == 3
    assert fake.commands.count("quit") == 1


def test_a_comparison_takes_no_more_than_the_time_for_tuning(
    fake: Fake, parts: dict[str, Hosted]
) -> None:
    quotas, log = made(fake)
    seen = run(quotas, parts, PLAN, lambda: 1.0, 14.0)
    assert 8 < len(seen) <= 14, "moving takes of it, too"
    assert seen[8] is PLAN
    assert quotas.plan is None
    assert "not compared to the end" in log[-1].why
    assert (log[-1].code, log[-1].allow) == ("switched-off", "a larger `tune_budget=`")
    assert parts["sim"].seen(PERCENT) is None
    assert parts["sim"].step() == 2
    quotas.again()
    assert run(quotas, parts, PLAN, lambda: 1.0, 1.0) == []
    assert (log[-1].code, log[-1].allow) == ("switched-off", "a larger `tune_budget=`")
    quotas.again()
    quotas.iteration_s = 1.0
    quotas.boundary(parts, lambda *_: PLAN, True, Purse(71.0))
    assert not quotas.comparing, "64 iterations of a second, and 8 more behind changes"
    assert log[-1].why.endswith("are not compared: the time for tuning is over")
    quotas.again()
    quotas.boundary(parts, lambda *_: PLAN, True, Purse(73.0))
    assert quotas.comparing


def test_a_search_that_begins_ends_the_comparison(fake: Fake, parts: dict[str, Hosted]) -> None:
    quotas, _ = made(fake)
    quotas.boundary(parts, lambda *_: PLAN, True, Purse())
    while quotas.plan is None:
        quotas.record(1.0)
        quotas.boundary(parts, lambda *_: PLAN, True, Purse())
    quotas.boundary(parts, lambda *_: PLAN, False, Purse())
    assert not quotas.comparing
    assert quotas.plan is None
    assert parts["sim"].seen(PERCENT) is None
    assert parts["sim"].step() == 2


def test_a_refusal_costs_the_quota_only(fake: Fake, parts: dict[str, Hosted]) -> None:
    fake.mode("fails to start")
    pid = parts["sim"].pid
    quotas, log = driven(fake, parts, 1.0)
    assert quotas.plan is None
    assert parts["sim"].pid == pid
    assert [remark.code for remark in log] == ["not-available"]


def test_a_plan_that_is_refused_does_not_come_back(
    fake: Fake, parts: dict[str, Hosted], tmp_path: Path
) -> None:
    """One of an earlier run is deleted, and this one may look for another."""

    def kept() -> Entry:
        entry = Entry(tmp_path, "f", {}, RemarkLog())
        assert entry.load([Decision()]) == 0
        return entry

    first = Entry(tmp_path, "f", {}, RemarkLog())
    first.store(Decision(), "won")
    plan = QuotaPlan.divide("mps-percentage", GPU.machine(), {"coordinator": 8, "host:sim": 8})
    first.keep("processes", plan)
    schedule: Any = SimpleNamespace(
        emitted=SimpleNamespace(plan=SimpleNamespace(lanes=("host:sim",)))
    )
    fake.mode("fails to start")
    quotas, log = made(fake)
    quotas._found = lambda: [GPU]
    quotas._earlier(parts, entry := kept(), schedule)
    assert [remark.code for remark in log] == ["not-available"]
    assert (quotas.plan, entry.sms, kept().sms) == (None, {}, {})
    quotas.boundary(parts, lambda *_: PLAN, True, Purse())
    assert quotas.comparing


def iteration(sim: Any, x: Any, log: list[Any]) -> float:
    """A step beside other work."""
    a = sim.step(1.0)
    b = float((x * 2).sum())
    log.append(a)
    return b


def test_training_goes_on_when_the_daemon_has_gone(fake: Fake, parts: dict[str, Hosted]) -> None:
    quotas, log = driven(fake, parts, 0.5)
    sim = parts["sim"]
    starts_with(sim, {"OMP_NUM_THREADS": "1"}, "cores")
    sim.restart()
    assert sim.seen(PERCENT) == str(PLAN.percentage("host:sim")), "the plan in force"
    assert sim.seen("OMP_NUM_THREADS") == "1"
    sim.step()
    sim.rose_guard(stateless=False)
    sim.rose_boundary()
    os.kill(sim.pid, signal.SIGKILL)
    assert sim.seen(PERCENT) == str(PLAN.percentage("host:sim")), "of who takes over too"
    assert quotas._applied is not None
    os.kill(quotas._applied.daemon._process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
    quotas._applied.daemon._process.wait()  # type: ignore[attr-defined]
    for _ in range(2):
        quotas.boundary(parts, lambda *_: PLAN, True, Purse())
    assert quotas.plan is None
    assert [r.code for r in log][2:] == ["not-available"]
    assert "quotas have gone" in log[-1].why
    assert sim.step() == 2
    os.kill(sim.pid, signal.SIGKILL)
    assert sim.seen(PERCENT) is None, "there is nothing left to rest on"
    assert sim.seen("OMP_NUM_THREADS") == "1", "its threads are another matter"
    quotas.release()
    assert sim.step() == 3


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core can't be divided")
def test_threads_of_other_libraries_are_counted_anew_in_a_new_process(tmp_path: Path) -> None:
    path, log = tmp_path / "decision.json", []
    Decision(hosted=True, cores=(("coordinator", 1), ("host:sim", 1))).save(path)
    with rose_compiler.hosted(Plain, threads=2) as sim:
        pid = sim.pid
        step = rose_compiler.compile(iteration, tune=str(path))
        for _ in range(4):
            step(sim, torch.ones(3), log)
        assert sim.seen() == ("1", 1, 4)
        assert sim.pid != pid
        moved = sim.pid
        for _ in range(3):
            step(sim, torch.ones(3), log)
        assert sim.pid == moved
        assert log == [1.0 + k for k in range(1, 8)]
        step.close()


def test_a_drift_of_the_schedule_is_one_of_its_quotas(parts: dict[str, Hosted]) -> None:
    """After one, what is settled on is profiled anew, and asked for a plan once more."""
    asked: list[str] = []
    quotas = ProcessQuotas(RemarkLog(), lambda: asked.append("device") is not None)
    profiling, decision = Profiling(), Decision(hosted=True)
    drifts = SimpleNamespace(drifts=0, settled=True, best=decision, steady=lambda: None, entry=None)
    tuning: Any = drifts

    def iterations(count: int) -> None:
        for _ in range(count):
            quotas.between(parts, tuning, profiling, "auto", None)
            profiling.wanted(decision, True)

    iterations(2 * (WARM_UP + PROFILED))
    assert asked == ["device"]
    drifts.drifts = 1
    iterations(WARM_UP + PROFILED)
    assert asked == ["device"], "the profile that is there is from before"
    iterations(WARM_UP + PROFILED)
    assert asked == ["device"] * 2
