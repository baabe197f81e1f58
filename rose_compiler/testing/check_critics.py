"""Off-policy updates, compiled and as written: gradients are compared behind every call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from rose_compiler.api import compile as compile_
from rose_compiler.passes import drop_gradients
from rose_compiler.runtime.probe import same_bits
from rose_compiler.testing import critics as criticizing
from rose_compiler.testing.result import Result, module_of, start_generators

CALLS = 3


def critics(data: Any, result: Result, folder: Path) -> None:
    """Losses through a critic whose own update may drop what they add to its gradients, called
    several times: networks of any size are large enough for that to be left out."""
    text = data.draw(criticizing.functions())
    module, make = module_of(text, criticizing, result, folder)
    eager = _left(module.main, make)
    result.features["raises"] += eager[-1] != ""
    fast = compile_(module.main, tune=False, numerics="bitwise")
    try:
        with mock.patch.object(drop_gradients, "LEAST", 1):
            found = _left(fast, make)
        if fast._last is not None and fast._last.unit.recorded:
            result.count(fast._schedule().history)
    finally:
        fast.close()
    assert eager[-1] == found[-1], f"eager raised {eager[-1]!r}, compiled {found[-1]!r}"
    for number, (mine, theirs) in enumerate(zip(found, eager, strict=True)):
        assert same_bits(mine, theirs), f"compiled differs from eager in {number}"


def _left(fn: Callable[..., Any], make: Callable[[], tuple[Any, ...]]) -> list[Any]:
    """What each call left: its result, parameters, gradients, what was looked at; last the error
    that ended them."""
    start_generators()
    arguments = make()
    agent, left, error = arguments[0], [], ""
    leaves = [*agent.actor.parameters(), *agent.critic.parameters(), agent.temp]
    try:
        for _ in range(CALLS):
            result = fn(*arguments)
            state = [p.detach() for p in leaves], [p.grad for p in leaves]
            left.append(_copied([result, *state, agent.seen, agent.kept]))
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    return [left, error]


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return [_copied(v) for v in value] if isinstance(value, list | tuple) else value
