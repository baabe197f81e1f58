"""The environments of one shard, where they live: in the caller, in a thread or in a process.

A body steps environments and knows nothing of hosts. What it returns may be overwritten by its
next step; the shard that holds it copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter, thread_time
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, VectorEnv

from rose_compiler.base import phases
from rose_compiler.base.errors import ConfigError, fail, register
from rose_compiler.sim import layout
from rose_compiler.sim.quiet import quiet_mujoco
from rose_compiler.sim.shard_vector import (
    BodyResult,
    ShardVector,
    is_envpool,
    is_vector,
)
from rose_compiler.sim.together import Batched

register(
    "sim-shards",
    ConfigError,
    "the shards given to ShardedEnv can't form one simulator",
    "give each shard as a factory of an environment, a list of such factories, or a factory of "
    "a vector environment; all with the same spaces and autoreset mode",
)


@dataclass(frozen=True)
class Timed:
    """A step's result, when it began and ended (``perf_counter``) with its CPU seconds, and the
    named phases in it."""

    result: BodyResult
    times: tuple[float, float, float]
    phases: list[phases.Ended]


@dataclass(frozen=True)
class Traits:
    """What the whole simulator must know of a shard."""

    num_envs: int
    single_observation_space: gymnasium.Space
    single_action_space: gymnasium.Space
    metadata: dict[str, Any]
    render_mode: str | None
    native_async: bool
    seeds_on_reset: bool


class Body:
    """A vector environment that is one shard."""

    #: True if :meth:`begin` returns at once.
    native_async = False
    #: False if an environment's seed is fixed when it is built.
    seeds_on_reset = True

    def __init__(self, env: Any) -> None:
        self.env = env
        self.num_envs: int = env.num_envs
        self.offset = 0
        self._last: Any = None
        self._result: BodyResult | None = None
        self._kept = False

    def traits(self) -> Traits:
        """Spaces and metadata of the shard."""
        env = self.env
        return Traits(
            self.num_envs,
            env.single_observation_space,
            env.single_action_space,
            dict(env.metadata),
            env.render_mode,
            self.native_async,
            self.seeds_on_reset,
        )

    def place(self, offset: int) -> None:
        """Tell the shard the index of its first environment in the whole batch."""
        self.offset = offset

    def step(self, actions: Any) -> BodyResult:
        """One step, from its begin to its end."""
        self.begin(actions)
        return self.finish()

    def timed_step(self, actions: Any) -> Timed:
        """One step, with its times and the phases in it."""
        ended: list[phases.Ended] = []
        before = phases.divert(ended)
        try:
            start, cpu = perf_counter(), thread_time()
            result = self.step(actions)
            times = start, perf_counter(), thread_time() - cpu
        finally:
            phases.divert(before)
        return Timed(result, times, ended)

    def begin(self, actions: Any) -> None:
        """Begin a step."""
        self._result = self.env.step(actions)

    def finish(self) -> BodyResult:
        """The result of the step that was begun."""
        result, self._result = self._result, None
        assert result is not None
        self._last = result[0]
        return result

    def reset(
        self, seed: Any, options: dict[str, Any] | None, mask: np.ndarray | None
    ) -> tuple[Any, Any]:
        """Reset all environments, or those of the mask; the others' observations stay."""
        if mask is not None:
            if not mask.any() and self._last is not None:
                return self._last, {}
            options = {**(options or {}), "reset_mask": mask}
        obs, infos = self.env.reset(seed=seed, options=options)
        self._last = obs
        return obs, infos

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Each environment's attribute, or the result of its method."""
        return tuple(self.env.call(name, *args, **kwargs))

    def set_attr(self, name: str, values: list[Any]) -> None:
        """Set an attribute of each environment."""
        self.env.set_attr(name, values)

    def batch_wrappers(self, on: bool) -> None:
        """Let the environments' wrappers advance at once from now on, or one by one."""
        if type(self.env) is ShardVector:
            self.env.at_once = on

    def batchable(self) -> Batched:
        """Which wrappers can advance at once."""
        if type(self.env) is ShardVector:
            return self.env.together.batchable(self.env)
        return (), f"{type(self.env).__name__} steps its environments by its own code", 0.0

    def itself(self) -> Body:
        """The body, for who shares its memory."""
        return self

    def render(self) -> tuple[Any, ...]:
        """Each environment's frame."""
        frames = self.env.render()
        return () if frames is None else tuple(frames)

    def keep(self) -> Body:
        """Hand the body itself out; the next ``close``, by its host, leaves it open."""
        self._kept = True
        return self

    def close(self, **kwargs: Any) -> None:
        """Close the environments."""
        if self._kept:
            self._kept = False
            return
        self.env.close(**kwargs)


class AsyncBody(Body):
    """gymnasium's AsyncVectorEnv, which steps in processes of its own."""

    native_async = True

    def begin(self, actions: Any) -> None:
        """Hand the actions to the environments' processes."""
        self.env.step_async(actions)

    def finish(self) -> BodyResult:
        """Collect what they return."""
        result: BodyResult = self.env.step_wait()
        self._last = result[0]
        return result


class EnvPoolBody(Body):
    """An EnvPool, which steps in threads of its own between ``send`` and ``recv``.

    Rows are in order of the environment's index. Infos are EnvPool's: arrays without masks, in
    which ``env_id`` counts from the whole batch's first environment.
    """

    native_async = True
    seeds_on_reset = False

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        if env.is_async:
            raise fail(
                "sim-shards",
                "an EnvPool with a batch size can't be a shard: its batches hold changing "
                "environments",
                expected="batch_size equal to num_envs, or left out",
                found=f"batch_size={env.config['batch_size']}, num_envs={env.num_envs}",
            )
        self._ids = np.arange(self.num_envs)

    def begin(self, actions: Any) -> None:
        """Hand the actions to EnvPool's threads, which copy them."""
        self.env.send(actions)

    def finish(self) -> BodyResult:
        """Collect the step."""
        obs, reward, terminated, truncated, infos = self.env.recv()
        ids = infos["env_id"]
        if not np.array_equal(ids, self._ids):
            order = np.argsort(ids)
            obs, infos = _take(obs, order), _take(infos, order)
            reward, terminated, truncated = reward[order], terminated[order], truncated[order]
        self._last = obs
        return obs, reward, terminated, truncated, self._numbered(infos)

    def reset(
        self, seed: Any, options: dict[str, Any] | None, mask: np.ndarray | None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all environments, or those of the mask.

        With a mask the infos have EnvPool's keys with a ``_key`` mask each.
        """
        del seed  # fixed when the pool was built; the whole simulator says so
        if mask is None or self._last is None:
            obs, infos = self.env.reset(options=options)
            order = np.argsort(infos["env_id"])
            self._last = _take(obs, order)
            return self._last, self._numbered(_take(infos, order))
        if not mask.any():
            return self._last, {}
        obs, infos = self.env.reset(options={**(options or {}), "reset_mask": mask})
        ids = np.array(infos["env_id"])
        self._last = _put(layout.copy(self._last), ids, obs)
        infos = self._numbered(infos)
        return self._last, _masked(infos, ids, self.num_envs)

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """EnvPool's environments live in C++ and have no attributes to read."""
        raise AttributeError(f"EnvPool's environments have no attribute {name!r} to read or call")

    def set_attr(self, name: str, values: list[Any]) -> None:
        """EnvPool's environments live in C++ and have no attributes to set."""
        raise AttributeError(f"EnvPool's environments have no attribute {name!r} to set")

    def render(self) -> tuple[Any, ...]:
        """Each environment's frame."""
        return tuple(self.env.render(self._ids))

    def _numbered(self, infos: dict[str, Any]) -> dict[str, Any]:
        if self.offset:
            infos = dict(infos)
            for key, value in infos.items():
                if isinstance(value, dict):
                    infos[key] = self._numbered(value)
                elif key == "env_id":
                    infos[key] = value + np.asarray(self.offset, value.dtype)
        return infos


def make_body(built: Any) -> Body:
    """The body around what a shard's factory returned, or around a given vector environment."""
    if is_envpool(built):
        if not isinstance(built, gymnasium.Env | VectorEnv):
            raise fail(
                "sim-shards",
                "an EnvPool shard must have gymnasium's interface",
                expected='envpool.make(..., env_type="gymnasium")',
                found=type(built).__name__,
            )
        return EnvPoolBody(built)
    if isinstance(built, AsyncVectorEnv):
        return AsyncBody(built)
    if isinstance(built, VectorEnv):
        return Body(built)
    raise fail(
        "sim-shards",
        "a shard is no environment",
        expected="a gymnasium.Env, a gymnasium.vector.VectorEnv or an EnvPool",
        found=f"{type(built).__name__}",
    )


@dataclass(frozen=True)
class BodyFactory:
    """Builds a shard's body in its host.

    ``item`` is a factory, a sequence of factories of single environments, or a vector environment
    that is built already.
    """

    item: Any
    autoreset_mode: AutoresetMode

    def __call__(self) -> Body:
        with quiet_mujoco():
            if is_vector(self.item):
                return make_body(self.item)
            if not callable(self.item):
                return Body(ShardVector(self.item, self.autoreset_mode))
            built = self.item()
            if is_vector(built) or not isinstance(built, gymnasium.Env):
                return make_body(built)
            return Body(ShardVector([lambda: built], self.autoreset_mode))


def _take(tree: Any, order: np.ndarray) -> Any:
    if isinstance(tree, dict):
        return {key: _take(value, order) for key, value in tree.items()}
    if isinstance(tree, tuple):
        return tuple(_take(value, order) for value in tree)
    return tree[order]


def _put(tree: Any, ids: np.ndarray, part: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _put(value, ids, part[key]) for key, value in tree.items()}
    if isinstance(tree, tuple):
        return tuple(_put(value, ids, item) for value, item in zip(tree, part, strict=True))
    tree[ids] = part
    return tree


def _masked(infos: dict[str, Any], ids: np.ndarray, count: int) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in infos.items():
        if isinstance(value, dict):
            out[key] = _masked(value, ids, count)
        else:
            out[key] = np.zeros((count, *value.shape[1:]), value.dtype)
            out[key][ids] = value
        out[f"_{key}"] = np.zeros(count, dtype=np.bool_)
        out[f"_{key}"][ids] = True
    return out
