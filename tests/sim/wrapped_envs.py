"""Environments in the usual wrappers, importable in worker processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium import wrappers as w
from sim_envs import Walk

LIMIT = 3.0
CALLS: list[Any] = []


class Path(Walk):
    """A walk in float64, as MuJoCo's environments are, whose rewards are of the given type."""

    def __init__(self, index: int, limit: int, reward: Callable[[float], Any] = float) -> None:
        super().__init__(index, limit)
        self.reward = reward
        self.observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float64)
        self.odd: dict[int, Any] = {}

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, infos = super().step(action)
        obs = self.odd.get(self.count, obs.astype(np.float64))
        if isinstance(obs, Exception):
            raise obs
        return obs, self.reward(reward), terminated, truncated, infos


def wrapped(index: int = 0, limit: int = 14, reward: Callable[[float], Any] = float) -> Any:
    """The stack that continuous control usually has."""
    env: gymnasium.Env = w.ClipAction(Path(index, limit, reward))
    env = w.NormalizeObservation(env)
    env = w.TransformObservation(env, lambda obs: np.clip(obs, -10, 10), env.observation_space)
    env = w.NormalizeReward(env, gamma=0.9)
    return w.TransformReward(env, lambda reward: np.clip(float(reward), -10, 10))


def statistics(envs: Sequence[Any]) -> list[Any]:
    """What the wrappers of each environment remember."""
    found: list[Any] = []
    for env in envs:
        while isinstance(env, gymnasium.Wrapper):
            for name in ("obs_rms", "return_rms"):
                if (kept := vars(env).get(name)) is not None:
                    found.append((np.array(kept.mean), np.array(kept.var), kept.count))
            found.append(vars(env).get("discounted_reward"))
            env = env.env
        found.append(env.np_random.bit_generator.state["state"]["state"])
    return found
