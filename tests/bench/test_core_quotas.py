"""The core-quota benchmark in small: overlapped, it computes what the loop as written does."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import torch

from bench.quotas import HALVES, Loop, Simulator, Sizes, fixed, iteration, make_policy
from rose_compiler.base.decision import Decision

SMALL = Sizes(envs=8, width=16, substeps=2, hidden=16, steps=3)


def test_the_overlapped_loop_computes_what_is_written(tmp_path: Path) -> None:
    step = fixed(Decision(hosted=True), str(tmp_path))
    with ExitStack() as stack:
        stack.callback(step.close)
        loop = Loop(SMALL, step, stack)
        found = [loop.iteration() for _ in range(3)]
        assert step.source.count(".submit(") == HALVES
    simulator, policy = Simulator(SMALL), make_policy(SMALL)
    start = torch.zeros(SMALL.envs, SMALL.width)
    for last in found:
        wanted = iteration(policy, simulator, start, start, SMALL.steps)  # type: ignore[arg-type]
        assert torch.allclose(wanted, last, atol=1e-5)
