"""The core-quota benchmark in small: it runs under a plan, and its tasks are all measured."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from bench.quotas import Loop, Simulator, Sizes, tasks
from rose_compiler.base.machine import detect_cpu
from rose_compiler.base.quota import QuotaPlan

SMALL = Sizes(envs=8, width=16, substeps=2, hidden=16, steps=2)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_loop_runs_under_its_quotas() -> None:
    allowed = os.sched_getaffinity(0)
    loop = Loop(SMALL, QuotaPlan.divide("cores", detect_cpu(), {"sim": 1, "policy": 1}))
    loop.iteration()
    assert set(loop.schedule.end) == {task.name for task in tasks(SMALL.steps)}
    assert os.sched_getaffinity(loop.host.pid) == {min(allowed)}
    loop.close()
    assert os.sched_getaffinity(0) == allowed  # the policy's thread has its cores back
    # the same by hand, in this process
    simulator = Simulator(SMALL)
    obs = [np.zeros((SMALL.envs, SMALL.width), np.float32) for _ in range(2)]
    for _ in range(SMALL.steps):
        for half in range(2):
            with torch.no_grad():
                action = loop._policy(torch.from_numpy(obs[half].copy()))
            data, began, ended = simulator.step(half, action.numpy().tobytes())
            assert ended >= began
            obs[half] = np.frombuffer(data, np.float32).reshape(obs[half].shape)
    assert np.allclose(np.stack(obs), np.stack(loop._obs), atol=1e-5)
