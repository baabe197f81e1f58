"""The vector environment that most shards are: gymnasium's, with the wrappers of its environments
advanced at once where that is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import concatenate

from rose_compiler.base.errors import fail
from rose_compiler.sim import layout
from rose_compiler.sim.batched import Stack
from rose_compiler.sim.batched_check import compared
from rose_compiler.sim.batched_levels import Rows
from rose_compiler.sim.infos import Raw, ShardInfos, collect, snapshot
from rose_compiler.sim.tables import Add, Table

#: A step's result whose infos are a dict, :class:`ShardInfos`, a :class:`Table` or
#: :class:`Raw`.
BodyResult = tuple[Any, Any, Any, Any, Any]

#: The wrappers that can advance at once, from the outermost in, or none; why none; and the seconds
#: that this saves a step.
Batched = tuple[tuple[str, ...], str, float]


class ShardVector(SyncVectorEnv):
    """gymnasium's vector environment, whose infos remember what each environment returned.

    Its observations are borrowed: the next step overwrites them.
    """

    def __init__(
        self, env_fns: Sequence[Callable[[], gymnasium.Env]], autoreset_mode: AutoresetMode
    ) -> None:
        self._adds: list[Add] = []
        self._stack: Stack | None = None
        self._why: str | None = None
        self._saved_s = 0.0
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
        stack = self._found() if self.at_once and not self._autoreset_envs.any() else None
        if stack is not None and stack.takes(actions):
            return self._step_at_once(stack, actions)
        obs, reward, terminated, truncated, _ = super().step(actions)
        return obs, reward, terminated, truncated, self._infos()

    def batchable(self) -> Batched:
        """Which wrappers can advance at once."""
        stack = self._found()
        return () if stack is None else tuple(stack.names), self._why or "", self._saved_s

    def _found(self) -> Stack | None:
        if self._stack is not None and not self._stack.fresh():
            # set anew, by an environment or by who holds its wrappers
            self._stack = self._why = None
        if self._stack is None and self._why is None:
            self._find()
        return self._stack

    def _find(self) -> None:
        if self.autoreset_mode == AutoresetMode.SAME_STEP:
            self._why = "environments begin their next episode in the step that ends one"
            return
        try:
            stack = Stack(self.envs)
        except ValueError as error:
            self._why = str(error)
            return
        self._why, self._saved_s = compared(self.envs, stack)
        if self._why is None:
            self._stack = stack

    def _step_at_once(self, stack: Stack, actions: Any) -> BodyResult:
        rows = Rows()
        try:
            stack.step(actions, rows, self._returned)
        finally:
            done = len(rows.infos)  # fewer than all if an environment raised
            self._env_obs[:done] = list(rows.obs[:done])
            self._rewards[:done] = rows.reward[:done]
            self._terminations[:done] = rows.terminated[:done]
            self._truncations[:done] = rows.truncated[:done]
        if type(rows.obs) is np.ndarray and type(self._observations) is np.ndarray:
            np.copyto(self._observations, rows.obs, casting="same_kind")
        else:
            self._observations = concatenate(
                self.single_observation_space, self._env_obs, self._observations
            )
        self._autoreset_envs = np.logical_or(self._terminations, self._truncations)
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
