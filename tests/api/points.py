"""Environments of the small loop and others, for processes that need not load torch."""

from __future__ import annotations

import time
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces

import rose_compiler


class Drift(gymnasium.Env):
    """A point that drifts at random; an episode has twelve steps. All fail once one is broken."""

    broken: ClassVar[BaseException | None] = None

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.action_space = spaces.Box(-1.0, 1.0, (3,), np.float32)
        self.position = np.zeros(3, np.float32)
        self.count = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.count = 0
        self.position = self.np_random.normal(size=3).astype(np.float32)
        return self.position.copy(), {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        if self.broken is not None:
            raise self.broken
        self.count += 1
        noise = self.np_random.normal(size=3)
        self.position = (0.9 * self.position + 0.1 * noise + action).astype(np.float32)
        return self.position.copy(), -float(np.abs(self.position).sum()), False, self.count > 11, {}


class Seen(Drift):
    """A point whose steps have two phases."""

    def step(self, action: Any) -> Any:
        with rose_compiler.phase("physics"):
            result = super().step(action)
            time.sleep(0.002)
        with rose_compiler.phase("render"):
            time.sleep(0.002)
        return result


class Stated(Drift):
    """A point that can hand over where it is."""

    def get_state(self) -> Any:
        return self.position, self.count

    def set_state(self, state: Any) -> None:
        self.position, self.count = state


def cheetah() -> gymnasium.Env:
    """MuJoCo's runner with short episodes, whose returns are told."""
    made = gymnasium.make("HalfCheetah-v5", max_episode_steps=40)
    return gymnasium.wrappers.RecordEpisodeStatistics(made)
