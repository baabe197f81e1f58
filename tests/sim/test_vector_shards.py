"""Shards that are vector environments of several kinds, and a simulator of the user's own."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv
from gymnasium.wrappers import vector as wrappers
from sim_envs import Batch, Plain, Walk, recorded
from sim_equal import assert_same, assert_same_run

from rose_compiler.sim import (
    Shard,
    Sharded,
    ShardedEnv,
    innermost,
    sharded_base,
    why_coupled,
)


def walks(count: int) -> list[Any]:
    return [partial(Walk, i) for i in range(count)]


def boxes(count: int) -> Any:
    drawn = np.random.default_rng(0).uniform(-1, 1, (300, count, 2)).astype(np.float32)
    return lambda t: drawn[t]


@pytest.mark.parametrize("hosts", ["inline", "thread"])
@pytest.mark.parametrize("copy", [True, False])
def test_vector_environments_built_already(hosts: Any, copy: bool) -> None:
    """Infos of one type each, so that a merge by shards can't differ from gymnasium's."""
    fns = walks(5)
    built = [SyncVectorEnv(fns[:2], copy=copy), AsyncVectorEnv(fns[2:], copy=copy)]
    ours = ShardedEnv(built, hosts=hosts)
    theirs = SyncVectorEnv(fns)
    try:
        assert [shard.native_async for shard in ours.shards()] == [hosts == "thread", True]
        left, right = ours.reset(seed=3), theirs.reset(seed=3)
        assert_same(left, right)
        kept = []
        for t in range(80):
            left, right = ours.step(boxes(5)(t)), theirs.step(boxes(5)(t))
            kept.append((left, right))
        for left, right in kept:  # compared at the end: nothing may have been overwritten
            assert_same(left[:4], right[:4])
            assert left[4].keys() == right[4].keys()
            for key in right[4]:
                assert_same(left[4][key], right[4][key], key)
    finally:
        ours.close()


@pytest.mark.parametrize("hosts", ["inline", "thread", "process"])
def test_factories_of_vector_environments(hosts: Any) -> None:
    ours = ShardedEnv([partial(recorded, 0, 2), partial(recorded, 2, 3)], hosts=hosts)
    theirs = SyncVectorEnv(walks(5))
    try:
        assert_same(ours.reset(seed=1)[0], theirs.reset(seed=1)[0])
        for t in range(40):
            assert_same(ours.step(boxes(5)(t))[:4], theirs.step(boxes(5)(t))[:4], f"step {t}")
    finally:
        ours.close()


@pytest.mark.parametrize("hosts", ["inline", "thread", "process"])
def test_a_vector_environment_of_its_own_kind(hosts: Any) -> None:
    """float32 rewards, borrowed outputs, infos without masks and of every shape."""
    ours = ShardedEnv([partial(Batch, 3), partial(Batch, 2)], hosts=hosts)
    try:
        first = ours.reset(seed=10)
        np.testing.assert_array_equal(first[0][:, 0], [10, 11, 12, 13, 14])
        results = [ours.step(np.zeros((5, 1), np.float32)) for _ in range(3)]
        for t, (obs, reward, terminated, truncated, infos) in enumerate(results):
            np.testing.assert_array_equal(obs[:, 0], np.arange(10, 15) + t + 1)
            assert reward.dtype == np.float32
            np.testing.assert_array_equal(reward, np.arange(10, 15, dtype=np.float32) + t + 1)
            assert not terminated.any()
            assert truncated.dtype == np.bool_
            np.testing.assert_array_equal(infos["time"], np.full(5, t + 1.0))
            assert list(infos["names"]) == ["e0", "e1", "e2", "e0", "e1"]
            assert list(infos["backend"]) == ["numpy"] * 5
            np.testing.assert_array_equal(infos["sub"]["matrix"], np.zeros((5, 2, 2)))
            np.testing.assert_array_equal(infos["only_big"], [1, 1, 1, 0, 0])
            np.testing.assert_array_equal(infos["_only_big"], [True, True, True, False, False])
            assert "_time" not in infos
    finally:
        ours.close()


def test_results_of_one_shard_are_never_written_again() -> None:
    ours = ShardedEnv([partial(Batch, 3)])
    ours.reset(seed=0)
    shard = ours.shards()[0]
    results = []
    for _ in range(3):
        shard.step_async(np.zeros((3, 1), np.float32))
        results.append(shard.step_wait())
    for t, (obs, reward, _, _, infos) in enumerate(results):
        np.testing.assert_array_equal(obs[:, 0], np.arange(3) + t + 1)
        np.testing.assert_array_equal(reward, np.arange(3) + t + 1)
        np.testing.assert_array_equal(infos["time"], np.full(3, t + 1.0))


def test_wrappers_are_seen_through() -> None:
    env = ShardedEnv.split(walks(4), shards=2)
    wrapped = wrappers.RecordEpisodeStatistics(wrappers.NormalizeObservation(env))
    base, classes = sharded_base(wrapped)
    assert base is env
    assert innermost(wrapped) is env
    assert classes == [wrappers.RecordEpisodeStatistics, wrappers.NormalizeObservation]
    assert sharded_base(env) == (env, [])
    assert sharded_base(SyncVectorEnv(walks(1))) == (None, [])
    assert why_coupled(classes[0]) is None
    assert "running mean" in str(why_coupled(classes[1]))

    class Mine(wrappers.RecordEpisodeStatistics):
        pass

    assert "not known" in str(why_coupled(Mine))
    for env_class in (object, SyncVectorEnv):
        assert why_coupled(env_class) is not None


def test_every_wrapper_of_gymnasium_is_classified() -> None:
    """A new gymnasium may bring wrappers: they must be put into one table or the other."""
    for name in wrappers.__all__:
        if name in ("ArrayConversion", "JaxToNumpy", "JaxToTorch", "NumpyToTorch"):
            continue  # loaded with jax or array-api-compat, which may be missing
        reason = why_coupled(getattr(wrappers, name))
        assert reason is None or "not known" not in reason, name


@pytest.mark.parametrize(
    "wrap",
    [
        lambda env: wrappers.ClipReward(env, -0.2, 0.2),
        lambda env: wrappers.RescaleAction(env, -0.5, 0.5),
        lambda env: wrappers.FlattenObservation(env),
        lambda env: wrappers.DtypeObservation(env, np.float64),
        lambda env: wrappers.RescaleObservation(env, np.float32(-1), np.float32(1)),
        lambda env: wrappers.ClipAction(env),
    ],
)
def test_a_separable_wrapper_may_go_inside(wrap: Any) -> None:
    """What the table says: around the whole or around each shard, the rows are the same."""

    def bounded(index: int) -> gymnasium.Env:
        env = Walk(index)
        env.observation_space = gymnasium.spaces.Box(-10, 10, (3,), np.float32)
        return env

    fns = [partial(bounded, i) for i in range(5)]
    around = wrap(SyncVectorEnv(fns))
    assert why_coupled(type(around)) is None
    inside = ShardedEnv(
        [lambda: wrap(SyncVectorEnv(fns[:3])), lambda: wrap(SyncVectorEnv(fns[3:]))]
    )
    assert_same(around.reset(seed=2)[0], inside.reset(seed=2)[0])
    for t in range(40):
        assert_same(inside.step(boxes(5)(t))[:4], around.step(boxes(5)(t))[:4])


def test_a_coupling_wrapper_may_not() -> None:
    """The table is right to call it coupling: inside the shards the numbers change."""
    fns = walks(4)
    around = wrappers.NormalizeObservation(SyncVectorEnv(fns))
    inside = ShardedEnv(
        [
            lambda: wrappers.NormalizeObservation(SyncVectorEnv(fns[:2])),
            lambda: wrappers.NormalizeObservation(SyncVectorEnv(fns[2:])),
        ]
    )
    around.reset(seed=0)
    inside.reset(seed=0)
    differ = [
        not np.array_equal(inside.step(boxes(4)(t))[0], around.step(boxes(4)(t))[0])
        for t in range(5)
    ]
    assert any(differ)


def test_protocols() -> None:
    env = ShardedEnv.split(walks(3), shards=2)
    assert isinstance(env, Sharded)
    assert isinstance(env, VectorEnv)
    assert all(isinstance(shard, Shard) for shard in env.shards())
    assert env.shards() == env.shards()
    assert not isinstance(SyncVectorEnv(walks(1)), Sharded)


def test_one_shard_is_fine() -> None:
    ours, theirs = ShardedEnv([walks(3)]), SyncVectorEnv(walks(3))
    assert assert_same_run(ours, theirs, boxes(3), 60) > 10


@pytest.mark.parametrize("hosts", ["inline", "process"])
def test_packed_steps_merge_to_what_a_step_of_the_whole_gives(hosts: Any) -> None:
    fns = [partial(Plain, i) for i in range(5)]
    ours = ShardedEnv.split(fns, shards=2, hosts=hosts)
    theirs = ShardedEnv.split(fns, shards=2, hosts="inline")
    try:
        assert_same(ours.reset(seed=3), theirs.reset(seed=3))
        kept = []
        packed = 0
        for t in range(80):
            actions = boxes(5)(t)
            for shard in ours.shards():
                shard.step_async(actions[shard.offset : shard.offset + shard.num_envs])
            parts = [shard.step_wait_packed() for shard in ours.shards()]
            packed += sum(not isinstance(part[4], dict) for part in parts)
            kept.append((ours.merge(parts), theirs.step(actions)))
        assert packed > 80
        for left, right in kept:  # compared at the end: nothing may have been overwritten
            assert_same(left, right)
    finally:
        ours.close()
        theirs.close()
