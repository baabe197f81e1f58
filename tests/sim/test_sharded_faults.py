"""A failing shard ends in one clear error; the simulator says that it is lost, nothing stays."""

from __future__ import annotations

import gc
import os
import signal
import threading
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from failing import ACTIONS, HOSTS, assert_let_go, assert_lost, faulty, gone, pids, threads_left
from gymnasium.vector import SyncVectorEnv
from sim_envs import Faulty, Own, Slow, Spy, Walk
from sim_equal import assert_same

from rose_compiler.base.errors import HostDied, HostTimeout, RuntimeFault
from rose_compiler.runtime.remote import ShardLane
from rose_compiler.sim import ShardedEnv
from tests.awake import within


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
    with within(5), pytest.raises(HostDied, match=said):
        env.step(ACTIONS)
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
    with within(4), pytest.raises(HostTimeout, match=r"'shard 1'.*step\(\)"):
        env.step(ACTIONS[:2])
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
