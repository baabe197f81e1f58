"""A compiled training whose simulator loses processes ends with eager's bits."""

from __future__ import annotations

import os
import signal

import torch

import rose_compiler
from rose_compiler.sim import ShardedEnv
from tests.api.loops import Training, differing, iteration
from tests.api.points import Stated


def test_a_compiled_training_goes_on_with_nothing_lost() -> None:
    training = Training()
    training.close()
    training.envs = ShardedEnv.split([Stated] * 8, shards=2, hosts="process", recover=True)
    training.obs = torch.as_tensor(training.envs.reset(seed=0)[0], dtype=torch.float32)
    fast = rose_compiler.compile(iteration, tune=False, numerics="bitwise")
    for number in range(2):
        training.run(fast, 2)
        os.kill(training.envs.shards()[number].pid, signal.SIGKILL)  # between two iterations
    training.run(fast)
    bits = training.bits()
    plain = Training()
    plain.run(iteration, 5)
    assert differing(bits, plain.bits()) == []
    text = " ".join(fast.explain().split())
    assert "a new process took over" in text
    assert {name for name, _ in fast.history} >= {"tile_batch"}
    fast.close()
    training.close()
    plain.close()
