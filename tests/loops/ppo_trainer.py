"""PPO as methods of a trainer that owns its policy, buffer, normalizer and schedule."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributions import Normal

from tests.loops.envs import Reach, with_statistics
from tests.loops.harness import ITERATIONS, Script


class Policy(nn.Module):
    def __init__(self, observations: int, actions: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(observations, 12), nn.Tanh())
        self.mean = nn.Linear(12, actions)
        self.value = nn.Linear(12, 1)
        self.log_std = nn.Parameter(torch.full((actions,), -0.5))

    def forward(self, obs: torch.Tensor) -> tuple[Normal, torch.Tensor]:
        features = self.body(obs)
        return Normal(self.mean(features), self.log_std.exp()), self.value(features).squeeze(-1)

    @torch.no_grad()
    def act(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dist, value = self(obs)
        action = dist.sample()
        return action, dist.log_prob(action).sum(-1), value


class RolloutBuffer:
    """Preallocated tensors, filled step by step."""

    def __init__(self, steps: int, envs: int, observations: int, actions: int) -> None:
        self.steps, self.envs = steps, envs
        self.obs = torch.zeros(steps, envs, observations)
        self.actions = torch.zeros(steps, envs, actions)
        self.log_probs = torch.zeros(steps, envs)
        self.values = torch.zeros(steps, envs)
        self.rewards = torch.zeros(steps, envs)
        self.dones = torch.zeros(steps, envs)
        self.advantages = torch.zeros(steps, envs)
        self.returns = torch.zeros(steps, envs)
        self.at = 0

    def add(self, obs, action, log_prob, value, reward, done) -> None:  # type: ignore[no-untyped-def]
        t = self.at
        self.obs[t] = obs
        self.actions[t] = action
        self.log_probs[t] = log_prob
        self.values[t] = value
        self.rewards[t] = reward
        self.dones[t] = done
        self.at += 1

    def finish(self, last_value: torch.Tensor, gamma: float, lam: float) -> None:
        running = torch.zeros(self.envs)
        following = last_value
        for t in reversed(range(self.steps)):
            alive = 1.0 - self.dones[t]
            delta = self.rewards[t] + gamma * following * alive - self.values[t]
            running = delta + gamma * lam * alive * running
            self.advantages[t] = running
            following = self.values[t]
        self.returns.copy_(self.advantages + self.values)
        self.at = 0


class Trainer:
    def __init__(self, envs: Any) -> None:
        self.envs = envs
        self.policy = Policy(4, 2)
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=3e-3)
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.1, 8)
        self.buffer = RolloutBuffer(6, envs.num_envs, 4, 2)
        self.obs = torch.as_tensor(envs.reset(seed=3)[0])
        self.episode_returns: list[float] = []
        self.history: list[dict[str, float]] = []
        self.iteration = 0
        self.clip = 0.2
        self.epochs = 2
        self.minibatch = 8

    def collect(self) -> None:
        for _ in range(self.buffer.steps):
            action, log_prob, value = self.policy.act(self.obs)
            obs, reward, terminated, truncated, info = self.envs.step(action.numpy())
            done = np.logical_or(terminated, truncated)
            self.buffer.add(
                self.obs,
                action,
                log_prob,
                value,
                torch.as_tensor(reward, dtype=torch.float32),
                torch.as_tensor(done, dtype=torch.float32),
            )
            if "episode" in info:
                for k in np.nonzero(info["_episode"])[0]:
                    self.episode_returns.append(float(info["episode"]["r"][k]))
            self.obs = torch.as_tensor(obs)

    def update(self) -> dict[str, float]:
        with torch.no_grad():
            _, last_value = self.policy(self.obs)
        self.buffer.finish(last_value, 0.99, 0.95)
        obs = self.buffer.obs.flatten(0, 1)
        actions = self.buffer.actions.flatten(0, 1)
        old_log_probs = self.buffer.log_probs.flatten()
        returns = self.buffer.returns.flatten()
        advantages = self.buffer.advantages.flatten()
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        losses = {"policy": 0.0, "value": 0.0, "entropy": 0.0}
        for _ in range(self.epochs):
            for rows in torch.randperm(len(obs)).split(self.minibatch):
                dist, value = self.policy(obs[rows])
                ratio = (dist.log_prob(actions[rows]).sum(-1) - old_log_probs[rows]).exp()
                clipped = ratio.clamp(1 - self.clip, 1 + self.clip)
                gain = advantages[rows]
                policy_loss = -torch.min(ratio * gain, clipped * gain).mean()
                value_loss = nn.functional.mse_loss(value, returns[rows])
                entropy = dist.entropy().sum(-1).mean()
                self.optimizer.zero_grad()
                (policy_loss + 0.5 * value_loss - 0.01 * entropy).backward()
                nn.utils.clip_grad_norm_(self.policy.parameters(), 0.5)
                self.optimizer.step()
                losses["policy"] += policy_loss.item()
                losses["value"] += value_loss.item()
                losses["entropy"] += entropy.item()
        self.schedule.step()
        return losses

    def train_iteration(self) -> dict[str, float]:
        self.collect()
        losses = self.update()
        self.iteration += 1
        self.history.append(losses)
        return losses


def run(compile: Any, vectorize: Any) -> Any:
    trainer = Trainer(vectorize([with_statistics(Reach)] * 8))
    step = compile(trainer.train_iteration)
    results = [step() for _ in range(ITERATIONS)]
    assert trainer.episode_returns, "no episode ended"
    return trainer, results


SCRIPTS = [
    Script("PPO, methods of a trainer", run, sharded=True, applied=("split", "tile_batch", "late"))
]
