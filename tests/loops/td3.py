"""TD3 as an agent with methods: clipped noise, two critics, an actor that is trained every other
time, targets that follow by in-place interpolation."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.loops.envs import Reach
from tests.loops.harness import ITERATIONS, Script


class Actor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l1 = nn.Linear(4, 12)
        self.l2 = nn.Linear(12, 2)

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.l2(torch.relu(self.l1(state))))


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q1 = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1))
        self.q2 = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1))

    def forward(self, state: torch.Tensor, action: torch.Tensor) -> tuple[torch.Tensor, ...]:
        both = torch.cat([state, action], 1)
        return self.q1(both), self.q2(both)

    def first(self, state: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        return self.q1(torch.cat([state, action], 1))


class Replay:
    def __init__(self, capacity: int, seed: int) -> None:
        self.state = np.zeros((capacity, 4), np.float32)
        self.action = np.zeros((capacity, 2), np.float32)
        self.next_state = np.zeros((capacity, 4), np.float32)
        self.reward = np.zeros((capacity, 1), np.float32)
        self.not_done = np.zeros((capacity, 1), np.float32)
        self.capacity, self.ptr, self.size = capacity, 0, 0
        self.rng = np.random.default_rng(seed)

    def add_batch(self, state, action, next_state, reward, done) -> None:  # type: ignore[no-untyped-def]
        for row in zip(state, action, next_state, reward, done, strict=True):
            self.state[self.ptr], self.action[self.ptr], self.next_state[self.ptr] = row[:3]
            self.reward[self.ptr] = row[3]
            self.not_done[self.ptr] = 1.0 - row[4]
            self.ptr = (self.ptr + 1) % self.capacity
            self.size = min(self.size + 1, self.capacity)

    def sample(self, count: int) -> tuple[torch.Tensor, ...]:
        rows = self.rng.integers(0, self.size, size=count)
        return (
            torch.from_numpy(self.state[rows]),
            torch.from_numpy(self.action[rows]),
            torch.from_numpy(self.next_state[rows]),
            torch.from_numpy(self.reward[rows]),
            torch.from_numpy(self.not_done[rows]),
        )


class TD3:
    def __init__(self) -> None:
        self.actor = Actor()
        self.actor_target = copy.deepcopy(self.actor)
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr=3e-3)
        self.critic = Critic()
        self.critic_target = copy.deepcopy(self.critic)
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), lr=3e-3)
        self.total_it = 0
        self.tau, self.policy_freq = 0.05, 2

    def select_action(self, state: np.ndarray) -> np.ndarray:
        return self.actor(torch.as_tensor(state)).detach().numpy()

    def train(self, replay: Replay, batch_size: int) -> float:
        self.total_it += 1
        state, action, next_state, reward, not_done = replay.sample(batch_size)
        with torch.no_grad():
            noise = (torch.randn_like(action) * 0.2).clamp(-0.5, 0.5)
            next_action = (self.actor_target(next_state) + noise).clamp(-1, 1)
            target_q1, target_q2 = self.critic_target(next_state, next_action)
            target_q = reward + not_done * 0.99 * torch.min(target_q1, target_q2)
        current_q1, current_q2 = self.critic(state, action)
        critic_loss = nn.functional.mse_loss(current_q1, target_q) + nn.functional.mse_loss(
            current_q2, target_q
        )
        self.critic_optimizer.zero_grad()
        critic_loss.backward()
        self.critic_optimizer.step()
        if self.total_it % self.policy_freq == 0:
            actor_loss = -self.critic.first(state, self.actor(state)).mean()
            self.actor_optimizer.zero_grad()
            actor_loss.backward()
            self.actor_optimizer.step()
            with torch.no_grad():
                for p, target in zip(
                    self.critic.parameters(), self.critic_target.parameters(), strict=True
                ):
                    target.lerp_(p, self.tau)
                for p, target in zip(
                    self.actor.parameters(), self.actor_target.parameters(), strict=True
                ):
                    target.lerp_(p, self.tau)
        return critic_loss.item()


def iteration(agent: TD3, envs: Any, replay: Replay, obs: np.ndarray, explore: Any) -> Any:
    losses = []
    for _ in range(4):
        noise = explore.normal(0, 0.1, size=(envs.num_envs, 2)).astype(np.float32)
        action = (agent.select_action(obs) + noise).clip(-1, 1)
        next_obs, reward, terminated, _, _ = envs.step(action)
        replay.add_batch(obs, action, next_obs, reward, terminated)
        obs = next_obs
        losses.append(agent.train(replay, 8))
    return obs, sum(losses) / len(losses)


def run(compile: Any, vectorize: Any) -> Any:
    agent, replay, explore = TD3(), Replay(30, 1), np.random.default_rng(2)
    envs = vectorize([Reach] * 8)
    obs, _ = envs.reset(seed=2)
    step, losses = compile(iteration), []
    for _ in range(ITERATIONS):
        obs, loss = step(agent, envs, replay, obs, explore)
        losses.append(loss)
    return agent, replay, explore, envs, obs, losses


SCRIPTS = [Script("TD3", run, sharded=True)]
