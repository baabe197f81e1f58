"""Policies that integrate a flow: their sampling and their loss are graphs for Inductor."""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import rose_compiler
from rose_compiler.base.decision import Decision
from rose_compiler.sim import ShardedEnv
from rose_compiler.testing.losses import as_traced

STEPS, SIGMA = 3, 0.3


@pytest.fixture(autouse=True)
def _uncompiled() -> Iterator[None]:
    with as_traced():
        yield


class Flow(nn.Module):
    """Noise to an action in some steps, each with noise of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))
        self.embed = nn.Embedding(8, 2)
        self.cfg = types.SimpleNamespace(sigma=SIGMA)

    def mean_of(self, x: Tensor, context: Tensor, k: int) -> Tensor:
        at = torch.full((len(x), 1), k / STEPS)
        mean: Tensor = x + self.net(torch.cat([x, context, at], 1)) / STEPS
        return mean

    def sample(self, tokens: Tensor, obs: Tensor) -> tuple[Tensor, Tensor]:
        context = torch.tanh(self.embed(tokens) + obs)
        x = torch.randn(len(context), 2)
        path = [x]
        for k in range(STEPS):
            x = self.mean_of(x, context, k) + self.cfg.sigma * torch.randn_like(x)
            path.append(x)
        return x, torch.stack(path, 1)

    def log_prob(self, tokens: Tensor, path: Tensor) -> Tensor:
        context = torch.tanh(self.embed(tokens))
        total = torch.zeros(len(path))
        for k in range(STEPS):
            norm = 0.5 * self.cfg.sigma  # a number that is the same on every trip
            mean = self.mean_of(path[:, k], context, k)
            total = total - norm * (path[:, k + 1] - mean).pow(2).sum(1)
        return total


class Buffers:
    """What a rollout leaves."""

    def __init__(self) -> None:
        self.tokens = torch.zeros(4, dtype=torch.int64)
        self.paths = torch.zeros(2, 4, STEPS + 1, 2)


def word_of(seed: int) -> int:
    return (3 * seed + 1) % 8


def replaced(buf: Buffers, seed: int) -> int:
    buf.tokens = torch.full((4,), seed % 8)
    return seed % 8


class Still(gym.Env[Any, Any]):
    """An environment of two numbers that follow the action."""

    observation_space = action_space = gym.spaces.Box(-9.0, 9.0, (2,))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.asarray(action, np.float32), float(action[0]), False, False, {}


def collect(policy: Flow, buf: Buffers, envs: Any) -> Any:
    obs, _ = envs.reset()
    for c in range(2):
        with torch.no_grad():
            action, path = policy.sample(buf.tokens, torch.as_tensor(obs))
        buf.paths[c] = path
        obs, *_ = envs.step(action.numpy())
    return obs


def update(policy: Flow, optimizer: Any, buf: Buffers, log: list[float]) -> None:
    for c in range(2):
        loss = -(policy.log_prob(buf.tokens, buf.paths[c]) * buf.paths[c].sum((1, 2))).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log.append(loss.item())


def told(policy: Flow, optimizer: Any, buf: Buffers, envs: Any, seeds: Any, log: Any) -> Any:
    buf.tokens[:] = torch.tensor([word_of(s) for s in seeds])
    obs = collect(policy, buf, envs)
    update(policy, optimizer, buf, log)
    return obs


def exchanged(policy: Flow, optimizer: Any, buf: Buffers, envs: Any, seeds: Any, log: Any) -> Any:
    obs = collect(policy, buf, envs)
    for k in range(2):
        loss = -policy.log_prob(buf.tokens, buf.paths[k]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log.append(loss.item())
        buf.tokens[:] = torch.tensor([replaced(buf, s) for s in seeds])
    return obs


def trained(fn: Any) -> tuple[list[Tensor], Any]:
    policy, buf, log = Flow(), Buffers(), list[float]()
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.05)
    envs = ShardedEnv.split([Still] * 4, shards=2, hosts="inline")
    torch.manual_seed(3)
    for call in range(3):
        obs = fn(policy, optimizer, buf, envs, [call, 5, 2, 7 * call], log)
    envs.close()
    left = [*policy.parameters(), buf.paths, buf.tokens, torch.as_tensor(obs), torch.tensor(log)]
    return [x.detach() for x in left], torch.get_rng_state()


@pytest.mark.parametrize(("fn", "whole"), [(told, True), (exchanged, False)])
def test_a_flow_trains_the_same(fn: Any, whole: bool, tmp_path: Path) -> None:
    path = tmp_path / "decision.json"
    Decision(compile=True).save(path)
    compiled = rose_compiler.compile(fn, tune=str(path))
    (expected, state), (found, left) = trained(fn), trained(compiled)
    torch.testing.assert_close(found, expected)
    assert torch.equal(left, state), "as many numbers were drawn"
    applied, missed = compiled.explain(width=200).split("Missed", 1)
    assert "torch calls is for Inductor" in applied, "the act, its noise handed in"
    assert ("up to its backward are one graph" in applied) is whole
    assert ("reads-loop-state" in missed) is not whole
    compiled.close()
