"""Numbers of Python objects that a traced graph would hold: what changes them has its effect."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import rose_compiler
from rose_compiler.sim import ShardedEnv
from tests.api.loops import Drift

SCALE = 1.5
SETTINGS = {"gain": 1.5}


class Policy(nn.Module):
    """Reads settings where the compiler does not look at the source: inside ``forward``."""

    SHIFT = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 3)
        self.settings = {"bias": 0.5, "unread": 1.0}
        self.limits = [2.0, 1.0]
        self.inner = SimpleNamespace(rate=3.0)
        self.count = 0

    def forward(self, x: Any) -> Any:
        x = self.body(x) * SCALE + SETTINGS["gain"] * self.SHIFT
        return x * self.inner.rate + self.settings["bias"] + self.limits[0]


def rollout(envs: Any, policy: Any, settings: Any, obs: Any) -> Any:
    seen = []
    for _ in range(3):
        with torch.no_grad():
            z = obs * 2 + settings["clip"]
            action = policy(z)
        obs, _, _, _, _ = envs.step(action.numpy())
        obs = torch.as_tensor(obs, dtype=torch.float32)
        seen.append(action.sum())
    return obs, torch.stack(seen)


def annealing(envs: Any, policy: Any, settings: Any, obs: Any) -> Any:
    seen = []
    for _ in range(3):
        with torch.no_grad():
            z = obs * 2 + settings["clip"]
            action = policy(z)
        obs, _, _, _, _ = envs.step(action.numpy())
        obs = torch.as_tensor(obs, dtype=torch.float32)
        seen.append(action.sum())
    settings["clip"] *= 0.9
    return obs, torch.stack(seen)


def whole(envs: Any, policy: Any, settings: Any, obs: Any) -> Any:
    seen = []
    for _ in range(4):
        for _ in range(3):
            with torch.no_grad():
                z = obs * 2 + settings["clip"]
                action = policy(z)
            obs, _, _, _, _ = envs.step(action.numpy())
            obs = torch.as_tensor(obs, dtype=torch.float32)
            seen.append(action.sum())
        settings["clip"] *= 0.9
    return obs, torch.stack(seen)


def entry(p: Any, settings: Any) -> None:
    settings["clip"] = 0.7


def entry_inside(p: Any, settings: Any) -> None:
    p.settings["bias"] = 0.7


def another_dict(p: Any, settings: Any) -> None:
    p.settings = {"bias": 0.7}


def item(p: Any, settings: Any) -> None:
    p.limits[0] = 0.7


def below(p: Any, settings: Any) -> None:
    p.inner.rate = 0.7


def of_the_class(p: Any, settings: Any) -> None:
    Policy.SHIFT = 0.7


def a_global(p: Any, settings: Any) -> None:
    globals()["SCALE"] = 0.7


def in_a_global(p: Any, settings: Any) -> None:
    SETTINGS["gain"] = 0.7


def unread(p: Any, settings: Any) -> None:
    p.settings["unread"] = settings["other"] = 0.7
    p.count += 1


#: What changes, and what the remark says; None where nothing has to be captured anew.
CHANGES = {
    entry: "settings['clip'] changed from 0.5 to 0.7",
    entry_inside: "policy.settings['bias'] changed from 0.5 to 0.7",
    another_dict: "policy.settings['bias'] changed from 0.5 to 0.7",
    item: "policy.limits[0] changed from 2.0 to 0.7",
    below: "policy.inner.rate changed from 3.0 to 0.7",
    of_the_class: "policy.SHIFT changed from 2.0 to 0.7",
    a_global: "SCALE changed from 1.5 to 0.7",
    in_a_global: "SETTINGS['gain'] changed from 1.5 to 0.7",
    unread: None,
}


def as_it_was() -> None:
    Policy.SHIFT = 2.0
    SETTINGS["gain"] = 1.5
    globals()["SCALE"] = 1.5


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    yield
    as_it_was()


def both(fn: Any, fast: Any, calls: int, change: Callable[[Any, Any], None] | None = None) -> None:
    """Run ``fn`` and its compiled form, and compare every result."""
    results = []
    for each in (fn, fast):
        as_it_was()
        torch.manual_seed(0)
        envs = ShardedEnv.split([Drift] * 8, shards=2, hosts="inline")
        policy, settings = Policy().eval(), {"clip": 0.5}
        obs, found = torch.as_tensor(envs.reset(seed=0)[0], dtype=torch.float32), []
        for call in range(calls):
            if call == calls - 2 and change is not None:
                change(policy, settings)
            obs, told = each(envs, policy, settings, obs)
            found += [obs, told]
        results.append(found)
        envs.close()
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def recaptures(fast: Any) -> list[str]:
    return [r.why for r in fast._log if r.code == "re-captured"]


@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.__name__)
def test_a_number_that_the_user_changes_is_noticed_once(
    change: Callable[[Any, Any], None],
) -> None:
    fast = rose_compiler.compile(rollout, numerics="bitwise", tune=False)
    both(rollout, fast, 5, change)
    assert 'kind="graph"' in fast.history[-1][1], "something was traced"
    told = CHANGES[change]
    assert len(recaptures(fast)) == (told is not None)
    assert told is None or told in recaptures(fast)[0]
    fast.close()


@pytest.mark.parametrize("fn", [annealing, whole], ids=lambda f: f.__name__)
def test_what_the_program_changes_is_read_anew(fn: Any) -> None:
    fast = rose_compiler.compile(fn, numerics="bitwise", tune=False)
    both(fn, fast, 4 if fn is annealing else 1)
    assert recaptures(fast) == [], "it is known to change"
    text = fast.history[-1][1]
    assert 'kind="graph"' in text, "what does not read it is traced"
    assert "settings['clip']" not in text.partition('kind="graph"')[2]
    fast.close()


def test_a_number_that_keeps_changing_is_held_by_no_graph() -> None:
    def every_time(p: Any, settings: Any) -> None:
        settings["clip"] *= 0.9

    fast = rose_compiler.compile(rollout, numerics="bitwise", tune=False)
    results = []
    for each in (rollout, fast):
        torch.manual_seed(0)
        envs = ShardedEnv.split([Drift] * 8, shards=2, hosts="inline")
        policy, settings = Policy().eval(), {"clip": 0.5}
        obs = torch.as_tensor(envs.reset(seed=0)[0], dtype=torch.float32)
        for _ in range(8):
            obs, told = each(envs, policy, settings, obs)
            every_time(policy, settings)
        results.append(told)
        envs.close()
    assert torch.equal(*results)
    assert len(recaptures(fast)) == 2
    assert 'kind="graph"' in fast.history[-1][1]
    fast.close()
