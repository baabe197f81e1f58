"""What a caller gives for each environment of a simulator beside actions, checked and divided."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from rose_compiler.sim.shards import BaseShard


def seeds(seed: Any, shards: Sequence[BaseShard], count: int) -> list[Any]:
    """What each shard of ``count`` environments in all is reset with: ``seed`` plus its offset, or
    its own of a sequence of seeds.

    Raises ``ValueError`` for a sequence that has not one for each environment. Called by what the
    user calls: a warning names the line there.
    """
    if seed is None:
        return [None] * len(shards)
    if not all(shard.traits.seeds_on_reset for shard in shards):
        warnings.warn(
            "EnvPool's seeds are fixed when it is built: reset(seed=...) has no effect on it; "
            "pass seed= to ShardedEnv.envpool",
            stacklevel=3,
        )
    if isinstance(seed, int | np.integer):
        return [int(seed) + shard.offset for shard in shards]
    if len(seed) != count:
        raise ValueError(
            "If seeds are passed as a list the length must match "
            f"num_envs={count} but got length={len(seed)}."
        )
    return _divided(seed, shards)


def reset_mask(mask: Any, count: int) -> np.ndarray:
    """``options["reset_mask"]``, refused as by gymnasium."""
    if not isinstance(mask, np.ndarray):
        raise TypeError(f"`options['reset_mask']` must be a numpy array, got {type(mask)}")
    if mask.shape != (count,):
        raise ValueError(f"`options['reset_mask']` must have shape `({count},)`, got {mask.shape}")
    if mask.dtype != np.bool_:
        raise TypeError(f"`options['reset_mask']` must have `dtype=np.bool_`, got {mask.dtype}")
    if not mask.any():
        raise ValueError("`options['reset_mask']` must have at least one True value")
    return mask


def values(given: Any, shards: Sequence[BaseShard], count: int) -> list[list[Any]]:
    """The values of an attribute by shard: the same for all ``count`` environments, or one of a
    list or tuple for each. Raises ``ValueError`` for a list of another length."""
    if not isinstance(given, list | tuple):
        given = [given] * count
    if len(given) != count:
        raise ValueError(
            "Values must be a list or tuple with length equal to the number of environments. "
            f"Got `{len(given)}` values for {count} environments."
        )
    return _divided(given, shards)


def _divided(each: Any, shards: Sequence[BaseShard]) -> list[list[Any]]:
    return [list(each[s.offset : s.offset + s.num_envs]) for s in shards]
