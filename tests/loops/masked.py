"""Discrete actions under a mask from dict observations; two teams of agents, each with a policy and
environments of its own, in dicts that the loop walks through."""

from __future__ import annotations

from collections import deque
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from torch import nn
from torch.distributions import Categorical

from tests.loops.envs import Corridor, Reach
from tests.loops.harness import ITERATIONS, Script


class MaskedCorridor(gym.Wrapper[Any, Any, Any, Any]):
    """Says which of three moves are allowed; the third one stays."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self.action_space = spaces.Discrete(3)
        self.observation_space = spaces.Dict(
            {
                "state": spaces.Box(-1.0, 2.0, (2,), np.float32),
                "mask": spaces.Box(0, 1, (3,), np.int8),
            }
        )

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        obs, info = self.env.reset(**kwargs)
        return self._with_mask(obs), info

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = self.env.step(int(action) % 2)
        if int(action) == 2:
            reward = reward - 0.05
        return self._with_mask(obs), reward, terminated, truncated, info

    def _with_mask(self, obs: np.ndarray) -> dict[str, np.ndarray]:
        return {"state": obs, "mask": np.array([obs[0] > 0.0, 1, obs[1] > 0.3], np.int8)}


class MaskedPolicy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 16), nn.ReLU())
        self.logits = nn.Linear(16, 3)
        self.value = nn.Linear(16, 1)

    def forward(self, state: torch.Tensor, mask: torch.Tensor) -> tuple[Categorical, torch.Tensor]:
        features = self.body(state)
        logits = self.logits(features).masked_fill(mask == 0, -1e9)
        return Categorical(logits=logits), self.value(features).squeeze(-1)


class Memory:
    """Preallocated tensors by name."""

    def __init__(self, steps: int, envs: int) -> None:
        self.data = {
            "state": torch.zeros(steps, envs, 2),
            "mask": torch.zeros(steps, envs, 3),
            "action": torch.zeros(steps, envs, dtype=torch.long),
            "log_prob": torch.zeros(steps, envs),
            "value": torch.zeros(steps, envs),
            "reward": torch.zeros(steps, envs),
            "done": torch.zeros(steps, envs),
        }

    def store(self, t: int, **values: torch.Tensor) -> None:
        for name, value in values.items():
            self.data[name][t] = value


def to_torch(obs: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.as_tensor(value, dtype=torch.float32) for name, value in obs.items()}


def masked_iteration(policy, optimizer, envs, memory, obs, finished, steps):  # type: ignore[no-untyped-def]
    data = memory.data
    for t in range(steps):
        state, mask = torch.as_tensor(obs["state"]), torch.as_tensor(obs["mask"])
        with torch.no_grad():
            dist, value = policy(state, mask)
            action = dist.sample()
            log_prob = dist.log_prob(action)
        obs, reward, terminated, truncated, _ = envs.step(action.numpy())
        done = np.logical_or(terminated, truncated)
        data["state"][t] = state
        data["mask"][t] = mask
        data["action"][t] = action
        data["log_prob"][t] = log_prob
        data["value"][t] = value
        data["reward"][t] = torch.as_tensor(reward, dtype=torch.float32)
        data["done"][t] = torch.as_tensor(done, dtype=torch.float32)
        finished.extend(np.flatnonzero(done).tolist())
    with torch.no_grad():
        last = to_torch(obs)
        _, running = policy(last["state"], last["mask"])
    returns = torch.zeros_like(data["reward"])
    for t in reversed(range(steps)):
        running = data["reward"][t] + 0.97 * running * (1 - data["done"][t])
        returns[t] = running
    flat = {name: value.flatten(0, 1) for name, value in data.items()}
    targets = returns.flatten()
    for rows in torch.randperm(len(targets)).split(16):
        dist, value = policy(flat["state"][rows], flat["mask"][rows])
        gain = (targets[rows] - flat["value"][rows]).clamp(-2, 2)
        ratio = (dist.log_prob(flat["action"][rows]) - flat["log_prob"][rows]).exp()
        loss = -(ratio.clamp(0.8, 1.2) * gain).mean() + (value - targets[rows]).square().mean()
        loss = loss - 0.01 * dist.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return obs, loss.item()


def run_masked(compile: Any, vectorize: Any) -> Any:
    envs = vectorize([lambda: MaskedCorridor(Corridor())] * 8)
    policy, memory, finished = MaskedPolicy(), Memory(6, 8), deque(maxlen=50)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    obs, _ = envs.reset(seed=8)
    step, losses = compile(masked_iteration), []
    for _ in range(ITERATIONS):
        obs, loss = step(policy, optimizer, envs, memory, obs, finished, 6)
        losses.append(loss)
    assert finished
    return policy, optimizer, memory, obs, finished, losses


class Team:
    """One agent of several: its policy, optimizer and environments."""

    def __init__(self, envs: Any, width: int, actions: int, seed: int) -> None:
        self.envs = envs
        self.policy = nn.Sequential(nn.Linear(width, 12), nn.Tanh(), nn.Linear(12, actions))
        self.optimizer = torch.optim.SGD(self.policy.parameters(), lr=1e-2, momentum=0.9)
        self.generator = torch.Generator().manual_seed(seed)
        self.obs = torch.as_tensor(envs.reset(seed=seed)[0])
        self.score = 0.0

    def act(self) -> torch.Tensor:
        mean = self.policy(self.obs)
        return mean + 0.3 * torch.randn(mean.shape, generator=self.generator)


def teams_iteration(teams, steps):  # type: ignore[no-untyped-def]
    scores = {}
    for name, team in teams.items():
        observations, actions, rewards = [], [], []
        for _ in range(steps):
            with torch.no_grad():
                action = team.act()
            next_obs, reward, *_ = team.envs.step(action.numpy())
            observations.append(team.obs)
            actions.append(action)
            rewards.append(torch.as_tensor(reward, dtype=torch.float32))
            team.obs = torch.as_tensor(next_obs)
        obs, action = torch.cat(observations), torch.cat(actions)
        weight = torch.stack(rewards)
        weight = (weight - weight.mean(0)).flatten()
        loss = ((team.policy(obs) - action).square().sum(-1) * weight).mean()
        team.optimizer.zero_grad()
        loss.backward()
        team.optimizer.step()
        team.score += weight.abs().mean().item()
        scores[name] = loss.item()
    return scores


def run_teams(compile: Any, vectorize: Any) -> Any:
    teams = {name: Team(vectorize([Reach] * 4), 4, 2, seed) for seed, name in enumerate("ab")}
    step = compile(teams_iteration)
    scores = [step(teams, 5) for _ in range(ITERATIONS)]
    return teams, scores


SCRIPTS = [
    Script("discrete actions under a mask", run_masked, sharded=True, applied=("split", "late")),
    Script("two teams in a dict", run_teams, sharded=True),
]
