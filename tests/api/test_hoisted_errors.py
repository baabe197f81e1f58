"""An operation that is the same on every trip raises where eager raises, after what eager did."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import rose_compiler


class Sim:
    """Counts its steps."""

    def __init__(self) -> None:
        self.steps = 0

    def step(self, action: Tensor) -> Tensor:
        self.steps += 1
        return action + self.steps


class Goals:
    """What the loop looks up; ``broken`` makes every look-up fail."""

    def __init__(self) -> None:
        self.table = torch.arange(3.0)
        self.broken = False
        self.checked = 0

    def encode(self, key: Any) -> Tensor:
        if self.broken:
            raise KeyError(key)
        return self.table * 2

    def check(self, x: Tensor) -> Tensor:
        if self.broken:
            raise ValueError("checked first")
        return x


rose_compiler.declare(Sim.step, reads=["self"], writes=["self"])
rose_compiler.declare(Goals.encode, reads=["self.table"], writes=[])
rose_compiler.declare(Goals.check, reads=[], writes=[])


def logged(goals: Goals, sim: Sim, log: list[Any], x: Tensor) -> Tensor:
    y = torch.zeros(3)
    for t in range(4):
        log.append(t)
        y = y + goals.encode("a")
    return y


def stepped(goals: Goals, sim: Sim, log: list[Any], x: Tensor) -> Tensor:
    y = torch.zeros(3)
    for _ in range(4):
        y = sim.step(y)
        y = y + goals.encode("a")
    return y


def printed(goals: Goals, sim: Sim, log: list[Any], x: Tensor) -> Tensor:
    y = torch.zeros(3)
    for t in range(4):
        print("trip", t)
        y = y + goals.encode("a")
    return y


def in_place(goals: Goals, sim: Sim, log: list[Any], x: Tensor) -> Tensor:
    y = torch.zeros(3)
    for _ in range(4):
        x.add_(1)
        y = y + goals.encode("a")
    return y


def counted(goals: Goals, sim: Sim, log: list[Any], x: Tensor) -> Tensor:
    y = torch.zeros(3)
    for _ in range(4):
        goals.checked += 1
        y = y + goals.encode("a")
    return y


def checked(goals: Goals, sim: Sim, log: list[Any], x: Tensor) -> Tensor:
    y = torch.zeros(3)
    for _ in range(4):
        y = goals.check(y)
        y = y + goals.encode("a")
    return y


def first(goals: Goals, sim: Sim, log: list[Any], x: Tensor) -> Tensor:
    y = torch.zeros(3)
    for t in range(4):
        y = y + goals.encode("a")
        log.append(t)
        y = sim.step(y)
    return y


LOOPS = [logged, stepped, printed, in_place, counted, checked, first]


@pytest.mark.parametrize("fn", LOOPS)
def test_it_raises_after_what_eager_did_before_it(
    fn: Callable[..., Tensor], capfd: pytest.CaptureFixture[str]
) -> None:
    found: list[list[Any]] = []
    for compiled in (False, True):
        run: Any = rose_compiler.compile(fn, tune=False) if compiled else fn
        goals, sim, log, x = Goals(), Sim(), [], torch.zeros(2)
        seen: list[Any] = []
        for call in range(4):
            goals.broken = call == 3
            try:
                seen.append(run(goals, sim, log, x).tolist())
            except (KeyError, ValueError) as error:
                seen.append(repr(error))
            seen.append((sim.steps, list(log), x.tolist(), goals.checked, capfd.readouterr().out))
        found.append(seen)
        if compiled:
            told = run.explain()
            run.close()
            assert ("`encode`" in told.split("Missed")[0]) == (fn is first), told
            assert ("hoist [may-not-run]" in told) == (fn is not first), told
    assert found[0] == found[1]
