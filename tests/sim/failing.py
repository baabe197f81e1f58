"""Simulators with a shard that fails, and what has to be gone once one has."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sim_envs import Faulty

from rose_compiler.base.errors import RuntimeFault
from rose_compiler.sim import ShardedEnv
from rose_compiler.sim.process_shard import ProcessShard
from tests.awake import until

HOSTS = ("inline", "thread", "process")
ACTIONS = np.zeros((3, 2), np.float32)


def faulty(how: str, hosts: Any, **kwargs: Any) -> ShardedEnv:
    fns = [partial(Faulty, "none", 0), partial(Faulty, how, 1), partial(Faulty, "none", 2)]
    env = ShardedEnv.split(fns, shards=3, hosts=hosts, **kwargs)
    env.reset(seed=0)
    for _ in range(2):
        env.step(ACTIONS)
    return env


def pids(env: ShardedEnv) -> list[int]:
    return [shard.host.pid for shard in env.shards() if isinstance(shard, ProcessShard)]


def gone(pid: int, within: float = 5.0) -> bool:
    return until(lambda: not Path(f"/proc/{pid}").exists(), within)


def threads_left(within: float = 5.0) -> list[str]:
    def left() -> list[str]:
        return [t.name for t in threading.enumerate() if t.name.startswith("rose-shard")]

    until(lambda: not left(), within)
    return left()


def assert_let_go(env: ShardedEnv) -> None:
    assert all(gone(pid) for pid in pids(env))
    assert threads_left() == []


def assert_lost(env: ShardedEnv, named: str) -> None:
    for use in (lambda: env.step(ACTIONS), env.reset, lambda: env.call("scale", 1.0)):
        with pytest.raises(RuntimeFault, match="its simulator is lost") as caught:
            use()
        assert named in str(caught.value)
    assert_let_go(env)
    env.close()
