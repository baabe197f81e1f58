"""Soft actor-critic where updates and the simulator's steps need nothing of each other: minibatches
are drawn before the newest transition is added, or the actor is trained every other step only and
explores with a generator of its own."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from tests.loops.envs import Reach
from tests.loops.harness import ITERATIONS, Script


class SquashedGaussian(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, 12), nn.ReLU())
        self.mean = nn.Linear(12, 2)
        self.log_std = nn.Linear(12, 2)

    def forward(self, obs: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.trunk(obs)
        std = self.log_std(x).clamp(-5, 2).exp()
        raw = self.mean(x) + std * noise
        action = torch.tanh(raw)
        log_prob = -0.5 * noise.pow(2) - std.log() - torch.log(1 - action.pow(2) + 1e-6)
        return action, log_prob.sum(1)


class TwinQ(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q1 = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1))
        self.q2 = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1))

    def forward(self, obs: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        both = torch.cat([obs, action], 1)
        return torch.cat([self.q1(both), self.q2(both)], 1)


class Ring:
    """Transitions of all environments in preallocated tensors, the oldest overwritten."""

    def __init__(self, capacity: int, seed: int) -> None:
        self.obs, self.next_obs = torch.zeros(capacity, 4), torch.zeros(capacity, 4)
        self.actions = torch.zeros(capacity, 2)
        self.rewards, self.alive = torch.zeros(capacity), torch.zeros(capacity)
        self.capacity, self.at, self.filled = capacity, 0, 0
        self.rng = np.random.default_rng(seed)

    def add(self, obs, action, reward, next_obs, terminated):  # type: ignore[no-untyped-def]
        rows = np.arange(self.at, self.at + len(obs)) % self.capacity
        self.obs[rows], self.actions[rows] = obs, action
        self.next_obs[rows] = torch.from_numpy(next_obs)
        self.rewards[rows] = torch.from_numpy(reward).float()
        self.alive[rows] = torch.from_numpy(~terminated).float()
        self.at = (self.at + len(obs)) % self.capacity
        self.filled = min(self.filled + len(obs), self.capacity)

    def sample(self, count: int) -> tuple[torch.Tensor, ...]:
        rows = self.rng.integers(0, self.filled, size=count)
        return (
            self.obs[rows],
            self.actions[rows],
            self.rewards[rows],
            self.next_obs[rows],
            self.alive[rows],
        )


class Learner:
    def __init__(self, delay: int = 1) -> None:
        self.actor, self.critic = SquashedGaussian(), TwinQ()
        self.target = copy.deepcopy(self.critic).requires_grad_(False)
        self.log_alpha = torch.zeros(1, requires_grad=True)
        self.actor_opt = torch.optim.Adam(self.actor.parameters(), lr=3e-3)
        self.critic_opt = torch.optim.Adam(self.critic.parameters(), lr=3e-3)
        self.alpha_opt = torch.optim.Adam([self.log_alpha], lr=3e-3)
        self.explore = np.random.default_rng(3)
        self.updates, self.delay = 0, delay

    def act(self, obs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            noise = self.explore.standard_normal((len(obs), 2)).astype(np.float32)
            return self.actor(obs, torch.from_numpy(noise))[0]

    def train_critic(self, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        obs, action, reward, next_obs, alive = batch
        with torch.no_grad():
            follow, log_prob = self.actor(next_obs, torch.randn(len(next_obs), 2))
            soft = self.target(next_obs, follow).min(1).values - self.log_alpha.exp() * log_prob
            goal = reward + 0.98 * alive * soft
        loss = F.mse_loss(self.critic(obs, action), goal.unsqueeze(1).expand(-1, 2))
        self.critic_opt.zero_grad()
        loss.backward()
        self.critic_opt.step()
        return loss

    def train_actor(self, obs: torch.Tensor) -> None:
        action, log_prob = self.actor(obs, torch.randn(len(obs), 2))
        value = self.critic(obs, action).min(1).values
        loss = (self.log_alpha.exp().detach() * log_prob - value).mean()
        self.actor_opt.zero_grad()
        loss.backward()
        self.actor_opt.step()
        alpha_loss = -(self.log_alpha * (log_prob.detach() - 2.0)).mean()
        self.alpha_opt.zero_grad()
        alpha_loss.backward()
        self.alpha_opt.step()

    def follow(self) -> None:
        with torch.no_grad():
            for p, slow in zip(self.critic.parameters(), self.target.parameters(), strict=True):
                slow.lerp_(p, 0.05)


def behind_the_step(learner, envs, ring, obs, steps, losses):  # type: ignore[no-untyped-def]
    """Trains on what was there before this step's transition."""
    for _ in range(steps):
        action = learner.act(obs)
        next_obs, reward, terminated, _, _ = envs.step(action.numpy())
        batch = ring.sample(8)
        loss = learner.train_critic(batch)
        learner.train_actor(batch[0])
        learner.follow()
        ring.add(obs, action, reward, next_obs, terminated)
        losses.append(loss.item())
        obs = torch.from_numpy(next_obs)
    return obs


def delayed_actor(learner, envs, ring, obs, steps, losses):  # type: ignore[no-untyped-def]
    """Trains on the newest transition too, the actor every other time."""
    for _ in range(steps):
        action = learner.act(obs)
        next_obs, reward, terminated, _, _ = envs.step(action.numpy())
        ring.add(obs, action, reward, next_obs, terminated)
        obs = torch.from_numpy(next_obs)
        batch = ring.sample(8)
        learner.updates += 1
        loss = learner.train_critic(batch)
        if learner.updates % learner.delay == 0:
            learner.train_actor(batch[0])
        learner.follow()
        losses.append(loss.item())
    return obs


def usual(learner, envs, ring, obs, steps, losses):  # type: ignore[no-untyped-def]
    """Trains all on the newest transition too: the next action waits for critic and actor."""
    for _ in range(steps):
        action = learner.act(obs)
        next_obs, reward, terminated, _, _ = envs.step(action.numpy())
        ring.add(obs, action, reward, next_obs, terminated)
        obs = torch.from_numpy(next_obs)
        batch = ring.sample(8)
        loss = learner.train_critic(batch)
        learner.train_actor(batch[0])
        learner.follow()
        losses.append(loss.item())
    return obs


def _run(function: Any, delay: int, compile: Any, vectorize: Any, env: Any) -> Any:
    learner, ring = Learner(delay), Ring(60, seed=4)
    envs = vectorize([env] * 4)
    obs = torch.from_numpy(envs.reset(seed=2)[0])
    for _ in range(3):
        action = torch.rand(envs.num_envs, 2) * 2 - 1
        next_obs, reward, terminated, _, _ = envs.step(action.numpy())
        ring.add(obs, action, reward, next_obs, terminated)
        obs = torch.from_numpy(next_obs)
    step, losses = compile(function), []
    for _ in range(ITERATIONS):
        obs = step(learner, envs, ring, obs, 4, losses)
    assert all(np.isfinite(losses))
    return learner, ring, envs, obs, losses


def run_behind(compile: Any, vectorize: Any, env: Any = Reach) -> Any:
    return _run(behind_the_step, 1, compile, vectorize, env)


def run_delayed(compile: Any, vectorize: Any, env: Any = Reach) -> Any:
    return _run(delayed_actor, 2, compile, vectorize, env)


def run_usual(compile: Any, vectorize: Any, env: Any = Reach) -> Any:
    return _run(usual, 1, compile, vectorize, env)


SCRIPTS = [
    Script("SAC, minibatch before the add", run_behind, sharded=True, applied=("late",)),
    Script("SAC, actor every other step", run_delayed, sharded=True, applied=("unswitch", "late")),
]
