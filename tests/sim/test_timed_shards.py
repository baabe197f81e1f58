"""Shards in processes say when their steps really ran, if they are asked to."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from time import perf_counter, sleep
from typing import Any

import numpy as np
import pytest
from sim_envs import Falling, Phased, Slow, Walk

from rose_compiler.base import phases
from rose_compiler.base.errors import HostTimeout, RuntimeFault
from rose_compiler.runtime.support import Runtime
from rose_compiler.sim import ShardedEnv

ACTIONS = np.zeros((2, 2), np.float32)


@pytest.fixture(scope="module", params=["process", "thread"])
def env(request: pytest.FixtureRequest) -> Iterator[Any]:
    made = ShardedEnv.split([Walk] * 2, shards=1, hosts=request.param)
    made.reset(seed=0)
    yield made
    made.close()


@pytest.mark.parametrize("hosts", ["process", "thread"])
def test_phases_in_a_shard_are_noted_on_its_lane(hosts: Any) -> None:
    env = ShardedEnv.split([Phased] * 2, shards=1, hosts=hosts)
    env.reset(seed=0)
    (shard,) = env.shards()
    runtime = Runtime()
    lane = runtime.lane("shard:0")
    lane.step(7, shard, ACTIONS).wait()
    with runtime.recording() as spans:
        for _ in range(2):
            lane.step(7, shard, ACTIONS).wait()
    steps = [span for span in spans if span.kind != phases.KIND]
    named = [span for span in spans if span.kind == phases.KIND]
    assert [(span.op, span.lane) for span in named] == [("physics", "shard:0")] * 4
    for k, step in enumerate(steps):
        for phase in named[2 * k : 2 * k + 2]:  # one for each environment
            assert step.ran_s is not None
            assert step.ran_s[0] <= phase.start_s < phase.end_s <= step.ran_s[1]
    runtime.close()
    env.close()


@pytest.mark.parametrize("hosts", ["process", "thread"])
def test_a_lane_of_the_whole_simulator_tells_of_all_its_shards(hosts: Any) -> None:
    env = ShardedEnv.split([Phased] * 4, shards=2, hosts=hosts)
    env.reset(seed=0)
    runtime = Runtime()
    lane = runtime.lane("shard:envs")
    with runtime.recording() as spans:
        lane.step(7, env, np.zeros((4, 2), np.float32)).wait()
        told = [shard.times() for shard in env.shards()]
        assert env.told()[3] == 4
    (step,) = (span for span in spans if span.kind != phases.KIND)
    assert step.ran_s == (min(t[0] for t in told), max(t[1] for t in told))
    assert step.cpu_s == sum(t[2] for t in told)
    assert sum(span.op == "physics" for span in spans) == 4
    lane.step(7, env, np.zeros((4, 2), np.float32)).wait()
    assert env.times() is None, "timing ends with the recording"
    runtime.close()
    env.close()


def test_what_is_not_hosted_tells_no_times() -> None:
    env = ShardedEnv.split([Walk] * 2, shards=2)
    env.reset(seed=0)
    env.timed(True)
    env.step(ACTIONS)
    assert env.times() is None
    assert env.phases() == []
    env.close()


def test_a_time_limit_holds_for_the_whole_simulator() -> None:
    env = ShardedEnv.split([partial(Slow, 0.7)] * 2, shards=2, hosts="thread")
    env.reset(seed=0)
    runtime = Runtime(timeout=0.2)
    task = runtime.lane("shard:envs").step(7, env, ACTIONS)
    with pytest.raises(HostTimeout):
        task.wait()
    env.close()


def test_all_shards_of_a_step_have_one_time_limit_together() -> None:
    env = ShardedEnv.split([partial(Slow, 0.3), partial(Slow, 0.6)], shards=2, hosts="thread")
    env.reset(seed=0)
    env.step_async(ACTIONS)
    with env.within(0.4), pytest.raises(HostTimeout):
        env.step_wait()
    env.close()


@pytest.mark.parametrize("hosts", ["process", "thread"])
def test_what_has_arrived_is_taken_in_though_time_is_over(hosts: Any) -> None:
    env = ShardedEnv.split([Walk] * 2, shards=2, hosts=hosts)
    env.reset(seed=0)
    env.step_async(ACTIONS)
    sleep(0.5)
    with env.within(0.0):
        assert len(env.step_wait()) == 5
    env.close()


def test_a_step_is_timed_where_it_runs(env: Any) -> None:
    (shard,) = env.shards()
    shard.step(ACTIONS)
    assert shard.times() is None, "nothing is timed without being asked for"
    shard.timed(True)
    before = perf_counter()
    shard.step_async(ACTIONS)
    sleep(0.1)
    late = perf_counter()
    shard.step_wait()
    start, end, cpu = shard.times()
    assert before <= start <= end <= late, "the clock is that of the caller"
    assert 0 <= cpu <= end - start + 0.01
    shard.timed(False)
    shard.step(ACTIONS)
    assert shard.times() is None


def test_a_lane_notes_it_while_it_is_recorded(env: Any) -> None:
    (shard,) = env.shards()
    runtime = Runtime()
    lane = runtime.lane("shard:0")
    with runtime.recording() as spans:
        task = lane.step(7, shard, ACTIONS)
        sleep(0.1)
        task.wait()
    (span,) = spans
    assert span.site == 7
    assert span.ran_s is not None
    assert span.start_s <= span.ran_s[0] <= span.ran_s[1] < span.end_s - 0.05
    assert span.issue_s == span.start_s
    lane.step(7, shard, ACTIONS).wait()
    assert shard.times() is None, "timing ends with the recording"
    runtime.close()


def test_a_step_of_the_whole_leaves_timing_as_it_was(env: Any) -> None:
    (shard,) = env.shards()
    for before in (False, True):
        shard.timed(before)
        with phases.collecting():
            env.step(ACTIONS)
            assert shard.is_timed is before
            with pytest.raises(ValueError, match="expected 2 actions"):
                env.step(np.zeros((3, 2), np.float32))
        assert shard.is_timed is before
    env.step_async(ACTIONS)
    with phases.collecting(), pytest.raises(RuntimeFault, match="already under way"):
        env.step(ACTIONS)
    env.step_wait()
    assert env.times() is not None, "nobody forgets what the step under way tells"
    shard.timed(False)


def test_a_step_of_the_whole_that_fails_leaves_nothing_timed() -> None:
    env = ShardedEnv.split([Falling, Phased], shards=2, hosts="thread")
    env.reset(seed=0)
    with phases.collecting() as ended:
        for _ in range(2):
            env.step(ACTIONS)
        with pytest.raises(ValueError, match="fell over"):
            env.step(ACTIONS)
    assert len(ended) == 4
    assert not any(shard.is_timed for shard in env.shards())
    env.close()


@pytest.mark.parametrize("hosts", ["process", "thread"])
@pytest.mark.parametrize("whole", [False, True])
def test_a_timed_step_raises_what_its_environment_raised(hosts: Any, whole: bool) -> None:
    env = ShardedEnv.split([Falling, Phased], shards=2, hosts=hosts)
    env.reset(seed=0)
    one = env if whole else env.shards()[0]
    runtime = Runtime()
    lane = runtime.lane("shard:0")
    with runtime.recording() as spans:
        for _ in range(2):
            lane.step(7, one, ACTIONS[: one.num_envs]).wait()
        before = len(spans)
        task = lane.step(7, one, ACTIONS[: one.num_envs])
        with pytest.raises(ValueError, match="fell over"):
            task.wait()
    assert [(span.op, span.ran_s) for span in spans[before:]] == [("step", None)]
    assert env.shards()[0].times() is None, "no times of an earlier step"
    runtime.close()
    env.close()


def test_a_step_has_its_result_though_its_host_ends_before_it_tells_its_phases() -> None:
    env = ShardedEnv.split([Phased] * 2, shards=1, hosts="process")
    env.reset(seed=0)
    (shard,) = env.shards()
    runtime = Runtime()
    lane = runtime.lane("shard:0")
    with runtime.recording():
        task = lane.step(7, shard, ACTIONS)
        finish = shard._finish

        def finish_and_end() -> Any:
            result = finish()
            shard.host.close()
            return result

        shard._finish = finish_and_end
        assert len(task.wait()) == 5
    runtime.close()
    env.close()
