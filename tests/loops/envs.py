"""Cheap environments for the loops: episodes are short, so that every autoreset path runs."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Reach(gym.Env):
    """A point in the plane is pushed to a goal under noise. Ends at the goal, or after nine steps.

    Observation: position and goal (4,). Action: push (2,) in [-1, 1].
    """

    limit = 9

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)
        self.action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.position = np.zeros(2, np.float32)
        self.goal = np.zeros(2, np.float32)
        self.count = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.count = 0
        self.position = self.np_random.normal(size=2).astype(np.float32)
        self.goal = self.np_random.uniform(-1, 1, size=2).astype(np.float32)
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self.count += 1
        push = np.clip(np.asarray(action, np.float32), -1.0, 1.0)
        noise = self.np_random.normal(size=2).astype(np.float32)
        self.position = 0.9 * self.position + 0.4 * push + 0.1 * noise
        distance = float(np.linalg.norm(self.position - self.goal))
        success = distance < 0.3
        info = {"success": success}
        return self._observe(), -distance, success, self.count >= self.limit, info

    def _observe(self) -> np.ndarray:
        return np.concatenate([self.position, self.goal])


class Corridor(gym.Env):
    """Left or right along five cells, with slips. The right end pays 1 and ends the episode.

    Observation: position, progress of time (2,). Action: 0 or 1.
    """

    limit = 7

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-1.0, 2.0, (2,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.cell = 0
        self.count = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.cell = int(self.np_random.integers(0, 3))
        self.count = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self.count += 1
        slipped = self.np_random.random() < 0.1
        move = 1 if (int(action) == 1) != slipped else -1
        self.cell = min(max(self.cell + move, 0), 4)
        won = self.cell == 4
        return self._observe(), float(won) - 0.01, won, self.count >= self.limit, {}

    def _observe(self) -> np.ndarray:
        return np.array([self.cell / 4, self.count / self.limit], np.float32)


def with_statistics(make: type[gym.Env]) -> Any:
    """A factory of environments that report each episode's return and length."""
    return lambda: gym.wrappers.RecordEpisodeStatistics(make())
