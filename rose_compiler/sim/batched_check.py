"""Holds wrappers that advance at once against the wrappers' own code, on made-up steps.

Another version of gymnasium may compute otherwise; its code is asked rather than its version.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from time import perf_counter
from typing import Any

import numpy as np

from rose_compiler.sim.batched import Stack
from rose_compiler.sim.batched_levels import Rows

STEPS = 6
#: The share of the time of single steps that must be saved at least.
WORTH = 0.9


class _MadeUp:
    """Stands where an environment does below its wrappers, and returns what it was made with."""

    def __init__(self, env: Any, results: list[tuple[Any, ...]]) -> None:
        self._results = results
        self.action_space = env.action_space
        self.observation_space = env.observation_space
        self.actions: list[Any] = []
        self._at = 0

    @property
    def unwrapped(self) -> Any:
        """Itself."""
        return self

    def step(self, action: Any) -> tuple[Any, ...]:
        """The next of the results."""
        self.actions.append(np.array(action))
        self._at += 1
        return self._results[self._at - 1]


def compared(envs: Sequence[Any], stack: Stack) -> tuple[str | None, float]:
    """Why the stack should not be used for these environments, None if it should: other bits than
    those of its wrappers, or no less time; and the seconds that it saves a step. The environments
    themselves are not touched."""
    depth = len(stack.levels)
    rng = np.random.default_rng(0)
    if any(getattr(e.observation_space, "dtype", np.dtype(int)).kind != "f" for e in stack.inner):
        return "observations are no boxes of floating-point numbers", 0.0
    results = [_made_up(rng, i, env) for i, env in enumerate(stack.inner)]
    given = deepcopy(results)
    space = envs[0].action_space
    shape = (len(envs), *space.shape)
    drawn = [np.asarray(3 * rng.standard_normal(shape), space.dtype) for _ in range(STEPS)]
    with np.errstate(all="ignore"):
        try:
            one_by_one = [_copied(e, depth, r) for e, r in zip(envs, results, strict=True)]
            together = [_copied(e, depth, deepcopy(r)) for e, r in zip(envs, given, strict=True)]
            stacked = Stack(together)
            expected, single_s = _run(one_by_one, drawn, None)
            found, batch_s = _run(together, drawn, stacked)
        except Exception as error:
            return f"made-up steps raise {type(error).__name__}: {error}", 0.0
    if stacked.names != stack.names or expected != found:
        return "at once, they give other bits than by their own code", 0.0
    if _written(results, given):
        return "a wrapper writes into what an environment returns", 0.0
    if _states(one_by_one, depth) != _states(together, depth):
        return "at once, they keep another state than by their own code", 0.0
    if batch_s > WORTH * single_s:
        took = f"{1e6 * batch_s:.0f} us a step at once, {1e6 * single_s:.0f} us one by one"
        return f"too little is won: they take {took}", 0.0
    return None, single_s - batch_s


def _written(results: list[Any], given: list[Any]) -> bool:
    """Whether observations are others than those that were given."""
    pairs = zip(results, given, strict=True)
    return any(
        _bits(a[0]) != _bits(b[0]) for one, two in pairs for a, b in zip(one, two, strict=True)
    )


def _made_up(rng: np.random.Generator, index: int, env: Any) -> list[tuple[Any, ...]]:
    space = env.observation_space
    steps: list[tuple[Any, ...]] = []
    for k in range(STEPS):
        obs = 10 * rng.standard_normal(space.shape).astype(space.dtype)
        if k == 2 and obs.size:
            obs.flat[index % obs.size] = (-0.0, np.inf, np.nan)[index % 3]
        reward = float(rng.standard_normal())
        reward = np.float64(20 * reward) if k % 2 else reward
        terminated = bool(rng.random() < 0.2)
        steps.append((obs, reward, terminated, False, {}))
    return steps


def _copied(env: Any, depth: int, results: list[tuple[Any, ...]]) -> Any:
    """The outer wrappers of an environment again, around made-up results."""
    if depth == 0:
        return _MadeUp(env, results)
    made = object.__new__(type(env))
    inner = _copied(env.env, depth - 1, results)
    own = {k: v if k == "func" else deepcopy(v) for k, v in vars(env).items() if k != "env"}
    made.__dict__.update(own, env=inner)
    return made


def _run(envs: list[Any], actions: list[np.ndarray], stack: Stack | None) -> tuple[Any, float]:
    seen: list[Any] = []
    best = np.inf
    for row in actions:
        started = perf_counter()
        if stack is None:
            steps = [env.step(action) for env, action in zip(envs, row, strict=True)]
            seconds = perf_counter() - started
            obs, reward = [s[0] for s in steps], [s[1] for s in steps]
        else:
            if not stack.fresh(envs) or not stack.takes(row):
                raise ValueError("its settings do not stay")
            rows = Rows()
            stack.step(row, rows, lambda i, info: None)
            seconds = perf_counter() - started
            obs, reward = list(rows.obs), list(rows.reward)
        best = min(best, seconds)
        seen.append([(_bits(o), _bits(float(r))) for o, r in zip(obs, reward, strict=True)])
    bottoms = [env.unwrapped for env in envs]
    return (seen, [[_bits(a) for a in bottom.actions] for bottom in bottoms]), best


def _states(envs: list[Any], depth: int) -> list[Any]:
    found: list[Any] = []
    for env in envs:
        for _ in range(depth):
            for name in ("obs_rms", "return_rms"):
                if (kept := vars(env).get(name)) is not None:
                    found.append([_bits(kept.mean), _bits(kept.var), kept.count])
            found.append(_bits(vars(env).get("discounted_reward", 0.0)))
            env = env.env
    return found


def _bits(value: Any) -> tuple[Any, ...]:
    array = np.asarray(value)
    return array.dtype.str, array.shape, array.tobytes()
