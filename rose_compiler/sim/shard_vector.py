"""The vector environment that most shards are: gymnasium's, with the wrappers of its environments
advanced at once where that is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from rose_compiler.base.errors import fail
from rose_compiler.sim import layout
from rose_compiler.sim.infos import Raw, ShardInfos, collect, snapshot
from rose_compiler.sim.tables import Add, Table
from rose_compiler.sim.together import Together

#: A step's result whose infos are a dict, :class:`ShardInfos`, a :class:`Table` or
#: :class:`Raw`.
BodyResult = tuple[Any, Any, Any, Any, Any]


class ShardVector(SyncVectorEnv):
    """gymnasium's vector environment, whose infos remember what each environment returned.

    Its observations are borrowed: the next step overwrites them.
    """

    def __init__(
        self, env_fns: Sequence[Callable[[], gymnasium.Env]], autoreset_mode: AutoresetMode
    ) -> None:
        self._adds: list[Add] = []
        self.together = Together()
        #: Whether the environments' wrappers advance at once. All results and the state of the
        #: wrappers have the same bits either way.
        self.at_once = False
        single = [partial(_single, fn, i) for i, fn in enumerate(env_fns)]
        super().__init__(single, copy=False, autoreset_mode=autoreset_mode)

    def _add_info(
        self, vector_infos: dict[str, Any], env_info: dict[str, Any], env_num: int
    ) -> dict[str, Any]:
        self._adds.append((env_num, snapshot(env_info)))
        return vector_infos

    def step(self, actions: Any) -> BodyResult:
        """Step every environment with its row of the actions."""
        self._adds = []
        if not self.at_once or not self.together.step(self, actions, self._returned):
            super().step(actions)
        return (
            self._observations,
            np.copy(self._rewards),
            np.copy(self._terminations),
            np.copy(self._truncations),
            self._infos(),
        )

    def _returned(self, index: int, info: dict[str, Any]) -> None:
        self._add_info({}, info, index)

    def reset(  # type: ignore[override]
        self, *, seed: Any = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, ShardInfos | Table | Raw]:
        """Reset the environments, as gymnasium does."""
        self._adds = []
        obs, _ = super().reset(seed=seed, options=options)
        return obs, self._infos()

    def write_into(self, obs: Any) -> None:
        """Put observations into these arrays from now on."""
        self._observations = obs

    def _infos(self) -> ShardInfos | Table | Raw:
        adds, self._adds = self._adds, []
        for _, info in adds:
            if "final_obs" in info:  # an environment may return its own buffer
                info["final_obs"] = layout.copy(info["final_obs"])
        return collect(adds, self.num_envs)


def _single(factory: Callable[[], gymnasium.Env], index: int) -> gymnasium.Env:
    env = factory()
    if is_vector(env) or not isinstance(env, gymnasium.Env):
        raise fail(
            "sim-shards",
            f"factory {index} of a shard's list does not build a single environment",
            expected="a gymnasium.Env",
            found=type(env).__name__,
            help="give a factory of a vector environment as a shard of its own, not in a list",
        )
    return env


def is_vector(value: object) -> bool:
    """Whether a value is an environment of many rows."""
    return isinstance(value, VectorEnv) or is_envpool(value)


def is_envpool(value: object) -> bool:
    """Whether a value is an EnvPool, of any of its interfaces."""
    return any(base.__module__.split(".")[0] == "envpool" for base in type(value).__mro__)
