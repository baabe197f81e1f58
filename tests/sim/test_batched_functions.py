"""Which functions of wrappers take a batch as they take its rows one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sim_equal import assert_same
from wrapped_envs import CALLS, LIMIT

from rose_compiler.sim import elementwise


def scaled(x: Any, by: float = 0.5) -> Any:
    return by * x / 4 - 1.0


def branches(x: Any) -> Any:
    return x if x > 0 else 0


def divides(x: Any) -> Any:
    return 1 / x


def counts(x: Any) -> Any:
    CALLS.append(x)
    return x


@pytest.mark.parametrize(
    "function",
    [
        lambda x: np.clip(x, -1, 1),
        lambda x: np.sign(np.float64(x)) * 2 + 1,
        scaled,
    ],
)
def test_functions_that_may_take_a_batch(function: Any) -> None:
    batch = elementwise.batched([function, function])
    assert batch is not None
    rows = np.random.default_rng(0).normal(size=7)
    assert_same(np.asarray(batch(rows)), np.array([function(row) for row in rows]))


def test_a_conversion_to_float_takes_a_batch() -> None:
    batch = elementwise.batched([lambda x: np.clip(float(x), -1, 1)])
    assert batch is not None
    assert_same(batch(np.array([-2.0, 0.5])), np.array([-1.0, 0.5]))


@pytest.mark.parametrize(
    "function",
    [
        branches,
        divides,
        counts,
        np.clip,
        lambda x: np.clip(x, -1, 1, out=x),
        lambda x: np.tanh(x),
        lambda x: x**2,
        lambda x: np.random.default_rng(0).normal() + x,
        lambda x: x - x.mean(),
        lambda x: np.clip(x, -LIMIT, LIMIT),  # a global that may be bound anew
        lambda *x: x[0],
        lambda x: [x],
    ],
)
def test_functions_that_may_not(function: Any) -> None:
    assert elementwise.batched([function]) is None


def test_functions_that_close_over_different_values_are_not_one() -> None:
    made = [(lambda b: lambda x: np.clip(x, -b, b))(bound) for bound in (1.0, 1.0, 2.0)]
    assert elementwise.batched(made[:2]) is not None
    assert elementwise.batched(made) is None
