"""Context managers written as generators: their statements become the program's own."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import rose_compiler
from rose_compiler.base.regions import Region, unwind
from rose_compiler.testing.capturing import assert_same
from tests.loops.envs import Reach
from tests.loops.harness import SHARDED, Script, check


@contextmanager
def noted(log: list[Any], name: str, ends: bool = True) -> Any:
    log.append(("begin", name))
    yield len(log)
    if ends:
        log.append(("end", name))


@contextmanager
def surely(log: list[Any], name: str) -> Any:
    before = len(log)
    try:
        yield
        log.append(("done", name))
    finally:
        log.append(("last", name, before))
    log.append(("after", name))


@contextmanager
def evaluating(module: nn.Module) -> Any:
    was = module.training
    module.eval()
    try:
        yield module
    finally:
        module.train(was)


@contextmanager
def twice(log: list[Any]) -> Any:
    if log:
        yield 1
    else:
        yield 2


@contextmanager
def swallowing(log: list[Any]) -> Any:
    try:
        yield
    except ZeroDivisionError:
        log.append("swallowed")


class Timer:
    def __init__(self) -> None:
        self.depth = 0
        self.log: list[Any] = []

    @contextmanager
    def section(self, name: str) -> Any:
        self.depth += 1
        try:
            yield self.depth
        finally:
            self.depth -= 1
            self.log.append((name, self.depth))


def in_order(log, x):
    with noted(log, "a") as n:
        x = x + n
        log.append(x)
    return x


def nested(log, x):
    with surely(log, "a"), noted(log, "b", ends=False), torch.no_grad(), surely(log, "c"):
        for k in range(3):
            with noted(log, k):
                x = x + k
    log.append("behind")
    return x


def methods(timer, x):
    with timer.section("outer") as depth:
        x = x * depth
        with timer.section("inner") as depth:
            x = x + depth
    return x


def raises(log, x):
    for k in range(3):
        with surely(log, "a"), noted(log, "b"), surely(log, k):
            x = x // (1 - k)
    return x


def leaves_early(log, x):
    for k in range(5):
        with surely(log, k):
            x = x + k
            if k == 1:
                continue
            if k == 3:
                break
            log.append("body")
    return x


def opaque(log, x):
    with twice(log) as n:
        x = x + n
    with swallowing(log):
        x = x // 0
    return x


CASES = {
    "in order": (in_order, lambda: ([], 1)),
    "nested": (nested, lambda: ([], 1)),
    "methods": (methods, lambda: (Timer(), 2)),
    "raises": (raises, lambda: ([], 4)),
    "leaves early": (leaves_early, lambda: ([], 4)),
    "opaque": (opaque, lambda: ([], 4)),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_eager(name: str) -> None:
    fn, make = CASES[name]
    assert_compiled_same(fn, make)
    if name != "raises":  # the reference executor does no `finally`: what runs it does
        assert_same(fn, make)


def assert_compiled_same(fn: Any, make: Any) -> None:
    compiled = rose_compiler.compile(fn, tune=False)
    for _ in range(3):
        outcomes = []
        for each in (fn, compiled):
            args = make()
            try:
                result: Any = each(*args)
            except ZeroDivisionError as error:
                result = type(error)
            outcomes.append((result, [getattr(a, "__dict__", a) for a in args]))
        assert outcomes[0] == outcomes[1]
    compiled.close()


def evaluate(envs: Any, policy: nn.Module, scale: torch.Tensor, steps: int) -> torch.Tensor:
    obs, _ = envs.reset(seed=3)
    total = torch.zeros(envs.num_envs)
    with evaluating(policy), torch.no_grad():
        for _ in range(steps):
            action = policy(torch.as_tensor(obs))
            obs, reward, *_ = envs.step(action.numpy())
            total += torch.as_tensor(reward, dtype=torch.float32)
            if total.sum() < -scale:
                raise ArithmeticError("too far away")
    return total


def run(compile: Any, vectorize: Any) -> Any:
    envs = vectorize([Reach] * 8)
    policy = nn.Sequential(nn.Linear(4, 12), nn.Dropout(0.1), nn.Tanh(), nn.Linear(12, 2))
    step, scale = compile(evaluate), torch.tensor(1e6)
    results = [step(envs, policy, scale, 5) for _ in range(3)]
    scale.fill_(1.0)
    with pytest.raises(ArithmeticError):
        step(envs, policy, scale, 5)
    assert policy.training
    return results


def test_an_evaluation_is_tiled_and_leaves_the_mode_as_it_was() -> None:
    check(Script("evaluation", run, sharded=True, applied=("tile_batch", "late")), SHARDED)


def test_the_last_entered_is_left_first_and_an_error_on_the_way_stops_nothing() -> None:
    done: list[Any] = []

    def fails(value: int) -> None:
        done.append(value)
        raise KeyError(value)

    first, second = Region(done.append), Region(fails)
    first.open(1)
    second.open(2)
    first.open(3)
    second.open(4)
    second.close()
    with pytest.raises(KeyError):
        unwind([first, second])
    assert done == [3, 2, 1]
    unwind([first, second])
    assert done == [3, 2, 1]
