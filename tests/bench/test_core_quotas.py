"""The core-quota benchmark in small: the variants compute the same, and the tuner sees all tasks."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from bench.quotas import Loop, Sizes, find, tasks

SMALL = Sizes(envs=8, width=16, substeps=2, hidden=16, steps=2)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_quotas_change_when_things_run_and_not_what_they_compute() -> None:
    plan, tuned = find(SMALL)
    assert plan.given == len(os.sched_getaffinity(0))
    assert {share.lane for share in plan.shares} == {"sim", "policy"}
    assert set(tuned.curves) == {task.name for task in tasks(SMALL.steps)}
    results = []
    for one in (None, plan):
        loop = Loop(SMALL, one)
        loop.iteration()
        assert set(loop.schedule.end) == set(tuned.curves)
        results.append(np.stack(loop._obs))
        loop.close()
    assert np.allclose(*results, atol=1e-5)
    assert len(os.sched_getaffinity(0)) == plan.capacity  # the thread has its cores back
