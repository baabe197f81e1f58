"""Quotas that need another process: moved together between iterations, judged, and taken back."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rose_compiler
from rose_compiler.api.process_quotas import LEAST, ProcessQuotas
from rose_compiler.base.decision import Decision
from rose_compiler.base.machine import load_machine
from rose_compiler.base.quota import QuotaPlan
from rose_compiler.base.remarks import RemarkLog
from rose_compiler.runtime.hosts.hosted import Hosted
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


def driven(fake: Fake, parts: dict[str, Hosted], after: float) -> tuple[ProcessQuotas, RemarkLog]:
    """What a settled schedule does, whose iterations take 1 s at first and that long then."""
    log = RemarkLog()

    def backends() -> list[Any]:
        return [MpsPercentage(str(fake.binary), lambda: [GPU], timeout=60.0, grace=0.2)]

    quotas = ProcessQuotas(log, lambda: True, backends)
    quotas.record(9.0)
    quotas.boundary(parts, lambda: PLAN, False)  # a schedule that was not profiled yet
    for _ in range(2 * LEAST + 2):
        quotas.boundary(parts, lambda: PLAN, True)
        quotas.record(1.0 if quotas.plan is None else after)
    return quotas, log


def test_who_can_be_moved_is_and_keeps_its_state(fake: Fake, parts: dict[str, Hosted]) -> None:
    pids = {name: part.pid for name, part in parts.items()}
    quotas, log = driven(fake, parts, 0.5)
    assert parts["sim"].seen(PERCENT) == str(PLAN.percentage("host:sim"))
    assert parts["sim"].step() == 2
    assert (parts["net"].pid, parts["net"].step()) == (pids["net"], 2)
    assert (quotas.plan, quotas.pending) == (PLAN, PLAN)  # the one that stays waits for it
    codes = [(remark.kind, remark.code) for remark in log]
    assert codes == [("missed", "hosted-elsewhere"), ("applied", "moved")]
    assert log[1].gain == pytest.approx(0.5)
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
    assert "slower by 20%" in log[-1].why


def test_a_refusal_costs_the_quota_only(fake: Fake, parts: dict[str, Hosted]) -> None:
    fake.mode("fails to start")
    pid = parts["sim"].pid
    quotas, log = driven(fake, parts, 1.0)
    assert quotas.plan is None
    assert parts["sim"].pid == pid
    assert [remark.code for remark in log] == ["not-available"]


def iteration(sim: Any, x: Any, log: list[Any]) -> float:
    """A step beside other work."""
    a = sim.step(1.0)
    b = float((x * 2).sum())
    log.append(a)
    return b


def test_training_goes_on_when_the_daemon_has_gone(fake: Fake, parts: dict[str, Hosted]) -> None:
    quotas, log = driven(fake, parts, 0.5)
    assert quotas._applied is not None
    os.kill(quotas._applied.daemon._process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
    quotas._applied.daemon._process.wait()  # type: ignore[attr-defined]
    for _ in range(2):
        quotas.boundary(parts, lambda: PLAN, True)
    assert quotas.plan is None
    assert [r.code for r in log][2:] == ["not-available"]
    assert "quotas have gone" in log[-1].why
    assert parts["sim"].step() == 2
    quotas.release()
    assert parts["sim"].step() == 3


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
