"""Whatever a traced graph may hold of the user's objects has its effect when it changes."""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import rose_compiler
from rose_compiler.sim import ShardedEnv
from tests.api.loops import Drift


class Args:
    """Settings as attributes of a class."""

    scale = 1.5


config: Any = types.ModuleType("config")
config.SCALE = 1.5


class Schedule:
    """A number behind a call."""

    def __init__(self) -> None:
        self.f = 1.5

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.f


def closing() -> tuple[Callable[[Tensor], Tensor], Callable[[float], None]]:
    number = 1.5

    def act(x: Tensor) -> Tensor:
        return x * number

    def put(value: float) -> None:
        nonlocal number
        number = value

    return act, put


act, put = closing()


class Policy(nn.Module):
    """What its parts are called by, ``forward`` reads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(3, 3)
        self.cfg = {"a": 1.5, "b": 0.5}
        self.flags = {"x"}
        self.recent = collections.deque([1.0] * 100, maxlen=100)
        self.schedule, self.name = Schedule(), "a"
        self.single, self.inner = np.float64(1.5), SimpleNamespace(a_coef=1.5)
        self.act, self.part = torch.tanh, functools.partial(torch.mul, other=1.5)


def hasattr_(p: Any, x: Tensor) -> Tensor:
    return x * (3.0 if hasattr(p.inner, "extra") else 1.0)


def for_key(p: Any, x: Tensor) -> Tensor:
    for k in p.cfg:
        x = x * p.cfg[k]
    return x


def as_number(p: Any, x: Tensor) -> Tensor:
    return x * float(p.single)


def of_class(p: Any, x: Tensor) -> Any:
    return x * Args.scale


def of_module(p: Any, x: Tensor) -> Any:
    return x * config.SCALE


def of_numpy(p: Any, x: Tensor) -> Any:
    return x * p.single


def by_call(p: Any, x: Tensor) -> Any:
    return p.schedule(x)


def by_get(p: Any, x: Tensor) -> Any:
    return x * p.cfg.get(p.name)


def by_gets(p: Any, x: Tensor) -> Any:
    return x * sum(p.cfg.get(k, 0) for k in ("a", "b"))


def in_set(p: Any, x: Tensor) -> Any:
    return x * (2.0 if "y" in p.flags else 1.0)


def of_deque(p: Any, x: Tensor) -> Any:
    return x * (sum(p.recent) / len(p.recent))


def closed_over(p: Any, x: Tensor) -> Any:
    return act(x)


def by_name(p: Any, x: Tensor) -> Any:
    return x * getattr(p.inner, f"{p.name}_coef")


def function(p: Any, x: Tensor) -> Any:
    return p.act(x)


def partial(p: Any, x: Tensor) -> Any:
    return p.part(x)


#: What reads, and what changes it.
READS: dict[Callable[[Any, Tensor], Any], Callable[[Any], Any]] = {
    of_class: lambda p: setattr(Args, "scale", 0.7),
    of_module: lambda p: setattr(config, "SCALE", 0.7),
    of_numpy: lambda p: setattr(p, "single", np.float64(0.7)),
    by_call: lambda p: setattr(p.schedule, "f", 0.7),
    by_get: lambda p: p.cfg.update(a=0.7),
    by_gets: lambda p: p.cfg.update(a=0.7),
    in_set: lambda p: p.flags.add("y"),
    of_deque: lambda p: p.recent.append(50.0),
    closed_over: lambda p: put(0.7),
    by_name: lambda p: setattr(p.inner, "a_coef", 0.7),
    function: lambda p: setattr(p, "act", torch.sigmoid),
    partial: lambda p: setattr(p, "part", functools.partial(torch.mul, other=0.7)),
    hasattr_: lambda p: setattr(p.inner, "extra", 1.0),
    for_key: lambda p: p.cfg.update(d=0.7),
    as_number: lambda p: setattr(p, "single", np.float64(0.7)),
}


def rollout(envs: Any, policy: Any, obs: Tensor) -> tuple[Tensor, Tensor]:
    seen = []
    for _ in range(2):
        with torch.no_grad():
            z = obs * 2
            action = policy(z)
        obs, _, _, _, _ = envs.step(action.numpy())
        obs = torch.as_tensor(obs, dtype=torch.float32)
        seen.append(action)
    return obs, torch.stack(seen)


def runs(
    kind: type[Policy], change: Callable[[Any], Any], calls: int = 3
) -> tuple[list[list[Tensor]], Any]:
    """The results of some calls, eager and compiled; something changes before the last ones."""
    fast, results = rose_compiler.compile(rollout, tune=False), []
    for step in (rollout, fast):
        Args.scale = config.SCALE = 1.5
        put(1.5)
        space["SCALE"] = 1.5
        policy, envs = kind().eval(), ShardedEnv.split([Drift] * 4, shards=2, hosts="inline")
        obs, found = torch.as_tensor(envs.reset(seed=1)[0], dtype=torch.float32), []
        for call in range(calls):
            if call >= 2:
                change(policy)
            obs, told = step(envs, policy, obs)
            found.append(told)
        results.append(found)
        envs.close()
    return results, fast


@pytest.mark.parametrize("read", READS, ids=lambda f: f.__name__)
def test_what_is_read_may_change(read: Callable[[Any, Tensor], Any]) -> None:
    change = READS[read]

    class Reading(Policy):
        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = read(self, self.body(x))
            return result

    (eager, fast), made = runs(Reading, change)
    assert all(map(torch.equal, eager, fast))
    assert not torch.equal(eager[-1], eager[-2])
    assert 'kind="graph"' in made.history[-1][1], "something was traced"
    made.close()


space: dict[str, Any] = {"SCALE": 1.5}
SCALE = 2.0


def as_here(x: Tensor) -> Tensor:
    return x * SCALE


scaled = types.FunctionType(as_here.__code__, space)


class Twice(Policy):
    """Reads two globals of one name."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = scaled(self.body(x) * SCALE)
        return result


def test_two_numbers_of_one_name_are_two() -> None:
    (eager, fast), made = runs(Twice, lambda p: space.update(SCALE=0.7))
    assert all(map(torch.equal, eager, fast))
    assert any("SCALE changed from 1.5 to 0.7" in r.why for r in made._log)
    made.close()


def test_after_many_looks_graphs_without_numbers_go_on() -> None:
    class Reading(Policy):
        def forward(self, x: Tensor) -> Tensor:
            return for_key(self, self.body(x))

    def change(policy: Any) -> None:
        policy.cfg[f"k{len(policy.cfg)}"] = 0.9

    (eager, fast), made = runs(Reading, change, calls=14)
    assert all(map(torch.equal, eager, fast))
    assert sum(r.code == "re-captured" for r in made._log) < 9
    made.close()
