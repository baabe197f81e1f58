from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from rose_compiler.base.errors import QuotaError
from rose_compiler.base.machine import Machine
from rose_compiler.base.quota import QuotaPlan
from rose_compiler.runtime.hosts import ProcessHost
from rose_compiler.runtime.quotas import Cores, all_backends, usable

ALLOWED = sorted(os.sched_getaffinity(0))
two_cores = pytest.mark.skipif(len(ALLOWED) < 2, reason="needs two cores")


def plan(**chunks: int) -> QuotaPlan:
    return QuotaPlan.divide("cores", Machine("m", cores=sum(chunks.values())), chunks)


def test_cores_are_found_here_and_the_rest_is_remarked_on() -> None:
    found, remarks = usable(all_backends())
    assert "cores" in [backend.name for backend in found]
    absent = [b for b in all_backends() if b.name not in [f.name for f in found]]
    assert len(remarks) == len(absent)
    assert all(r.code == "not-available" for r in remarks)


@two_cores
def test_a_process_and_the_threads_it_makes_stay_on_the_lanes_cores() -> None:
    code = (
        "import os, sys, threading\n"
        "sys.stdin.readline()\n"
        "seen = []\n"
        "t = threading.Thread(target=lambda: seen.append(sorted(os.sched_getaffinity(0))))\n"
        "t.start(); t.join()\n"
        "print(seen[0], sorted(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS'])\n"
    )
    with Cores(cgroups=None).apply(plan(sim=1, net=1)) as applied:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, **applied.environment("net")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        applied.started("net", process.pid)
        out, _ = process.communicate("go\n", timeout=60)
    assert out.strip() == f"[{ALLOWED[1]}] [{ALLOWED[1]}] 1"


@two_cores
def test_a_process_host_runs_on_its_quota() -> None:
    with Cores(cgroups=None).apply(plan(sim=1, net=1)) as applied:
        host = ProcessHost(list, environment=applied.environment("sim"))
        applied.started("sim", host.pid)
        host.ready()
        assert os.sched_getaffinity(host.pid) == {ALLOWED[0]}
        host.close()


@two_cores
def test_a_thread_is_bound_while_it_is_inside() -> None:
    seen: list[object] = []

    def lane() -> None:
        torch.set_num_threads(2)
        with applied.entered("sim"):
            seen.append((sorted(os.sched_getaffinity(0)), torch.get_num_threads()))
        seen.append((sorted(os.sched_getaffinity(0)), torch.get_num_threads()))

    before = torch.get_num_threads()
    with Cores(cgroups=None).apply(plan(net=1, sim=1)) as applied:
        thread = threading.Thread(target=lane)
        thread.start()
        thread.join()
        applied.check()
    assert seen == [([ALLOWED[1]], 1), (ALLOWED, 2)]
    assert sorted(os.sched_getaffinity(0)) == ALLOWED
    torch.set_num_threads(before)


def test_more_cores_than_there_are_is_an_error() -> None:
    with pytest.raises(QuotaError, match="quota-cores"):
        Cores().apply(plan(sim=len(ALLOWED), net=1))
    with pytest.raises(QuotaError, match="did you mean 'sim'"):
        Cores(cgroups=None).apply(plan(sim=1)).started("sin", os.getpid())


def test_a_process_that_has_gone_is_an_error() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    with pytest.raises(QuotaError, match="can't be bound"):
        Cores(cgroups=None).apply(plan(sim=1)).started("sim", process.pid)


def test_a_cgroup_bounds_the_cores_where_one_may_be_made(tmp_path: Path) -> None:
    line = Path("/proc/self/cgroup").read_text().splitlines()[-1]
    own = tmp_path / line.rpartition(":")[2].lstrip("/")
    own.mkdir(parents=True, exist_ok=True)
    (tmp_path / "cgroup.controllers").write_text("cpu")
    assert Cores(tmp_path).probe().why.endswith("without cgroup limits")
    (own / "cgroup.subtree_control").write_text("cpu memory")
    assert Cores(tmp_path).probe().why.endswith("with cgroup limits")
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    applied = Cores(tmp_path).apply(plan(sim=1))
    applied.started("sim", process.pid)
    (group,) = own.glob("rose-*")
    assert (group / "cpu.max").read_text() == "100000 100000"
    assert (group / "cgroup.procs").read_text() == str(process.pid)
    process.communicate(b"\n")
    applied.close()
    assert (own / "cgroup.procs").read_text() == str(process.pid)  # handed back to the parent


def test_a_plan_of_another_back_end_is_refused() -> None:
    gpu = QuotaPlan.divide("green-context", Machine("g", 1, 16, 8), {"a": 1})
    with pytest.raises(QuotaError, match="given to cores"):
        Cores().apply(gpu)
