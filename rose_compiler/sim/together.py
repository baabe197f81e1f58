"""Lets gymnasium's vector environment in the caller advance its wrappers at once.

:class:`ShardVector <rose_compiler.sim.shard_vector.ShardVector>` does so by itself; to a plain
``SyncVectorEnv`` it is done from outside, for the time of a compiled function's run.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import concatenate

from rose_compiler.sim.batched import Stack
from rose_compiler.sim.batched_check import compared
from rose_compiler.sim.batched_levels import Rows
from rose_compiler.sim.wrappers import innermost

#: The wrappers that can advance at once, from the outermost in, or none; why none; and the seconds
#: that this saves a step.
Batched = tuple[tuple[str, ...], str, float]

#: Where gymnasium's vector environment keeps the rows of its last step.
_KEPT = ("_env_obs", "_rewards", "_terminations", "_truncations", "_autoreset_envs")


class Together:
    """The wrappers of one vector environment, found when they are first needed.

    It is handed the vector environment with each call, and keeps its environments only.
    """

    def __init__(self) -> None:
        self._stack: Stack | None = None
        self._why: str | None = None
        self._saved_s = 0.0

    def batchable(self, vector: SyncVectorEnv) -> Batched:
        """Which wrappers can advance at once."""
        stack = self._found(vector)
        return () if stack is None else tuple(stack.names), self._why or "", self._saved_s

    def step(
        self, vector: SyncVectorEnv, actions: Any, returned: Callable[[int, Any], None]
    ) -> bool:
        """Step all environments; False, with nothing done, if gymnasium should.

        The vector environment then has what its own step leaves behind. ``returned`` is told the
        infos of each environment in turn. Raises what an environment raises.
        """
        stack = None if vector._autoreset_envs.any() else self._found(vector)
        if stack is None or not stack.takes(actions):
            return False
        rows = Rows()
        try:
            stack.step(actions, rows, returned)
        finally:
            done = len(rows.infos)  # fewer than all if an environment raised
            vector._env_obs[:done] = list(rows.obs[:done])
            _put(vector._rewards, rows.reward[:done])
            _put(vector._terminations, rows.terminated[:done])
            _put(vector._truncations, rows.truncated[:done])
        whole = vector._observations
        if type(rows.obs) is type(whole) is np.ndarray and rows.obs.shape == whole.shape:
            np.copyto(vector._observations, rows.obs, casting="same_kind")
        else:
            vector._observations = concatenate(
                vector.single_observation_space, vector._env_obs, vector._observations
            )
        vector._autoreset_envs = np.logical_or(vector._terminations, vector._truncations)
        return True

    def _found(self, vector: SyncVectorEnv) -> Stack | None:
        if self._stack is not None and not self._stack.fresh(vector.envs):
            # set anew, by an environment or by who holds its wrappers
            self._stack = self._why = None
        if self._stack is None and self._why is None:
            self._find(vector)
        return self._stack

    def _find(self, vector: SyncVectorEnv) -> None:
        if not all(hasattr(vector, name) for name in _KEPT):
            self._why = "this version of gymnasium keeps the rows of a step elsewhere"
            return
        if vector.autoreset_mode == AutoresetMode.SAME_STEP:
            self._why = "environments begin their next episode in the step that ends one"
            return
        try:
            stack = Stack(vector.envs)
        except ValueError as error:
            self._why = str(error)
            return
        self._why, self._saved_s = compared(vector.envs, stack)
        if self._why is None:
            self._stack = stack


def _put(array: np.ndarray, values: Any) -> None:
    """Put values into the first places; one by one where some are arrays of one element."""
    if type(values) is np.ndarray or not any(type(v) is np.ndarray for v in values):
        array[: len(values)] = values
        return
    for i, value in enumerate(values):
        array[i] = value


class Lent:
    """Does to a ``SyncVectorEnv`` of the user what a shard does by itself."""

    def __init__(self, vector: SyncVectorEnv, together: Together) -> None:
        self._vector, self._together = vector, together

    def batchable(self) -> list[Batched]:
        """Which wrappers can advance at once: one item, for all environments."""
        if "step" in vars(self._vector):
            return [((), "its step was replaced", 0.0)]
        return [self._together.batchable(self._vector)]

    def batch_wrappers(self, on: bool) -> None:
        """Let the environments' wrappers advance at once from now on, or one by one."""
        if on:
            vars(self._vector)["step"] = self._step
        else:
            vars(self._vector).pop("step", None)

    def _step(self, actions: Any) -> Any:
        vector = self._vector
        infos: dict[str, Any] = {}

        def returned(index: int, info: dict[str, Any]) -> None:
            nonlocal infos
            infos = vector._add_info(infos, info, index)

        if not self._together.step(vector, actions, returned):
            return type(vector).step(vector, actions)
        return (
            deepcopy(vector._observations) if vector.copy else vector._observations,
            np.copy(vector._rewards),
            np.copy(vector._terminations),
            np.copy(vector._truncations),
            infos,
        )


_known: WeakKeyDictionary[SyncVectorEnv, Together] = WeakKeyDictionary()


def batching(env: Any) -> Any:
    """What lets the wrappers of a simulator's environments advance at once, with ``batchable`` and
    ``batch_wrappers``; None if nothing does. Vector wrappers around the simulator don't matter."""
    base = innermost(env)
    if callable(getattr(base, "batch_wrappers", None)):
        return base
    if type(base) is not SyncVectorEnv:
        return None
    return Lent(base, _known.setdefault(base, Together()))
