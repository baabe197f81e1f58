"""A small environment that fails on command, in any host. Workers import it: it stays light."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Fallen(RuntimeError):
    """What the environment raises: a type of the user's own."""


class Sealed(Exception):
    """An exception that pickles but does not come back."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first)
        self.second = second


class Robot(gymnasium.Env[np.ndarray, np.ndarray]):
    """Two numbers that follow an action. :meth:`arm` plans what one of its steps will do."""

    observation_space = spaces.Box(-10, 10, (2,))
    action_space = spaces.Box(-1, 1, (1,))

    def __init__(self, index: int) -> None:
        self.index = index
        self.steps = 0
        self.at = -1
        self.how = ""
        self.x = np.zeros(2, np.float32)

    def arm(self, index: int, how: str, later: int) -> None:
        """Let environment ``index`` fail so many steps from now: ``raise``, ``sealed``, ``memory``,
        ``kill`` or ``hang``."""
        if index == self.index:
            self.how, self.at = how, self.steps + later

    def calm(self) -> None:
        """Plan nothing any more."""
        self.at = -1

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.x = np.full(2, self.index, np.float32)
        return self.x.copy(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        if self.steps == self.at:
            self._fail()
        self.steps += 1
        self.x = 0.5 * self.x + float(action[0])
        return self.x.copy(), float(self.x[0]), False, False, {}

    def _fail(self) -> None:
        if self.how == "raise":
            raise Fallen(f"robot {self.index} fell over")
        if self.how == "sealed":
            raise Sealed("first", "second")
        if self.how == "memory":
            raise MemoryError(f"robot {self.index}")
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "hang":
            time.sleep(3)
