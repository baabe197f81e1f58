"""Small environments for the tests of simulators, importable in worker processes.

They stand here and not beside their tests, which load torch: a worker would take seconds to start.
"""

from __future__ import annotations

import functools
import os
import pathlib
import random
import signal
import time
from collections.abc import Callable
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from gymnasium.wrappers.vector import RecordEpisodeStatistics


class Walk(gymnasium.Env):
    """A random walk that ends at random, with infos of every kind gymnasium can merge."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"]}

    def __init__(self, index: int = 0, limit: int = 12) -> None:
        self.index = index
        self.limit = limit
        self.render_mode = "rgb_array"
        self.observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.position = np.zeros(3, np.float32)
        self.actions: list[Any] = []
        self.count = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.count = 0
        self.position = self.np_random.normal(size=3).astype(np.float32)
        if options and "start" in options:
            self.position[0] = options["start"]
        return self.position.copy(), {"start": float(self.position[0]), "index": self.index}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self.actions = [*self.actions[-1:], action]
        self.count += 1
        noise = self.np_random.normal(size=3)
        push = float(np.sum(np.asarray(action, np.float64)))
        self.position = (self.position + 0.1 * noise + push).astype(np.float32)
        terminated = bool(self.np_random.random() < 0.05)
        infos: dict[str, Any] = {
            "distance": float(np.abs(self.position).sum()),
            "count": self.count,
            "late": self.count > 5,
            "speed": np.float32(push),
            "pose": self.position * 2,
            "nested": {"x": self.position[0], "deep": {"name": f"walk {self.index}"}},
        }
        if self.count % 3 == 0:
            infos["third"] = np.int16(self.count)
            infos["nested"]["note"] = ["list", self.count]
        if self.index % 2:
            infos["odd"] = "yes"
        return self.position.copy(), push - 0.5, terminated, self.count >= self.limit, infos

    def render(self) -> np.ndarray:
        return np.full((4, 4, 3), self.index, np.uint8)

    def scale(self, factor: float, *, shift: float = 0.0) -> float:
        return self.index * factor + shift


class Plain(Walk):
    """A walk with the same numbers and arrays in its infos on every step of an episode."""

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        *rest, infos = super().step(action)
        kept = ("distance", "count", "speed", "pose")
        return (*rest, {key: infos[key] for key in kept})  # type: ignore[return-value]


class Maze(gymnasium.Env):
    """Dict and Tuple observations of all kinds, discrete actions."""

    def __init__(self, limit: int = 9, text: bool = False) -> None:
        self.limit = limit
        self.count = 0
        parts: dict[str, spaces.Space] = {
            "image": spaces.Box(0, 255, (2, 4, 3), np.uint8),
            "cell": spaces.Discrete(7, start=2),
            "pair": spaces.Tuple((spaces.MultiBinary(3), spaces.MultiDiscrete([4, 5]))),
            "inner": spaces.Dict({"v": spaces.Box(-1, 1, (), np.float64)}),
        }
        if text:
            parts["text"] = spaces.Text(8)
        self.text = text
        self.observation_space = spaces.Dict(parts)
        self.action_space = spaces.Discrete(4)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.count = 0
        return self._observe(0), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        done = self.np_random.random() < 0.1
        return self._observe(int(action)), float(action), bool(done), self.count >= self.limit, {}

    def _observe(self, action: int) -> dict[str, Any]:
        rng = self.np_random
        obs = {
            "image": rng.integers(0, 256, (2, 4, 3)).astype(np.uint8),
            "cell": np.int64(2 + rng.integers(7)),
            "pair": (rng.integers(0, 2, 3).astype(np.int8), rng.integers(0, 4, 2)),
            "inner": {"v": np.float64(rng.uniform(-1, 1))},
        }
        if self.text:
            obs["text"] = "abc"[: 1 + action % 3]
        return obs


class Moody(Walk):
    """Infos whose types differ between environments and steps."""

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, _ = super().step(action)
        mood: Any = self.count if self.index % 2 else self.count + 0.75
        infos: dict[str, Any] = {"mood": mood, "_mood_": 1}
        if self.index == 2:
            infos["_mood"] = True
        return obs, reward, terminated, truncated, infos


class Own(Exception):
    """An exception that pickles well and fails to unpickle."""

    def __init__(self, first: str, second: int) -> None:
        super().__init__(first)
        self.second = second


class Faulty(Walk):
    """Fails in a chosen way at its third step."""

    def __init__(self, how: str, index: int = 0) -> None:
        super().__init__(index, limit=1000)
        self.how = how

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        if self.count == 2:
            if self.how == "raise":
                raise ValueError("the robot fell over")
            if self.how == "own":
                raise Own("broken", 3)
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "exit":
                os._exit(3)
            if self.how == "hang":
                time.sleep(60)
        obs, reward, _, _, infos = super().step(action)
        return obs, reward, False, False, infos


class Mortal(Walk):
    """A walk that can hand over its state, and ends its process, hangs or raises in a step: as
    long as there is a file of that name, which it takes away first unless ``always``."""

    def __init__(
        self, index: int, how: str = "none", at: int = 0, file: str = "", always: bool = False
    ) -> None:
        super().__init__(index)
        self.how, self.at, self.file, self.always = how, at, pathlib.Path(file), always
        self.total = 0
        self.push = 0.0
        self.draws = False

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self.total += 1
        if self.how != "none" and self.total == self.at and self.file.exists():
            if not self.always:
                self.file.unlink()
            if self.how == "hang":
                time.sleep(60)
            if self.how == "raise":
                raise KeyError("the environment's own")
            os.kill(os.getpid(), signal.SIGKILL)
        obs, reward, terminated, truncated, infos = super().step(action)
        noise = np.random.normal() + random.random() if self.draws else 0.0  # noqa: NPY002
        return obs, reward + self.push + noise, terminated, truncated, infos

    def shove(self, push: float) -> float:
        self.push += push
        return self.push

    def apply(self, function: Callable[[float], float], by: list[float]) -> float:
        self.push = function(self.push) + by[0]
        return self.push

    def get_state(self) -> Any:
        return self.position.copy(), self.count, self.total, self.push, list(self.actions)

    def set_state(self, state: Any) -> None:
        self.position, self.count, self.total, self.push, self.actions = state


def drawing(index: int, *args: Any) -> Mortal:
    """One that draws from its process's generators, whose seeds are the same each time."""
    random.seed(index)
    np.random.seed(index)  # noqa: NPY002
    env = Mortal(index, *args)
    env.draws = True
    return env


def limited(index: int) -> gymnasium.Env:
    """Four steps an episode, by a wrapper that counts them."""
    return gymnasium.wrappers.TimeLimit(Mortal(index), 4)


def in_own_wrapper(index: int) -> gymnasium.Env:
    class Own(gymnasium.Wrapper):
        pass

    return Own(Mortal(index))


class Napping(Mortal):
    """Takes a while over a step."""

    def step(self, action: Any) -> Any:
        time.sleep(0.1)
        return super().step(action)


class Phased(Walk):
    """Names what it does in a step."""

    def step(self, action: Any) -> Any:
        import rose_compiler as rose  # in its process

        with rose.phase("physics"):
            time.sleep(0.002)
            return super().step(action)


class Falling(Phased):
    """Raises in its third step."""

    def step(self, action: Any) -> Any:
        result = super().step(action)
        if self.count == 3:
            raise ValueError("the robot fell over")
        return result


class Slow(Walk):
    """Takes its time over a step."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        time.sleep(self.seconds)
        return super().step(action)


class Meeting(Walk):
    """A step ends once the other environment is in its step too."""

    def __init__(self, mine: str, other: str) -> None:
        super().__init__()
        self.mine, self.other = pathlib.Path(mine), pathlib.Path(other)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self.mine.touch()
        deadline = time.monotonic() + 20
        while not self.other.exists():
            if time.monotonic() > deadline:
                raise TimeoutError("the other environment did not step at the same time")
            time.sleep(0.005)
        return super().step(action)


class Keeper(Walk):
    """Hands out its own buffers and writes into them later."""

    def __init__(self) -> None:
        super().__init__(limit=4)
        self.buffer = np.zeros(3, np.float32)
        self.info: dict[str, Any] = {"pose": np.zeros(3), "n": 0}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        obs, _ = super().reset(seed=seed)
        self.buffer[:] = obs
        self.info["n"] = -1
        self.info["pose"][:] = -1
        return self.buffer, self.info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, _ = super().step(action)
        self.buffer[:] = obs
        self.info["n"] = self.count
        self.info["pose"][:] = obs
        return self.buffer, reward, terminated, truncated, self.info


def modules_loaded(*names: str) -> list[str]:
    """Which of these modules the process that runs this has loaded."""
    import sys

    return [name for name in names if name in sys.modules]


class Spy(Walk):
    """Says what its process has loaded and set."""

    def loaded(self) -> list[str]:
        return modules_loaded("torch", "gymnasium", "numpy")

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    def pid(self) -> int:
        return os.getpid()


def recorded(start: int, count: int) -> RecordEpisodeStatistics:
    """Walks ``start`` to ``start + count`` with their own episode statistics."""
    fns = [functools.partial(Walk, i) for i in range(start, start + count)]
    return RecordEpisodeStatistics(SyncVectorEnv(fns))


class Batch(gymnasium.vector.VectorEnv):
    """A vector environment of its own kind: counts up, and hands out its own buffers."""

    metadata: ClassVar[dict[str, Any]] = {"autoreset_mode": gymnasium.vector.AutoresetMode.DISABLED}

    def __init__(self, count: int) -> None:
        self.num_envs = count
        self.single_observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
        self.single_action_space = spaces.Box(-1, 1, (1,), np.float32)
        self.observation_space = spaces.Box(-np.inf, np.inf, (count, 1), np.float32)
        self.action_space = spaces.Box(-1, 1, (count, 1), np.float32)
        self.obs = np.zeros((count, 1), np.float32)
        self.rewards = np.zeros(count, np.float32)
        self.no = np.zeros(count, np.bool_)
        self.time = np.zeros(count)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.obs[:, 0] = seed + np.arange(self.num_envs)
        return self.obs, {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        self.obs += 1
        self.rewards[:] = self.obs[:, 0]
        self.time += 1
        infos: dict[str, Any] = {
            "time": self.time,
            "names": [f"e{i}" for i in range(self.num_envs)],
            "backend": "numpy",
            "sub": {"matrix": np.zeros((self.num_envs, 2, 2))},
        }
        if self.num_envs > 2:
            infos["only_big"] = np.ones(self.num_envs, np.int64)
        return self.obs, self.rewards, self.no, self.no, infos
