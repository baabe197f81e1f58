"""A small loop over a simulator in shards, cheap enough to be compiled in every test."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from rose_compiler.sim import ShardedEnv
from tests.api.points import Drift


class Buffer:
    """Rewards and values of one rollout."""

    def __init__(self, steps: int, envs: int) -> None:
        self.rewards = torch.zeros(steps, envs)
        self.values = torch.zeros(steps, envs)


class Agent(nn.Module):
    """An actor and a critic."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Linear(3, 3)
        self.critic = nn.Linear(3, 1)


def iteration(agent: Any, optimizer: Any, envs: Any, buffer: Any, obs: Any) -> Any:
    """Four steps, then one update of the critic."""
    for t in range(4):
        with torch.no_grad():
            action = agent.actor(obs) + 0.1 * torch.randn(8, 3)
            buffer.values[t] = agent.critic(obs).squeeze(-1)
        obs, reward, _, _, _ = envs.step(action.numpy())
        buffer.rewards[t] = torch.as_tensor(reward, dtype=torch.float32)
        obs = torch.as_tensor(obs, dtype=torch.float32)
    loss = (agent.critic(obs).squeeze(-1) - buffer.rewards.mean(0)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return obs


class Training:
    """All that an iteration works on, from one seed."""

    def __init__(self, seed: int = 0, lr: float = 1e-2, envs: int = 8, shards: int = 2) -> None:
        torch.manual_seed(seed)
        self.agent = Agent()
        self.optimizer = torch.optim.Adam(self.agent.parameters(), lr=lr)
        self.envs = ShardedEnv.split([Drift] * envs, shards=shards, hosts="thread")
        self.buffer = Buffer(4, envs)
        self.obs = torch.as_tensor(self.envs.reset(seed=seed)[0], dtype=torch.float32)

    def run(self, fn: Any, times: int = 1) -> None:
        """Iterations of training with ``fn``, one after the other."""
        for _ in range(times):
            self.obs = fn(self.agent, self.optimizer, self.envs, self.buffer, self.obs)

    def bits(self) -> dict[str, torch.Tensor]:
        """A copy of all that training leaves behind, the next random number too."""
        found = {f"agent.{k}": v.clone() for k, v in self.agent.state_dict().items()}
        for name, value in self.optimizer.state_dict()["state"].items():
            found |= {f"optimizer.{name}.{k}": v.clone() for k, v in value.items()}
        found["rewards"], found["values"] = self.buffer.rewards.clone(), self.buffer.values.clone()
        found["obs"] = self.obs.clone()
        found["rng"] = torch.get_rng_state()
        found["envs"] = torch.as_tensor(self.envs.step(np.zeros((8, 3), np.float32))[0])
        return found

    def close(self) -> None:
        """End the simulator."""
        self.envs.close()


def differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    """The names whose bits differ."""
    return [k for k in a.keys() | b.keys() if k not in a or k not in b or not a[k].equal(b[k])]
