"""A policy that the program itself switches between training and evaluation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.loops.envs import Reach
from tests.loops.harness import SHARDED, Script, check


def make_policy() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 12), nn.Dropout(0.2), nn.Tanh(), nn.Linear(12, 2))


def drive(envs: Any, policy: nn.Module, obs: Any, steps: int) -> Any:
    total = torch.zeros(envs.num_envs)
    with torch.no_grad():
        for _ in range(steps):
            action = policy(torch.as_tensor(obs))
            obs, reward, *_ = envs.step(action.numpy())
            total += torch.as_tensor(reward, dtype=torch.float32)
    return obs, total


def in_front(envs: Any, policy: nn.Module, obs: Any, odd: int) -> Any:
    policy.eval()
    obs, total = drive(envs, policy, obs, 4)
    policy.train()
    return obs, total


def either(envs: Any, policy: nn.Module, obs: Any, odd: int) -> Any:
    policy.train(odd == 1)
    return drive(envs, policy, obs, 4)


def behind(envs: Any, policy: nn.Module, obs: Any, odd: int) -> Any:
    total = torch.zeros(envs.num_envs)
    for _ in range(3):
        obs, more = drive(envs, policy, obs, 2)
        total += more
        policy.eval()
    policy.train()
    return obs, total


def on_one_trip(envs: Any, policy: nn.Module, obs: Any, odd: int) -> Any:
    total = torch.zeros(envs.num_envs)
    policy.eval()
    with torch.no_grad():
        for t in range(4):
            if t == 2:
                policy.train()
            action = policy(torch.as_tensor(obs))
            obs, reward, *_ = envs.step(action.numpy())
            total += torch.as_tensor(reward, dtype=torch.float32)
    return obs, total


def of_a_part(envs: Any, policy: nn.Module, obs: Any, odd: int) -> Any:
    policy[1].eval()
    obs, total = drive(envs, policy, obs, 4)
    policy[1].train()
    return obs, total


@pytest.mark.parametrize(
    ("fn", "applied"),
    [
        (in_front, ("tile_batch",)),
        (either, ()),
        (behind, ()),
        (on_one_trip, ()),
        (of_a_part, ()),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_trains_and_evaluates_the_same(fn: Any, applied: tuple[str, ...]) -> None:
    def run(compile: Any, vectorize: Any) -> Any:
        envs = vectorize([Reach] * 8)
        policy = make_policy()
        step, obs = compile(fn), envs.reset(seed=3)[0]
        totals = []
        for k in range(4):
            obs, total = step(envs, policy, obs, float(k % 2))
            totals.append(total)
        return policy.training, totals

    check(Script(fn.__name__, run, sharded=True, applied=applied), SHARDED)
