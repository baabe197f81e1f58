"""A ShardedEnv is gymnasium's SyncVectorEnv of the same factories, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import vector as vector_wrappers
from sim_envs import Keeper, Maze, Meeting, Moody, Walk, recorded
from sim_equal import assert_same, assert_same_run

from rose_compiler.sim import ShardedEnv, quiet_mujoco

HOSTS = ("inline", "thread", "process")
MODES = tuple(AutoresetMode)


def boxes(count: int, size: int = 2, dtype: Any = np.float32) -> Callable[[int], np.ndarray]:
    rng = np.random.default_rng(0)
    drawn = rng.uniform(-1, 1, (400, count, size)).astype(dtype)
    return lambda t: drawn[t].copy()


def walks(count: int) -> list[Callable[[], gymnasium.Env]]:
    return [partial(Walk, i) for i in range(count)]


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
@pytest.mark.parametrize("hosts", HOSTS)
def test_uneven_shards_equal_gymnasium(hosts: Any, mode: AutoresetMode) -> None:
    fns = walks(7)
    ours = ShardedEnv([fns[:3], fns[3], tuple(fns[4:])], hosts=hosts, autoreset_mode=mode)
    theirs = SyncVectorEnv(fns, autoreset_mode=mode)
    try:
        assert [shard.num_envs for shard in ours.shards()] == [3, 1, 3]
        assert [shard.offset for shard in ours.shards()] == [0, 3, 4]
        assert assert_same_run(ours, theirs, boxes(7), 300) > 100
    finally:
        ours.close()


@pytest.mark.parametrize("hosts", HOSTS)
def test_masked_resets_with_autoreset_disabled(hosts: Any) -> None:
    fns = walks(5)
    ours = ShardedEnv.split(fns, shards=2, hosts=hosts, autoreset_mode="Disabled")
    theirs = SyncVectorEnv(fns, autoreset_mode=AutoresetMode.DISABLED)
    actions = boxes(5)
    try:
        assert_same(ours.reset(seed=3), theirs.reset(seed=3))
        resets = 0
        for t in range(200):
            left, right = ours.step(actions(t)), theirs.step(actions(t))
            assert_same(left, right, f"step {t}")
            done = left[2] | left[3]
            if done.any():
                options = {"start": 5.0, "reset_mask": done}
                mine = dict(options)
                assert_same(ours.reset(options=mine), theirs.reset(options=options), f"reset {t}")
                assert mine == options  # gymnasium takes the mask out of the caller's dict
                resets += 1
        assert resets > 20
    finally:
        ours.close()


@pytest.mark.parametrize("hosts", HOSTS)
def test_forgotten_reset_with_autoreset_disabled_fails_as_in_gymnasium(hosts: Any) -> None:
    ours = ShardedEnv.split(walks(2), shards=2, hosts=hosts, autoreset_mode="Disabled")
    actions = boxes(2)
    ours.reset(seed=0)
    steps = (ours.step(actions(t)) for t in range(30))
    with pytest.raises(AssertionError):
        list(steps)
    ours.close()


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("text", [False, True])
def test_dict_observations_and_discrete_actions(hosts: Any, text: bool) -> None:
    fns = [partial(Maze, text=text)] * 5
    ours = ShardedEnv.split(fns, shards=3, hosts=hosts, autoreset_mode=AutoresetMode.SAME_STEP)
    theirs = SyncVectorEnv(fns, autoreset_mode=AutoresetMode.SAME_STEP)
    drawn = np.random.default_rng(1).integers(0, 4, (200, 5))
    try:
        assert ours.observation_space == theirs.observation_space
        assert ours.action_space == theirs.action_space
        assert assert_same_run(ours, theirs, lambda t: drawn[t], 200) > 50
    finally:
        ours.close()


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [1, 0, 3, 2], [1, 3, 0, 2], [3, 2, 1, 0]])
def test_infos_whose_types_differ_follow_the_order_of_environments(
    hosts: Any, order: list[int]
) -> None:
    fns = [partial(Moody, i) for i in order]
    ours = ShardedEnv.split(fns, shards=2, hosts=hosts)
    theirs = SyncVectorEnv(fns)
    try:
        assert_same_run(ours, theirs, boxes(4), 60)
    finally:
        ours.close()


@pytest.mark.parametrize("hosts", HOSTS)
def test_seeds(hosts: Any) -> None:
    ours = ShardedEnv.split(walks(5), shards=2, hosts=hosts)
    theirs = SyncVectorEnv(walks(5))
    try:
        for seed in ([5, None, 9, 1, 2], 11, [1, 2, 3, 4, 5]):
            left, right = ours.reset(seed=seed), theirs.reset(seed=seed)
            seeded = [i for i in range(5) if isinstance(seed, int) or seed[i] is not None]
            assert_same(left[0][seeded], right[0][seeded])
        assert ours.np_random_seed == theirs.np_random_seed
        states = [generator.bit_generator.state for generator in ours.np_random]
        assert states == [generator.bit_generator.state for generator in theirs.np_random]
        # without a seed the generators go on
        assert_same(ours.reset(), theirs.reset())
        with pytest.raises(ValueError, match="num_envs=5"):
            ours.reset(seed=[1, 2])
        ours.reset(seed=None)  # a refused argument leaves the simulator usable
    finally:
        ours.close()


@pytest.mark.parametrize("hosts", HOSTS)
def test_attributes_methods_and_frames(hosts: Any) -> None:
    ours = ShardedEnv.split(walks(5), shards=2, hosts=hosts)
    theirs = SyncVectorEnv(walks(5))
    try:
        ours.reset(seed=0)
        theirs.reset(seed=0)
        for name in ("index", "count", "metadata"):
            assert_same(ours.get_attr(name), theirs.get_attr(name))
        assert_same(ours.call("scale", 2.0, shift=1.0), theirs.call("scale", 2.0, shift=1.0))
        for env in (ours, theirs):
            env.set_attr("limit", 3)
            env.set_attr("index", [9, 8, 7, 6, 5])
        assert_same(ours.call("scale", 1.0), theirs.call("scale", 1.0))
        assert_same(ours.render(), theirs.render())
        with pytest.raises(ValueError, match="length equal"):
            ours.set_attr("index", [1])
        with pytest.raises(AttributeError):
            ours.get_attr("nothing")
        assert ours.get_attr("limit") == (3,) * 5  # a missing attribute breaks nothing
        assert ours.metadata == theirs.metadata
        assert ours.render_mode == theirs.render_mode
        assert ours.num_envs == theirs.num_envs
        assert ours.single_observation_space == theirs.single_observation_space
        assert ours.single_action_space == theirs.single_action_space
        assert ours.spec is theirs.spec
    finally:
        ours.close()


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("kind", ["float64", "list", "strided", "tensor"])
def test_actions_arrive_as_given(hosts: Any, kind: str) -> None:
    """The type of the actions is the caller's, not the space's."""
    import torch

    ours = ShardedEnv.split(walks(4), shards=2, hosts=hosts)
    theirs = SyncVectorEnv(walks(4))
    drawn = boxes(4, dtype=np.float64)

    def actions(t: int) -> Any:
        if kind == "list":
            return drawn(t).tolist()
        if kind == "strided":
            return np.repeat(drawn(t), 2, axis=1)[:, ::2]
        if kind == "tensor":
            return torch.from_numpy(drawn(t))
        return drawn(t) if t % 5 else drawn(t).astype(np.float32)

    try:
        assert_same_run(ours, theirs, actions, 40)
    finally:
        ours.close()


@pytest.mark.parametrize("hosts", HOSTS)
def test_results_are_never_written_again(hosts: Any) -> None:
    """Whole steps, steps of one shard, and what environments keep for themselves."""
    ours = ShardedEnv([[Keeper, Keeper], Keeper], hosts=hosts, autoreset_mode="SameStep")
    actions = boxes(3)
    kept: list[tuple[Any, Any]] = []
    try:
        obs, infos = ours.reset(seed=1)
        kept.append(((obs, infos), _deep((obs, infos))))
        for t in range(30):
            result: Any = ours.step(actions(t))
            kept.append((result, _deep(result)))
            for shard in ours.shards():
                action = actions(t)[shard.offset : shard.offset + shard.num_envs]
                shard.step_async(action)
                action[:] = np.nan  # the shard must not need it any more
                result = shard.step_wait()
                kept.append((result, _deep(result)))
        for result, copied in kept:
            assert_same(result, copied)
            assert np.isfinite(result[0]).all()
    finally:
        ours.close()


def _deep(value: Any) -> Any:
    import copy

    return copy.deepcopy(value)


@pytest.mark.parametrize("hosts", HOSTS)
def test_an_environment_may_keep_its_action(hosts: Any) -> None:
    ours = ShardedEnv.split(walks(2), shards=2, hosts=hosts)
    actions = boxes(2)
    try:
        ours.reset(seed=0)
        for t in range(2):
            given = actions(t)
            for shard in ours.shards():
                shard.step_async(given[shard.offset :][:1])
                shard.step_wait()
        kept = ours.get_attr("actions")
        assert_same(kept, tuple([actions(0)[i], actions(1)[i]] for i in range(2)))
    finally:
        ours.close()


@pytest.mark.parametrize("hosts", HOSTS)
def test_shards_in_any_order_merge_to_the_whole_step(hosts: Any) -> None:
    ours = ShardedEnv.split(walks(6), shards=3, hosts=hosts)
    theirs = SyncVectorEnv(walks(6))
    actions = boxes(6)
    try:
        assert_same(ours.reset(seed=2), theirs.reset(seed=2))
        shards = ours.shards()
        for t in range(60):
            results: dict[int, Any] = {}
            for i in np.random.default_rng(t).permutation(3):
                shard = shards[i]
                shard.step_async(actions(t)[shard.offset : shard.offset + shard.num_envs])
                results[i] = shard.step_wait()
            merged = ours.merge([results[i] for i in range(3)])
            assert_same(merged, theirs.step(actions(t)), f"step {t}")
        for t in range(60, 80):  # a step of the whole in two halves
            given = actions(t)
            ours.step_async(given)
            given[:] = np.nan
            assert_same(ours.step_wait(), theirs.step(actions(t)), f"step {t}")
        assert ours.native_async == (hosts != "inline")
    finally:
        ours.close()


@pytest.mark.parametrize("hosts", ["thread", "process"])
def test_shards_step_at_the_same_time(hosts: Any, tmp_path: Path) -> None:
    paths = [str(tmp_path / "a"), str(tmp_path / "b")]
    fns = [partial(Meeting, *paths), partial(Meeting, *paths[::-1])]
    ours = ShardedEnv.split(fns, shards=2, hosts=hosts)
    try:
        assert all(shard.native_async for shard in ours.shards())
        ours.reset(seed=0)
        ours.step(boxes(2)(0))
    finally:
        ours.close()


@pytest.mark.parametrize("hosts", ["inline", "process"])
def test_a_shard_is_the_vector_environment_of_its_own_environments(hosts: Any) -> None:
    ours = ShardedEnv.split(walks(5), shards=2, hosts=hosts)
    theirs = SyncVectorEnv(walks(5)[3:])
    actions = boxes(2)
    try:
        shard = ours.shards()[1]
        assert_same(dict(shard.reset(seed=4)[1]), theirs.reset(seed=4)[1])
        for t in range(40):
            shard.step_async(actions(t))
            result = shard.step_wait()
            assert_same((*result[:4], dict(result[4])), theirs.step(actions(t)))
    finally:
        ours.close()


@pytest.mark.parametrize("hosts", HOSTS)
def test_episode_statistics_around_and_inside(hosts: Any) -> None:
    fns = walks(6)
    whole = vector_wrappers.RecordEpisodeStatistics(SyncVectorEnv(fns))
    around = vector_wrappers.RecordEpisodeStatistics(ShardedEnv.split(fns, shards=2, hosts=hosts))
    inside = ShardedEnv([partial(recorded, 0, 3), partial(recorded, 3, 3)], hosts=hosts)
    actions = boxes(6)
    ended = 0
    try:
        starts = [env.reset(seed=1) for env in (whole, around, inside)]
        assert_same(starts[0], starts[1])
        assert_same(starts[0][0], starts[2][0])
        for t in range(80):
            expected = _without_times(whole.step(actions(t)))
            assert_same(_without_times(around.step(actions(t))), expected)
            result = inside.step(actions(t))
            assert_same(_without_times(result)[:4], expected[:4])
            assert set(result[4]) == set(expected[4])
            for key, value in expected[4].items():
                assert_same(result[4][key], value, key)
            ended += int((expected[2] | expected[3]).sum())
        assert ended > 20
    finally:
        around.close()
        inside.close()


def _without_times(result: Any) -> Any:
    if "episode" in result[4]:
        result[4]["episode"].pop("t")
        result[4]["episode"].pop("_t", None)
    return result


@pytest.mark.parametrize("mode", MODES[:2])
@pytest.mark.parametrize("hosts", HOSTS)
def test_halfcheetah(hosts: Any, mode: AutoresetMode) -> None:
    fns = [partial(gymnasium.make, "HalfCheetah-v5", max_episode_steps=20 + i) for i in range(4)]
    ours = ShardedEnv.split(fns, shards=2, hosts=hosts, autoreset_mode=mode)
    with quiet_mujoco():
        theirs = SyncVectorEnv(fns, autoreset_mode=mode)
    try:
        assert assert_same_run(ours, theirs, boxes(4, 6), 200) > 30
    finally:
        ours.close()
        theirs.close()
