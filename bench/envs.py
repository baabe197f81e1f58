"""Simulators of the benchmark shapes. Worker processes import this module: no torch here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from rose_compiler.sim import ShardedEnv, quiet_mujoco

if TYPE_CHECKING:
    import gymnasium

Hosts = Literal["inline", "thread", "process"]

OBS, ACT = 17, 6


def make_env(
    episode: int = 1000, change: Callable[[Any], gymnasium.Env[Any, Any]] | None = None
) -> gymnasium.Env[Any, Any]:
    """HalfCheetah with the usual wrappers of continuous control, in episodes of so many steps.

    `change` wraps the environment before any other wrapper.

    Normalizers belong to each environment, so that environments stay independent.
    """
    import gymnasium as gym

    env: Any = gym.make("HalfCheetah-v5", max_episode_steps=episode)
    env = env if change is None else change(env)
    env = gym.wrappers.RecordEpisodeStatistics(env)
    env = gym.wrappers.ClipAction(env)
    env = gym.wrappers.NormalizeObservation(env)
    env = gym.wrappers.TransformObservation(
        env, lambda obs: np.clip(obs, -10, 10), env.observation_space
    )
    env = gym.wrappers.NormalizeReward(env, gamma=0.99)
    return gym.wrappers.TransformReward(env, lambda reward: np.clip(float(reward), -10, 10))


def make_envs(
    simulator: Literal["gymnasium", "envpool"],
    num_envs: int,
    shards: int,
    *,
    hosts: Hosts = "inline",
    seed: int = 1,
    threads: int = 1,
) -> gymnasium.vector.VectorEnv[Any, Any, Any]:
    """`num_envs` environments in `shards` even shards.

    One shard in the caller is gymnasium's own vector environment, the fastest there is. An EnvPool
    steps in `threads` threads of its own for each shard, whatever the hosts.
    """
    if simulator == "envpool":
        return ShardedEnv.envpool(
            "HalfCheetah-v4", num_envs, shards, seed=seed, num_threads=threads
        )
    if shards == 1 and hosts == "inline":
        import gymnasium as gym

        with quiet_mujoco():
            return gym.vector.SyncVectorEnv([make_env] * num_envs)
    return ShardedEnv.split([make_env] * num_envs, shards=shards, hosts=hosts)
