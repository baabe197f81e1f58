"""Hosts under quotas: moved between iterations, and going on whatever happens to the quotas."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rose_compiler.base.errors import HostDied, QuotaError
from rose_compiler.base.machine import Machine, load_machine
from rose_compiler.base.quota import QuotaPlan
from rose_compiler.runtime.quotas import (
    Cores,
    Device,
    ManagedHosts,
    MpsPartition,
    MpsPercentage,
)
from tests.runtime.quotas.fake_mps import Fake
from tests.runtime.quotas.parts import Counter, Moody, Stuck

ALLOWED = sorted(os.sched_getaffinity(0))
H200 = load_machine("h200")
GPU = Device("GPU-1", "NVIDIA H200", (9, 0), 132, 4.8e12, 13010)
PERCENT = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    return Fake(tmp_path)


def backend(fake: Fake, kind: type[MpsPercentage] = MpsPercentage) -> MpsPercentage:
    return kind(str(fake.binary), lambda: [GPU], timeout=60.0, grace=0.2)


def plan(kind: str = "mps-percentage", **chunks: int) -> QuotaPlan:
    return QuotaPlan.divide(kind, H200, chunks)  # type: ignore[arg-type]


def test_hosts_start_with_their_quota_and_keep_their_state_when_it_changes(fake: Fake) -> None:
    factories = {"sim": Counter, "net": Stuck, "eval": Counter}
    first = plan(sim=4, net=8, eval=4)
    with ManagedHosts(factories, backend(fake), first, stateless=["eval"]) as hosts:
        assert hosts.check()
        assert hosts["sim"].call("seen", PERCENT) == str(first.percentage("sim"))
        assert [hosts["sim"].call("step") for _ in range(3)] == [1, 2, 3]
        assert [hosts[lane].call("step") for lane in ("net", "eval")] == [1, 1]
        pids = {lane: host.pid for lane, host in hosts.hosts.items()}
        second = plan(sim=2, net=10, eval=4)
        missed = hosts.change(second)
        assert [(r.code, "net" in r.why) for r in missed] == [("hosted-elsewhere", True)]
        assert "get_state" in (missed[0].allow or "")
        assert hosts.pending == second
        assert hosts["sim"].call("seen", PERCENT) == str(second.percentage("sim"))
        assert hosts["sim"].call("step") == 4  # it went on where it was
        assert hosts["sim"].pid != pids["sim"]
        assert hosts["net"].call("step") == 2
        assert hosts["net"].pid == pids["net"]
        assert hosts["eval"].pid == pids["eval"]  # its quota stayed the same
    assert fake.commands[-1] == "quit"


def test_a_component_that_does_not_take_over_stays_where_it_was(fake: Fake) -> None:
    with ManagedHosts({"sim": Moody}, backend(fake), plan(sim=4)) as hosts:
        assert hosts["sim"].call("step") == 1
        (missed,) = hosts.change(plan(sim=8))
        assert "sim stays in its old process: not today" in missed.why
        assert hosts["sim"].call("step") == 2


def test_a_refused_plan_leaves_hosts_without_quotas(fake: Fake) -> None:
    fake.mode("refuses")
    with ManagedHosts(
        {"sim": Counter}, backend(fake, MpsPartition), plan("mps-partition", sim=4)
    ) as hosts:
        assert [r.code for r in hosts.remarks] == ["not-available"]
        assert "mps-partition refused the plan" in hosts.remarks[0].why
        assert not hosts.check()
        assert hosts["sim"].call("seen", "CUDA_MPS_SM_PARTITION") is None
        assert hosts["sim"].call("step") == 1
        assert hosts.change(plan("mps-partition", sim=8)) == []


def test_partitions_wait_for_the_next_start(fake: Fake) -> None:
    with ManagedHosts(
        {"sim": Counter}, backend(fake, MpsPartition), plan("mps-partition", sim=4)
    ) as hosts:
        pid = hosts["sim"].pid
        assert hosts["sim"].call("seen", "CUDA_MPS_SM_PARTITION") == "GPU-1/p1"
        (missed,) = hosts.change(plan("mps-partition", sim=8))
        assert "partitions stay" in missed.why
        assert hosts.pending is not None
        assert hosts.pending.share("sim").units == 64
        assert hosts["sim"].pid == pid


def test_training_goes_on_when_the_daemon_dies(fake: Fake) -> None:
    with ManagedHosts({"sim": Counter}, backend(fake), plan(sim=4)) as hosts:
        assert hosts["sim"].call("step") == 1
        daemon = hosts._applied.daemon._process  # type: ignore[union-attr]
        daemon.kill()
        daemon.wait()
        assert not hosts.check()
        assert not hosts.check()
        assert [r.code for r in hosts.remarks] == ["not-available"]
        assert "the daemon exited" in hosts.remarks[0].why
        assert hosts["sim"].call("step") == 2


def test_a_killed_host_is_one_clear_error_and_the_quotas_are_taken_back(fake: Fake) -> None:
    with ManagedHosts({"sim": Counter, "net": Counter}, backend(fake), plan(sim=4, net=4)) as hosts:
        os.kill(hosts["sim"].pid, 9)
        with pytest.raises(HostDied, match="sim"):
            hosts["sim"].call("step")
        assert hosts["net"].call("step") == 1
    assert fake.commands[-1] == "quit"


def test_a_killed_client_s_work_is_ended_first(fake: Fake) -> None:
    with ManagedHosts({"sim": Counter}, backend(fake), plan(sim=4)) as hosts:
        pid = hosts["sim"].pid
        fake.clients(pid)
        hosts["sim"].kill()
        assert f"terminate_client 4711 {pid}" in fake.commands


def test_a_plan_without_a_share_for_each_lane_changes_nothing(fake: Fake) -> None:
    first = plan(sim=4)
    with ManagedHosts({"sim": Counter}, backend(fake), first) as hosts:
        with pytest.raises(QuotaError, match="no lane 'sim'"):
            hosts.change(plan(net=4))
        assert hosts.plan == first
        assert hosts.check()


def test_a_quota_below_the_minimum_is_refused_before_anything_starts() -> None:
    with pytest.raises(QuotaError, match="quota-minimum"):
        plan(sim=0)


@pytest.mark.skipif(len(ALLOWED) < 2, reason="needs two cores")
def test_cores_move_without_a_new_process_where_the_threads_stay_as_many() -> None:
    def on(*cores: int) -> QuotaPlan:
        both = QuotaPlan.divide("cores", Machine("m", 2), {"a": 1, "b": 1})
        swapped = QuotaPlan.divide("cores", Machine("m", 2), {"b": 1, "a": 1})
        return both if cores == (0, 1) else swapped

    factories = {"a": Stuck, "b": Stuck}
    with ManagedHosts(factories, Cores(cgroups=None), on(0, 1)) as hosts:
        pids = {lane: host.pid for lane, host in hosts.hosts.items()}
        assert os.sched_getaffinity(pids["a"]) == {ALLOWED[0]}
        assert hosts.change(on(1, 0)) == []
        assert {lane: host.pid for lane, host in hosts.hosts.items()} == pids
        assert os.sched_getaffinity(pids["a"]) == {ALLOWED[1]}
        assert hosts.pending is None
