"""Building a sharded simulator: factories that fail, parts that don't fit, what a worker loads."""

from __future__ import annotations

import os
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from failing import ACTIONS, faulty, pids, threads_left
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from sim_envs import Maze, Spy, Walk

from rose_compiler.base.errors import ConfigError, FactoryError, HostDied
from rose_compiler.sim import ShardedEnv


def bad() -> Any:
    raise LookupError("no model of that name")


def test_a_factory_that_raises() -> None:
    with pytest.raises(LookupError, match="no model"):
        ShardedEnv([Walk, bad])
    for hosts in ("thread", "process"):
        factory = bad if hosts == "thread" else _local_bad()
        with pytest.raises(FactoryError, match="'shard 1' raised LookupError") as caught:
            ShardedEnv([Walk, factory], hosts=hosts)  # type: ignore[arg-type]
        assert isinstance(caught.value.__cause__, LookupError)
        assert threads_left() == []


def _local_bad() -> Any:
    return lambda: (_ for _ in ()).throw(LookupError("no model of that name"))


def test_a_factory_that_does_not_pickle() -> None:
    lock = threading.Lock()

    def build() -> Any:
        with lock:
            return Walk()

    with pytest.raises(FactoryError, match=r"captured variable 'lock' of .*build"):
        ShardedEnv([[Walk, build]], hosts="process")
    ShardedEnv([[Walk, build]], hosts="thread").close()


def test_shards_that_do_not_fit_together() -> None:
    built = SyncVectorEnv([Walk], autoreset_mode=AutoresetMode.SAME_STEP)
    cases: list[tuple[Any, dict[str, Any], str]] = [
        ([Walk, Maze], {}, "another observation space"),
        ([Walk, built], {}, "another autoreset mode"),
        ([built], {"autoreset_mode": "NextStep"}, "another autoreset mode"),
        ([], {}, "needs a list of shards"),
        (Walk, {}, "needs a list of shards"),
        ([Walk, []], {}, "shard 1 is a list that can't be built"),
        ([[Walk, 3]], {}, "can't be built"),
        ([[partial(SyncVectorEnv, [Walk])]], {}, "does not build a single environment"),
        ([lambda: 3], {}, "a shard is no environment"),
        ([3], {}, "can't be placed"),
        ([built], {"hosts": "process"}, "can't be placed in process hosts"),
        ([Walk], {"hosts": "ray"}, "does not know these hosts"),
    ]
    for shards, kwargs, said in cases:
        with pytest.raises(ConfigError, match=said):
            ShardedEnv(shards, **kwargs)
    with pytest.raises(ConfigError, match="3 environments can't be split into 4 shards"):
        ShardedEnv.split([Walk] * 3, shards=4)


def test_a_mismatch_found_after_the_workers_started_leaves_none_behind() -> None:
    with pytest.raises(ConfigError, match="another observation space"):
        ShardedEnv([Walk, Maze], hosts="process")
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children]
    assert not any(b"rose_compiler.runtime.hosts.worker" in command for command in commands)


def test_workers_do_not_load_torch() -> None:
    env = ShardedEnv.split([Spy] * 2, shards=2, hosts="process", environment={"ROBOT": "arm"})
    env.reset(seed=0)
    env.step(ACTIONS[:2])
    assert env.call("loaded") == (["gymnasium", "numpy"],) * 2
    assert env.call("variable", "OMP_NUM_THREADS") == ("1", "1")
    assert env.call("variable", "ROBOT") == ("arm", "arm")
    assert len({*env.call("pid"), os.getpid()}) == 3
    env.close()


def test_no_shared_memory_is_named_in_the_file_system() -> None:
    shm = Path("/dev/shm")
    before = set(shm.iterdir()) if shm.exists() else set()
    env = faulty("none", "process")
    assert (set(shm.iterdir()) if shm.exists() else set()) == before
    for pid in pids(env):
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(HostDied):
        env.step(ACTIONS)
