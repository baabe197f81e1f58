"""EnvPool shards give what one large pool gives."""

from __future__ import annotations

from typing import Any

import envpool
import gymnasium
import numpy as np
import pytest
from sim_equal import assert_same

from rose_compiler.base.errors import ConfigError
from rose_compiler.sim import ShardedEnv

TASK = "HalfCheetah-v4"
OPTIONS: dict[str, Any] = {"max_episode_steps": 17}
COUNT = 7


def whole(**kwargs: Any) -> Any:
    options = {**OPTIONS, "num_envs": COUNT, "seed": 5, **kwargs}
    return envpool.make(TASK, env_type="gymnasium", **options)


def actions(t: int, count: int = COUNT) -> np.ndarray:
    return np.random.default_rng(t).uniform(-1, 1, (count, 6))


@pytest.mark.parametrize("hosts", ["inline", "thread", "process"])
def test_shards_equal_one_pool(hosts: Any) -> None:
    # a worker takes seconds to import envpool: two are enough
    count = 2 if hosts == "process" else 3
    ours = ShardedEnv.envpool(TASK, COUNT, count, seed=5, hosts=hosts, **OPTIONS)
    theirs = whole()
    try:
        assert isinstance(ours, gymnasium.vector.VectorEnv)
        sizes = [shard.num_envs for shard in ours.shards()]
        assert sizes == ([4, 3] if hosts == "process" else [3, 2, 2])
        assert all(shard.native_async for shard in ours.shards())
        assert ours.single_observation_space == theirs.observation_space
        assert ours.observation_space.shape == (COUNT, 17)
        assert ours.metadata["autoreset_mode"] == theirs.metadata["autoreset_mode"]
        assert_same(ours.reset(), theirs.reset(), "reset")
        ended = 0
        for t in range(120):
            left, right = ours.step(actions(t)), theirs.step(actions(t))
            assert_same(left, right, f"step {t}")
            ended += int((left[2] | left[3]).sum())
        assert ended > 40
        assert_same(ours.reset(), theirs.reset(), "second reset")
    finally:
        ours.close()


def test_seeds_by_list() -> None:
    seeds = [9, 2, 7, 1]
    ours = ShardedEnv.envpool(TASK, 4, 2, seed=seeds)
    theirs = whole(num_envs=4, seed=seeds)
    assert_same(ours.reset(), theirs.reset())
    ours.close()


def test_a_seed_given_to_reset_warns_once() -> None:
    ours = ShardedEnv.envpool(TASK, 4, 2)
    with pytest.warns(UserWarning, match="seeds are fixed when it is built") as caught:
        ours.reset(seed=3)
    assert len(caught) == 1
    ours.close()


def test_shards_advance_on_their_own() -> None:
    ours = ShardedEnv.envpool(TASK, COUNT, 2, seed=5, **OPTIONS)
    theirs = whole()
    assert_same(ours.reset(), theirs.reset())
    first, second = ours.shards()
    results: list[list[Any]] = [[], []]
    for t in range(40):
        second.step_async(actions(t)[second.offset :])
        results[1].append(second.step_wait())
    for t in range(40):
        first.step_async(actions(t)[: second.offset])
        results[0].append(first.step_wait())
    for t in range(40):
        merged = ours.merge([results[0][t], results[1][t]])
        assert_same(merged, theirs.step(actions(t)), f"step {t}")
    ours.close()


def test_results_are_never_written_again() -> None:
    import copy

    ours = ShardedEnv.envpool(TASK, 4, 2)
    kept = [ours.reset()]
    copied = [copy.deepcopy(kept[0])]
    for t in range(60):
        kept.append(ours.step(actions(t, 4)))  # type: ignore[arg-type]
        copied.append(copy.deepcopy(kept[-1]))
        for shard in ours.shards():
            shard.step_async(actions(t, 2))
            kept.append(shard.step_wait())  # type: ignore[arg-type]
            copied.append(copy.deepcopy(kept[-1]))
    assert_same(kept, copied)
    ours.close()


def test_masked_reset() -> None:
    ours = ShardedEnv.envpool(TASK, COUNT, 3, seed=5, **OPTIONS)
    theirs = whole()
    ours.reset()
    theirs.reset()
    last = ours.step(actions(0))[0]
    theirs.step(actions(0))
    mask = np.array([False, True, False, False, False, True, True])
    obs, infos = ours.reset(options={"reset_mask": mask})
    partial_obs, partial_infos = theirs.reset(options={"reset_mask": mask})
    assert_same(obs[mask], partial_obs)
    assert_same(obs[~mask], last[~mask])
    assert_same(infos["_env_id"], mask)
    assert_same(infos["env_id"][mask], partial_infos["env_id"])
    assert_same(infos["elapsed_step"][mask], partial_infos["elapsed_step"])
    for t in range(1, 30):
        assert_same(ours.step(actions(t)), theirs.step(actions(t)), f"step {t}")
    ours.close()


def test_a_pool_with_a_batch_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="batch size"):
        ShardedEnv.envpool(TASK, 8, 2, batch_size=2)


def test_attributes_are_refused_and_break_nothing() -> None:
    ours = ShardedEnv.envpool(TASK, 2, 2)
    ours.reset()
    with pytest.raises(AttributeError, match="EnvPool"):
        ours.get_attr("anything")
    ours.step(actions(0, 2))
    ours.close()


def test_pools_built_already_and_single_environments_of_other_kinds_do_not_mix() -> None:
    pool = whole(num_envs=2)
    ours = ShardedEnv([pool, lambda: whole(num_envs=1, seed=7)])
    assert ours.num_envs == 3
    assert_same(ours.reset()[1]["env_id"], np.arange(3, dtype=np.int32))
    ours.close()
