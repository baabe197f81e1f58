"""The wrappers around a shard's environments, advanced for all environments at once.

A usual stack of wrappers (clipped actions, normalized observations and rewards) spends nearly all
its time in the fixed cost of numpy's calls, once for each environment and wrapper; for light
physics that is more than the physics. Here every environment is stepped below its wrappers, and
each wrapper then treats the whole batch: the same values, the same bits, the same state in the
wrappers after each step.

What is not known to keep environments apart is left below: the stack ends at the first wrapper
that is no known class, has methods of its own, or differs between environments. Where a step is
not an ordinary one (an episode begins, a value has another type) the wrappers run one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from operator import is_
from typing import Any

import numpy as np
from gymnasium import Wrapper
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete

from rose_compiler.sim.batched_levels import LEVELS, Level, Rows

_METHODS = frozenset(("step", "reset", "action", "observation", "reward"))


class Stack:
    """The outer wrappers of all environments of a shard, from the outermost in.

    Raises ``ValueError``, which says why, where there is nothing to advance at once.
    """

    def __init__(self, envs: Sequence[Any]) -> None:
        self.levels: list[Level] = []
        inner, why = list(envs), ""
        self.envs = list(envs)
        if len(set(map(id, envs))) < len(envs):
            raise ValueError("one environment stands in several rows")
        while not why:
            found, why = _level(inner)
            if found is not None:
                self.levels.append(found)
                inner = [w.env for w in inner]
        self.inner = inner
        if not self.levels:
            raise ValueError(why)
        self._observes = any(level.observes for level in self.levels)
        space = envs[0].action_space
        if not isinstance(space, Box | Discrete | MultiDiscrete | MultiBinary):
            raise ValueError(f"actions of a {type(space).__name__} space have no rows")
        self._shape: tuple[int, ...] = space.shape or ()
        self._numeric = isinstance(space, Box)

    @property
    def names(self) -> list[str]:
        """The classes of the wrappers that are taken together, from the outermost in."""
        return [level.kind.__name__ for level in self.levels]

    def fresh(self, envs: Sequence[Any]) -> bool:
        """Whether environments and wrappers are still what they were when this was made."""
        if len(envs) != len(self.envs) or not all(map(is_, envs, self.envs)):
            return False
        return all(level.fresh() for level in self.levels)

    def takes(self, actions: Any) -> bool:
        """Whether these actions can be cut into rows."""
        if type(actions) is not np.ndarray or actions.shape != (len(self.inner), *self._shape):
            return False
        return not self._numeric or actions.dtype.kind == "f"

    def step(self, actions: np.ndarray, rows: Rows, returned: Callable[[int, Any], None]) -> None:
        """Step every environment with its row; ``returned`` is told the infos of each in turn.

        Raises what an environment raises, once the wrappers of those before it are done with
        their step, as they are where each environment takes its step by itself. ``rows``, empty
        before, then has these environments only.
        """
        for level in self.levels:
            actions = level.down(actions)
        try:
            for i, (env, action) in enumerate(zip(self.inner, actions, strict=True)):
                obs, reward, terminated, truncated, info = env.step(action)
                # where wrappers make other observations, they look before the next environment
                # steps, which may write into the same buffer
                rows.obs.append(copied(obs) if self._observes else obs)
                rows.reward.append(reward.copy() if type(reward) is np.ndarray else reward)
                rows.terminated.append(terminated)
                rows.truncated.append(truncated)
                rows.infos.append(info)
                returned(i, info)
        except BaseException:
            for level in reversed(self.levels):
                singly(level, rows)
            raise
        for level in reversed(self.levels):
            if not level.up(rows):
                singly(level, rows)


def copied(obs: Any) -> Any:
    """An observation that no later step changes."""
    return obs.copy() if type(obs) is np.ndarray else deepcopy(obs)


def singly(level: Level, rows: Rows) -> None:
    """Pass results on by the wrappers' own code, one environment at a time."""
    rows.obs, rows.reward = list(rows.obs), list(rows.reward)
    for i in range(len(rows.infos)):
        wrapper = level.wrappers[i]
        given = rows.obs[i], rows.reward[i], rows.terminated[i], rows.truncated[i], rows.infos[i]
        inner, wrapper.env = wrapper.env, Given(given, wrapper.env)
        try:
            result = wrapper.step(wrapper.env.action)
        finally:
            wrapper.env = inner
        rows.obs[i], rows.reward[i], rows.terminated[i], rows.truncated[i], rows.infos[i] = result


class Given:
    """An environment that has stepped already: its step returns what it has returned."""

    def __init__(self, result: tuple[Any, ...], env: Any) -> None:
        self._result, self._env = result, env
        self.action_space = env.action_space
        #: Actions have passed the wrappers before; this one goes nowhere.
        self.action = np.zeros(env.action_space.shape or (), np.float32)

    def step(self, action: Any) -> tuple[Any, ...]:
        """The result, whatever the action."""
        del action
        return self._result


def _level(wrappers: list[Any]) -> tuple[Level | None, str]:
    """The level that these wrappers make, or why they make none."""
    kind = type(wrappers[0])
    name = kind.__name__
    if not issubclass(kind, Wrapper):
        return None, "no wrapper stands around the environments"
    if any(type(w) is not kind for w in wrappers):
        return None, f"environments have different wrappers ({name} among them)"
    if kind not in LEVELS:
        return None, f"{name} is no wrapper that can take a batch"
    if any(_METHODS & vars(w).keys() for w in wrappers):
        return None, f"a {name} has a method of its own"
    level = LEVELS[kind].of(wrappers)
    if level is None:
        return None, f"what {name} does is not known to be the same for each row"
    return level, ""
