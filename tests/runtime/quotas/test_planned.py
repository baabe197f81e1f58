"""Components that can't be moved start under the plan that an earlier run has saved."""

from __future__ import annotations

import os
import signal
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import rose_compiler
from rose_compiler.api.process_quotas import ProcessQuotas
from rose_compiler.api.profiling import Profiling
from rose_compiler.base.decision import Decision
from rose_compiler.base.errors import FactoryError, QuotaError
from rose_compiler.base.machine import detect_cpu, load_machine
from rose_compiler.base.quota import QuotaPlan
from rose_compiler.base.remarks import RemarkLog
from rose_compiler.runtime.hosts import making
from rose_compiler.runtime.hosts.hosted import Hosted
from rose_compiler.runtime.quotas import Device, MpsPercentage, all_backends
from rose_compiler.runtime.quotas.moves import move
from rose_compiler.runtime.quotas.planned import planned
from tests.runtime.quotas.fake_mps import Fake
from tests.runtime.quotas.parts import Fixed

PERCENT = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
GPU = Device("GPU-1", "NVIDIA H200", (9, 0), 132, 4.8e12, 13010)
H200 = load_machine("h200")
PLAN = QuotaPlan.divide("mps-percentage", H200, {"coordinator": 8, "host:sim": 4, "host:net": 2})


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    made = Fake(tmp_path)
    mps = MpsPercentage(str(made.binary), lambda: [GPU], timeout=60.0, grace=0.2)
    monkeypatch.setattr(making, "planned", partial(planned, backends=lambda: [mps]))
    return made


def between(quotas: ProcessQuotas, objects: dict[str, Any]) -> None:
    """A call of a compiled function begins, of a schedule that is settled on."""
    tuning: Any = SimpleNamespace(drifts=0, settled=True, best=Decision(), entry=None)
    quotas.between(objects, tuning, Profiling(), "auto", None)


def test_the_next_start_is_under_the_plan_that_this_one_waits_for(
    fake: Fake, tmp_path: Path
) -> None:
    path, log = tmp_path / "quotas.json", RemarkLog()
    with rose_compiler.hosted(Fixed, name="sim", environment=str(path)) as sim:
        assert sim.seen(PERCENT) is None
        assert "there is no plan at" in sim.rose_remarks[0].why
        (missed,) = move({"host:sim": sim}, {"host:sim": PLAN.environment("host:sim")}, "sms")
        assert "`hosted(..., environment=file)`" in str(missed.allow)
    assert fake.commands == []
    PLAN.save(path)
    quotas = ProcessQuotas(log)
    with rose_compiler.hosted(Fixed, name="sim", environment=path) as sim:
        with rose_compiler.hosted(Fixed, name="net", environment=PLAN) as net:
            for part in (sim, net):
                assert part.seen(PERCENT) == str(PLAN.percentage(f"host:{part.name}"))
                assert part.seen("CUDA_VISIBLE_DEVICES") == "GPU-1"
            assert sim.seen("OMP_NUM_THREADS") == "1"
            between(quotas, {"sim": sim, "net": net})
            between(quotas, {"sim": sim, "net": net})
            assert quotas.plan == PLAN
            assert [remark.code for remark in log] == ["moved"]
            quotas.release()
            assert sim.rose_planned is net.rose_planned
        assert "quit" not in fake.commands, "one component rests on it yet"
        sim.restart()
        assert sim.seen(PERCENT) == str(PLAN.percentage("host:sim"))
        daemon = sim.rose_planned._applied.daemon._process
        os.kill(daemon.pid, signal.SIGKILL)
        daemon.wait()
        between(quotas, {"sim": sim})
        between(quotas, {"sim": sim})
        assert quotas.plan is None
        assert [remark.code for remark in log] == ["moved", "not-available"]
        assert sim.step() == 1, "it goes on"
        sim.restart()
        assert sim.seen(PERCENT) is None, "there is nothing left to rest on"
    assert fake.commands.count("start -f") == 1


def test_a_plan_that_can_not_be_had_costs_the_quota_only(fake: Fake, tmp_path: Path) -> None:
    def why(**options: Any) -> str:
        with rose_compiler.hosted(Fixed, **options) as made:
            if options.get("host") != "inline":
                assert made.step() == 1
            return " ".join(remark.why for remark in made.rose_remarks)

    fake.mode("fails to start")
    assert "the plan was refused: " in why(name="sim", environment=PLAN)
    only = {"backends": lambda: all_backends()}
    found, (remark,) = planned(PLAN, "host:sim", **only)
    assert found is None
    assert "mps-percentage is passed over: " in remark.why
    (remark,) = planned(PLAN, "host:simulator", **only)[1]
    assert "the plan is for coordinator, host:sim, host:net; `name=`" in remark.why
    green = QuotaPlan.divide("green-context", H200, {"coordinator": 8, "host:sim": 4})
    assert "belong to streams" in planned(green, "host:sim", **only)[1][0].why
    assert why(host="inline", environment=PLAN) == ""
    (tmp_path / "quotas.json").write_text("{}")
    with pytest.raises(QuotaError, match="quota-file"):
        rose_compiler.hosted(Fixed, name="sim", environment=tmp_path / "quotas.json")


def test_what_does_not_start_leaves_nothing_behind(fake: Fake) -> None:
    lock = threading.Lock()
    with pytest.raises(FactoryError):
        rose_compiler.hosted(lambda: lock, name="sim", environment=PLAN)
    assert "quit" in fake.commands


def iteration(sim: Hosted, log: list[int]) -> None:
    """A step, and what it gave."""
    log.append(sim.step())


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core can't be divided")
def test_threads_that_libraries_count_are_there_from_the_start(tmp_path: Path) -> None:
    plan = QuotaPlan.divide("cores", detect_cpu(), {"coordinator": 1, "host:sim": 1})
    path, log = tmp_path / "decision.json", []
    Decision(hosted=True, cores=(("coordinator", 1), ("host:sim", 1))).save(path)
    with rose_compiler.hosted(Fixed, name="sim", threads=2, environment=plan) as sim:
        pid = sim.pid
        assert sim.seen("OMP_NUM_THREADS") == "1"
        step = rose_compiler.compile(iteration, tune=str(path))
        for _ in range(4):
            step(sim, log)
        assert (sim.pid, log) == (pid, [1, 2, 3, 4])
        assert "waits for the next start" not in " ".join(step.explain().split())
        step.close()
