"""The state of one shard's environments, taken out of a process and put into another one.

An environment hands it over by ``get_state()`` and ``set_state(state)``. What lies around it is
taken from the objects themselves: gymnasium's own wrappers (steps so far, statistics of episodes),
the vector environment's (which environments are to be reset next), and the generators of the
environment and of its process.
"""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from rose_compiler.sim import layout
from rose_compiler.sim.shard_vector import ShardVector

#: What gymnasium's vector environment remembers from one step to the next.
_OF_VECTOR = ("_env_obs", "_rewards", "_terminations", "_truncations", "_autoreset_envs")
_GENERATOR = ("_np_random", "_np_random_seed")


def why_none(env: Any) -> str | None:
    """Why the state of a shard's vector environment can't be handed over; None where it can."""
    if type(env) is not ShardVector:
        return None if _offers(env) else _lacking(env)
    for single in env.envs:
        for layer in _layers(single):
            if _offers(layer):
                break
            if not type(layer).__module__.startswith("gymnasium.wrappers."):
                return _lacking(layer)
    return None


def take(env: Any) -> Any:
    """The state of a shard's vector environment; :func:`why_none` has been asked."""
    generators = random.getstate(), np.random.get_state(), _torch_state()  # noqa: NPY002
    if type(env) is not ShardVector:
        return generators, env.get_state()
    kept = {name: layout.copy(getattr(env, name)) for name in _OF_VECTOR}
    observations = layout.copy(env._observations)
    return generators, ([_single(one) for one in env.envs], kept, observations)


def put(env: Any, state: Any) -> None:
    """Let a vector environment that was just built go on from there."""
    (python, numpy, torch), found = state
    if type(env) is ShardVector:
        singles, kept, observations = found
        for one, layers in zip(env.envs, singles, strict=True):
            _restore(one, layers)
        for name, value in kept.items():
            setattr(env, name, value)
        tree = layout.Tree(env.single_observation_space)
        shared, values = tree.flatten(env._observations), tree.flatten(observations)
        leaves = []
        for mine, value in zip(shared, values, strict=True):
            if isinstance(mine, np.ndarray):
                mine[...] = value  # it may lie in memory that others read
                value = mine
            leaves.append(value)
        env._observations = tree.unflatten(leaves)
    else:
        env.set_state(found)
    random.setstate(python)
    np.random.set_state(numpy)  # noqa: NPY002
    if torch is not None:
        # who loads it in a step has not done so in a new process
        importlib.import_module("torch").set_rng_state(torch)


def _single(env: Any) -> list[Any]:
    """What each layer of an environment remembers, from the outermost to the one that hands its
    state over, and the generator of the innermost."""
    found: list[Any] = []
    for layer in _layers(env):
        if _offers(layer):
            found.append(layer.get_state())
            break
        # functions are of how it was built
        found.append({k: v for k, v in vars(layer).items() if k != "env" and not callable(v)})
    inner = vars(env.unwrapped)
    return [found, {name: inner[name] for name in _GENERATOR if name in inner}]


def _restore(env: Any, state: list[Any]) -> None:
    layers, generator = state
    for layer, kept in zip(_layers(env), layers, strict=False):
        if _offers(layer):
            layer.set_state(kept)
            break
        vars(layer).update(kept)
    vars(env.unwrapped).update(generator)


def _layers(env: Any) -> Iterator[Any]:
    """An environment and what it wraps, from the outermost."""
    while True:
        yield env
        inner = vars(env).get("env")
        if inner is None:
            return
        env = inner


def _offers(env: Any) -> bool:
    return all(callable(getattr(type(env), name, None)) for name in ("get_state", "set_state"))


def _lacking(env: Any) -> str:
    return f"{type(env).__qualname__} has no get_state and set_state"


def _torch_state() -> Any:
    """The state of torch's generator, where the environments have loaded torch."""
    torch = sys.modules.get("torch")
    return None if torch is None else torch.get_rng_state()
