"""A failing shard ends in one clear error; the simulator says that it is lost, nothing stays."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from sim_envs import Faulty, Maze, Own, Slow, Spy, Walk
from sim_equal import assert_same

from rose_compiler.base.errors import (
    ConfigError,
    FactoryError,
    HostDied,
    HostTimeout,
    RuntimeFault,
)
from rose_compiler.runtime.remote import ShardLane
from rose_compiler.sim import ShardedEnv
from rose_compiler.sim.process_shard import ProcessShard

HOSTS = ("inline", "thread", "process")
HERE = Path(__file__).parent
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
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        if not Path(f"/proc/{pid}").exists():
            return True
        time.sleep(0.02)
    return False


def threads_left(within: float = 5.0) -> list[str]:
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        left = [t.name for t in threading.enumerate() if t.name.startswith("rose-shard")]
        if not left:
            return []
        time.sleep(0.02)
    return left


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


@pytest.mark.parametrize("hosts", HOSTS)
def test_an_exception_in_a_step(hosts: Any) -> None:
    env = faulty("raise", hosts)
    with pytest.raises(ValueError, match="the robot fell over") as caught:
        env.step(ACTIONS)
    assert_let_go(env)
    notes = "\n".join(caught.value.__notes__)
    assert "raised in shard 1, environments 1 to 1 of the batch" in notes
    assert ("sim_envs.py" in notes) == (hosts == "process")
    assert_lost(env, "ValueError: the robot fell over")


@pytest.mark.parametrize("hosts", ["inline", "thread"])
def test_an_exception_is_the_very_object(hosts: Any) -> None:
    env = faulty("own", hosts)
    with pytest.raises(Own) as caught:
        env.step(ACTIONS)
    assert caught.value.second == 3
    env.close()


def test_an_exception_that_does_not_unpickle() -> None:
    env = faulty("own", "process")
    with pytest.raises(RuntimeFault, match=r"sim_envs.Own was raised in the host 'shard 1'"):
        env.step(ACTIONS)
    assert_lost(env, "sim_envs.Own")


@pytest.mark.parametrize("hosts", HOSTS)
def test_a_step_before_the_first_reset_only_raises(hosts: Any) -> None:
    """As in gymnasium's own vector environments: the error, and then ``reset`` works."""
    fns = [partial(gymnasium.make, "CartPole-v1")] * 3
    actions = np.array([1, 0, 1])
    env, same = ShardedEnv.split(fns, shards=2, hosts=hosts), SyncVectorEnv(fns)
    for _ in range(2):
        with pytest.raises(gymnasium.error.ResetNeeded) as caught:
            env.step(actions)
        assert "raised in shard 0" in "\n".join(caught.value.__notes__)
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.shards()[1].step(actions[2:])
    assert_same(env.reset(seed=3), same.reset(seed=3))
    for _ in range(3):
        assert_same(env.step(actions), same.step(actions))
    with pytest.raises(Exception, match="invalid"):
        env.step(np.array([7, 7, 7]))  # from now on there is something to lose
    with pytest.raises(RuntimeFault, match="its simulator is lost"):
        env.reset()
    assert_let_go(env)
    env.close()
    same.close()


@pytest.mark.parametrize("hosts", ["thread", "process"])
def test_a_lane_waits_for_a_shard_no_longer_than_its_limit(hosts: Any) -> None:
    env = ShardedEnv.split([partial(Slow, 0.0), partial(Slow, 1.0)], shards=2, hosts=hosts)
    env.reset(seed=0)
    lanes = [ShardLane(f"shard:{k}", timeout=0.3) for k in range(2)]
    begun = [
        lane.step(k, shard, ACTIONS[k : k + 1])
        for k, (lane, shard) in enumerate(zip(lanes, env.shards(), strict=True))
    ]
    assert begun[0].wait()[0].shape[0] == 1
    with pytest.raises(HostTimeout):  # long before the step is over
        begun[1].wait()
    for lane in lanes:
        lane.close()
    with pytest.raises(RuntimeFault, match="its simulator is lost"):
        env.step(ACTIONS[:2])
    assert_let_go(env)
    env.close()


def test_a_step_that_a_lane_left_behind() -> None:
    """The lane's own wait goes on in a thread; nobody else may wait for the process meanwhile."""
    env = ShardedEnv.split([partial(Slow, 30.0)], shards=1, hosts="process")
    env.reset(seed=0)
    lane = ShardLane("shard:0")
    lane.step(0, env.shards()[0], ACTIONS[:1])
    assert not lane.settle(0.05)
    lane.abandon()
    with pytest.raises(RuntimeFault, match="its simulator is lost") as caught:
        env.shards()[0].step_async(ACTIONS[:1])
    assert "lane 'shard:0' did not finish" in str(caught.value)
    env.close()
    assert_let_go(env)
    for thread in [t for t in threading.enumerate() if "settling" in t.name]:
        thread.join(5)
        assert not thread.is_alive()


def test_a_worker_lost_before_the_first_reset() -> None:
    env = ShardedEnv.split([partial(Faulty, "kill", 0), Walk], shards=2, hosts="process")
    os.kill(pids(env)[0], signal.SIGKILL)
    with pytest.raises(HostDied):
        env.step(ACTIONS[:2])
    with pytest.raises(RuntimeFault, match="its simulator is lost"):
        env.reset()
    assert_let_go(env)
    env.close()


@pytest.mark.parametrize(("how", "said"), [("kill", "SIGKILL"), ("exit", "status 3")])
def test_a_worker_that_ends_in_a_step(how: str, said: str) -> None:
    env = faulty(how, "process")
    start = time.monotonic()
    with pytest.raises(HostDied, match=said):
        env.step(ACTIONS)
    assert time.monotonic() - start < 5
    assert_let_go(env)
    assert_lost(env, said)


def test_a_worker_killed_between_steps() -> None:
    env = faulty("none", "process")
    os.kill(pids(env)[2], signal.SIGKILL)
    with pytest.raises(HostDied, match="'shard 2'"):
        env.step(ACTIONS)
    assert_lost(env, "SIGKILL")


@pytest.mark.parametrize("hosts", ["thread", "process"])
def test_a_step_that_hangs(hosts: Any) -> None:
    fns = [partial(Faulty, "none", 0), partial(Slow, 3.0)]
    env = ShardedEnv.split(fns, shards=2, hosts=hosts, timeout=0.5)
    env.reset(seed=0)
    start = time.monotonic()
    with pytest.raises(HostTimeout, match=r"'shard 1'.*step\(\)"):
        env.step(ACTIONS[:2])
    assert time.monotonic() - start < 4
    with pytest.raises(RuntimeFault, match="its simulator is lost"):
        env.step(ACTIONS[:2])
    assert all(gone(pid) for pid in pids(env))
    assert threads_left() == []
    env.close()


@pytest.mark.parametrize("hosts", HOSTS)
def test_a_shard_that_fails_leaves_the_others_their_step(hosts: Any) -> None:
    """Driven one by one, earlier shards can still catch up before the simulator is given up."""
    env = faulty("raise", hosts)
    first, second, third = env.shards()
    third.step_async(ACTIONS[2:])
    second.step_async(ACTIONS[1:2])
    with pytest.raises(ValueError, match="fell over"):
        second.step_wait()
    with pytest.raises(RuntimeFault, match="shard 1 failed"):
        second.step_async(ACTIONS[1:2])
    first.step_async(ACTIONS[:1])
    assert first.step_wait()[0].shape == (1, 3)
    assert third.step_wait()[0].shape == (1, 3)
    assert_lost(env, "fell over")


@pytest.mark.parametrize("hosts", HOSTS)
def test_steps_out_of_order(hosts: Any) -> None:
    env = ShardedEnv.split([Walk, Walk], shards=2, hosts=hosts)
    env.reset(seed=0)
    shard = env.shards()[0]
    with pytest.raises(RuntimeFault, match="no step of shard 0"):
        shard.step_wait()
    shard.step_async(ACTIONS[:1])
    with pytest.raises(RuntimeFault, match="already under way"):
        shard.step_async(ACTIONS[:1])
    with pytest.raises(RuntimeFault, match="already under way"):
        shard.reset()
    # using the whole at the wrong time breaks nothing either
    for use in (lambda: env.step(ACTIONS[:2]), env.reset):
        with pytest.raises(RuntimeFault, match="step of shard 0 is already under way"):
            use()
    with pytest.raises(RuntimeFault, match="no step of shard 1"):
        env.step_wait()
    shard.step_wait()
    env.step(ACTIONS[:2])
    env.step_async(ACTIONS[:2])
    with pytest.raises(RuntimeFault, match="already under way"):
        env.step_async(ACTIONS[:2])
    env.step_wait()
    env.close()


@pytest.mark.parametrize("hosts", ["thread", "process"])
@pytest.mark.parametrize("part", ["shard", "whole"])
def test_a_step_whose_wait_was_interrupted_is_still_under_way(hosts: Any, part: str) -> None:
    """Who catches Ctrl-C around ``step_wait`` alone can wait again and loses no result."""
    env = ShardedEnv.split([Walk, partial(Slow, 1.0)], shards=2, hosts=hosts)
    same = ShardedEnv.split([Walk, Walk], shards=2)
    env.reset(seed=0)
    same.reset(seed=0)
    stepped: Any = env if part == "whole" else env.shards()[1]
    actions = ACTIONS[:2] if part == "whole" else ACTIONS[:1]
    stepped.step_async(actions)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        stepped.step_wait()
    expected = (same if part == "whole" else same.shards()[1]).step(actions)
    assert_same(stepped.step_wait(), expected)
    env.close()


@pytest.mark.parametrize("hosts", HOSTS)
def test_a_wrong_number_of_actions_breaks_nothing(hosts: Any) -> None:
    env = ShardedEnv.split([Walk] * 3, shards=2, hosts=hosts)
    env.reset(seed=0)
    with pytest.raises(ValueError, match="expected 3 actions"):
        env.step(ACTIONS[:2])
    with pytest.raises(TypeError, match="must be a numpy array"):
        env.reset(options={"reset_mask": [True, False, True]})
    with pytest.raises(ValueError, match="at least one True"):
        env.reset(options={"reset_mask": np.zeros(3, np.bool_)})
    env.step(ACTIONS)
    env.close()


@pytest.mark.parametrize("hosts", HOSTS)
def test_closed(hosts: Any) -> None:
    env = ShardedEnv.split([Walk] * 3, shards=2, hosts=hosts)
    env.reset(seed=0)
    env.close()
    env.close()
    assert env.closed
    with pytest.raises(RuntimeFault, match="was closed"):
        env.step(ACTIONS)
    assert all(gone(pid) for pid in pids(env))
    assert threads_left() == []


@pytest.mark.parametrize("hosts", ["thread", "process"])
def test_nothing_stays_when_it_is_collected(hosts: Any) -> None:
    env = ShardedEnv.split([Spy] * 2, shards=2, hosts=hosts)
    env.reset(seed=0)
    env.step(ACTIONS[:2])
    workers = pids(env)
    del env
    gc.collect()
    assert all(gone(pid) for pid in workers)
    assert threads_left() == []


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


SCRIPT = """
import os, sys, time
import numpy as np, gymnasium
from gymnasium import spaces
from rose_compiler.sim import ShardedEnv

class Fallen(RuntimeError):
    pass

class Robot(gymnasium.Env):
    observation_space = spaces.Box(-1, 1, (2,))
    action_space = spaces.Box(-1, 1, (1,))
    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}
    def step(self, action):
        if action[0] > 0.5:
            raise Fallen("down")
        if action[0] < -0.5:
            time.sleep(60)
        return np.ones(2, np.float32), 1.0, False, False, {"pid": os.getpid()}
    def close(self):
        os.write(1, b"closed\\n")  # in one piece: the workers close at the same time

env = ShardedEnv([lambda: Robot(), lambda: Robot()], hosts=HOSTS)
env.reset(seed=1)
print(*env.step(np.zeros((2, 1), np.float32))[4]["pid"], flush=True)
"""


def start(hosts: str, rest: str, tmp_path: Path) -> tuple[subprocess.Popen[str], list[int]]:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.replace("HOSTS", repr(hosts)) + rest)
    process = subprocess.Popen(
        [sys.executable, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(HERE.parent.parent)},
        start_new_session=True,
    )
    assert process.stdout is not None
    return process, [int(text) for text in process.stdout.readline().split()]


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    assert process.stdout is not None
    assert process.stderr is not None
    out, err = process.stdout.read(), process.stderr.read()
    process.wait(20)
    return out, err


@pytest.mark.parametrize("hosts", HOSTS)
def test_a_script_without_a_guard(hosts: str, tmp_path: Path) -> None:
    rest = """
try:
    env.step(np.ones((2, 1), np.float32))
except Fallen as error:
    print("caught", error, flush=True)
env.close()
"""
    process, workers = start(hosts, rest, tmp_path)
    out, err = finish(process)
    # the environments of threads and processes close while the script prints
    assert out.count("closed\n") == 2
    assert out.replace("closed\n", "") == "caught down\n"
    assert err == ""
    if hosts == "process":
        assert all(gone(pid) for pid in workers)


@pytest.mark.parametrize("hosts", HOSTS)
def test_ctrl_c_in_a_step(hosts: str, tmp_path: Path) -> None:
    rest = """
try:
    env.step(np.array([[0.0], [-1.0]], np.float32))
except KeyboardInterrupt:
    print("interrupted", flush=True)
try:
    env.step(np.zeros((2, 1), np.float32))
except Exception as error:
    print(type(error).__name__, flush=True)
"""
    process, workers = start(hosts, rest, tmp_path)
    time.sleep(0.5)
    os.killpg(process.pid, signal.SIGINT)
    began = time.monotonic()
    out, err = finish(process)
    assert time.monotonic() - began < 8
    assert out.replace("closed\n", "") == "interrupted\nRuntimeFault\n"
    assert err == ""
    if hosts == "process":
        assert all(gone(pid) for pid in workers)


def test_workers_die_with_a_killed_parent(tmp_path: Path) -> None:
    process, workers = start("process", "env.step(-np.ones((2, 1), np.float32))", tmp_path)
    time.sleep(0.3)
    process.kill()
    process.wait()
    assert all(gone(pid) for pid in workers)
