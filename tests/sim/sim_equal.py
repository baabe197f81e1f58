"""Exact comparison of what vector environments return."""

from __future__ import annotations

from typing import Any

import numpy as np


def assert_same(left: Any, right: Any, where: str = "result") -> None:
    """Equal in type, dtype, shape, order of keys and every value; NaN equals NaN."""
    if isinstance(left, dict):
        assert isinstance(right, dict), where
        assert list(left) == list(right), f"{where}: keys"
        for key in left:
            assert_same(left[key], right[key], f"{where}[{key!r}]")
    elif isinstance(left, tuple | list):
        assert type(left) is type(right), where
        assert len(left) == len(right), where
        for i, (one, other) in enumerate(zip(left, right, strict=True)):
            assert_same(one, other, f"{where}[{i}]")
    elif isinstance(left, np.ndarray):
        assert isinstance(right, np.ndarray), where
        assert (left.dtype, left.shape) == (right.dtype, right.shape), where
        if left.dtype == object:
            assert_same(left.tolist(), right.tolist(), where)
        else:
            np.testing.assert_array_equal(left, right, where)
    else:
        assert type(left) is type(right), where
        assert left == right or (left != left and right != right), where


def assert_same_run(ours: Any, theirs: Any, actions: Any, steps: int, seed: Any = 7) -> int:
    """Reset both and step them with the same actions; returns how many episodes ended."""
    assert_same(ours.reset(seed=seed), theirs.reset(seed=seed), "reset")
    ended = 0
    for t in range(steps):
        action = actions(t)
        left, right = ours.step(action), theirs.step(action)
        assert_same(left, right, f"step {t}")
        ended += int(np.sum(left[2] | left[3]))
    return ended
