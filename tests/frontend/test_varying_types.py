"""Remarks tell which statements are in no graph because what they are handed changes its type."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import SyncVectorEnv
from torch import Tensor, nn

import rose_compiler
from rose_compiler.frontend import makes
from tests.api.loops import Drift


def plain(net: Any, sim: Any, obs: Tensor) -> Tensor:
    for _ in range(3):
        with torch.no_grad():
            x = obs.float()
            action = torch.tanh(net(x))
        obs = torch.as_tensor(sim.step(action.numpy())[0])
    return obs


def in_a_dict(net: Any, sim: Any, obs: Tensor) -> Tensor:
    parts = {"place": obs, "far": obs.abs()}
    for _ in range(3):
        with torch.no_grad():
            x = parts["place"].float()
            action = torch.tanh(net(x))
        place = torch.as_tensor(sim.step(action.numpy())[0])
        parts = {"place": place, "far": place.abs()}
    return parts["place"]


def told(fn: Callable[..., Any], dtype: torch.dtype) -> str:
    results = []
    for wrap in (lambda f: f, lambda f: rose_compiler.compile(f, tune=False)):
        torch.manual_seed(0)
        net, sim = nn.Linear(3, 3), SyncVectorEnv([Drift, Drift])
        run: Any = wrap(fn)
        obs = torch.as_tensor(sim.reset(seed=1)[0]).to(dtype)
        results.append([run(net, sim, obs) for _ in range(3)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    text: str = run.explain(width=400)
    run.close()
    return text


@pytest.mark.parametrize("fn", [plain, in_a_dict])
def test_both_types_and_the_line_are_named(fn: Callable[..., Any]) -> None:
    source, start = inspect.getsourcelines(fn)
    line = start + next(k for k, text in enumerate(source) if ".float()" in text)
    text = told(fn, torch.float64)
    types = ("float64 (rows, 3)", "float32 (rows, 3)")
    if fn is in_a_dict:
        types = tuple(f"{{place: {t}, far: {t}}}" for t in types)
    assert f"is {types[0]} on one trip and {types[1]} on another" in text, text
    (remark,) = [t for t in text.splitlines() if types[0] in t]
    assert f"test_varying_types.py:{line})" in remark
    assert "trace [not-traceable]" in text


def test_one_type_is_traced_without_a_word() -> None:
    text = told(plain, torch.float32)
    assert "on another" not in text
    assert "[trace]" in text


def test_makes_in_words() -> None:
    assert makes.told(makes.of(torch.zeros(4, 2))) == "float32 (rows, 2)"
    assert makes.told(makes.of(np.zeros(()))) == "float64 ()"
    assert makes.told(makes.of((np.zeros(3, int), 1))) == "(int64 (rows), something else)"
    assert makes.two([(None, makes.of(torch.zeros(2)))] * 2) is None
