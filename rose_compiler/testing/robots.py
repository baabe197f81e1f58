"""A small environment and a component that fail on command, in any host. Workers import them:
they stay light."""

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
        _fail(self.how, f"robot {self.index}")


class Judge:
    """Scores numbers. :meth:`arm` plans what one of its calls will do."""

    def __init__(self) -> None:
        self.calls = 0
        self.at = -1
        self.how = ""

    def arm(self, how: str, later: int) -> None:
        """Fail so many calls from now; ``how`` as for :meth:`Robot.arm`."""
        self.how, self.at = how, self.calls + later

    def calm(self) -> None:
        """Plan nothing any more."""
        self.at = -1

    def score(self, number: float) -> float:
        """Twice the number."""
        if self.calls == self.at:
            _fail(self.how, "the judge")
        self.calls += 1
        return 2 * number


def _fail(how: str, who: str) -> None:
    if how == "raise":
        raise Fallen(f"{who} fell over")
    if how == "sealed":
        raise Sealed("first", "second")
    if how == "memory":
        raise MemoryError(who)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "hang":
        time.sleep(2)
