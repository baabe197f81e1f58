"""Advantage actor-critic whose loss grows with the rollout: gradients are recorded beside the steps
of the simulator, and one backward goes through all of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.loops.envs import Reach
from tests.loops.harness import ITERATIONS, Script


def iteration(envs, model, critic, optimizer, obs):  # type: ignore[no-untyped-def]
    loss = torch.zeros(())
    for _ in range(4):
        mean = model(obs)
        noise = torch.randn_like(mean)
        action = (mean + noise).detach()
        value = critic(obs).squeeze(1)
        next_obs, reward, _, _, _ = envs.step(action.numpy())
        reward = torch.as_tensor(reward, dtype=torch.float32)
        next_obs = torch.as_tensor(next_obs)
        smooth = (model(next_obs) * reward.unsqueeze(1)).pow(2).mean()
        loss = loss + (value - reward).pow(2).mean() + (noise * mean).mean() + 0.1 * smooth
        obs = next_obs
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return obs, loss.item()


def run(compile: Any, vectorize: Any) -> Any:
    envs = vectorize([Reach] * 8)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam([*model.parameters(), *critic.parameters()], lr=1e-2)
    obs = torch.as_tensor(envs.reset(seed=3)[0])
    step, losses = compile(iteration), []
    for _ in range(ITERATIONS):
        obs, loss = step(envs, model, critic, optimizer, obs)
        losses.append(loss)
    return envs, model, critic, optimizer, obs, losses


SCRIPTS = [Script("actor-critic through its rollout", run, sharded=True, applied=("late",))]
