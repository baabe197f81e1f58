"""HalfCheetah that plays chunks of actions. Worker processes import this module: no torch here."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

from bench.envs import ACT, make_env

#: Actions in a chunk.
CHUNK = 4


class Chunks(gymnasium.Wrapper):
    """A step plays `CHUNK` actions and returns the sum of their rewards; what is left of a chunk
    when an episode ends is not played."""

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (CHUNK * ACT,), np.float32)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Play a chunk, shape (CHUNK * ACT,)."""
        total = 0.0
        for one in np.asarray(action).reshape(CHUNK, ACT):
            obs, reward, terminated, truncated, info = self.env.step(one)
            total += float(reward)
            if terminated or truncated:
                break
        return obs, total, terminated, truncated, info


def make_chunked() -> gymnasium.Env:
    """A HalfCheetah for chunks."""
    return Chunks(make_env())
