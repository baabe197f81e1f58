"""Schedules arranged by a profile, for programs whose loops are named alike."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

import rose_compiler
from rose_compiler.api import searching


class Still(gym.Env):
    """Returns what it is told."""

    observation_space = gym.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(3, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.full(3, float(np.sum(action)), np.float32), 0.1, False, False, {}


def iteration(envs: Any, other: Any, policy: Any, optimizer: Any, obs: Any, number: int) -> Any:
    """An evaluation in an arm, whose loop variable is the rollout's."""
    for _t in range(4):
        with torch.no_grad():
            action = policy(obs)
        found, _reward, _terminated, _truncated, _infos = envs.step(action.numpy())
        obs = torch.as_tensor(found)
    loss = policy(obs).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if number % 2 == 0:
        seen, _ = other.reset(seed=1)
        for _t in range(4):
            with torch.no_grad():
                a = policy(torch.as_tensor(seen))
            seen, _reward, _terminated, _truncated, _infos = other.step(a.numpy())
    return obs


def trained(calls: int = 12) -> Any:
    envs, other = (gym.vector.SyncVectorEnv([Still] * 4) for _ in "ab")
    policy = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(policy.parameters())
    obs = torch.as_tensor(envs.reset(seed=0)[0])
    fast = rose_compiler.compile(iteration, tune_budget=5)
    with rose_compiler.knobs(cache=False):
        for number in range(calls):
            obs = fast(envs, other, policy, optimizer, obs, number)
        remarks = fast.explain()
        fast.close()
    return remarks


def test_loops_of_one_name_in_an_arm_and_outside() -> None:
    assert "candidate-failed" not in trained()


def test_a_fault_in_arranging_does_not_stop_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise KeyError("none")

    monkeypatch.setattr(searching, "propose", broken)
    assert "schedules are tried as they come: KeyError" in trained()
