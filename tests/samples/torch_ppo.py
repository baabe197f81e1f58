"""PPO over a torch-native simulator in shards, all in one dtype: no numpy on the way."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions.normal import Normal

import rose_compiler
from rose_compiler.sim import TorchPendulum


class Shard:
    """Environments of one simulator of its own, stepped where the caller is."""

    native_async = False

    def __init__(self, simulator: TorchPendulum, offset: int) -> None:
        self.simulator = simulator
        self.num_envs = simulator.num_envs
        self.offset = offset
        self.actions: Tensor | None = None

    def step(self, actions: Tensor) -> Any:
        return self.simulator.step(actions)

    def step_async(self, actions: Tensor) -> None:
        self.actions = actions.clone()

    def step_wait(self) -> Any:
        assert self.actions is not None
        return self.simulator.step(self.actions)


class TorchShards:
    """A batch of pendulums in even shards; follows ``rose_compiler.sim.protocol.Sharded``."""

    rose_fresh_outputs = True

    def __init__(self, num_envs: int, shards: int, *, dtype: torch.dtype, limit: int) -> None:
        self.num_envs = num_envs
        size = num_envs // shards
        made = [
            TorchPendulum(
                size, limit=limit, dtype=dtype, generator=torch.Generator().manual_seed(k)
            )
            for k in range(shards)
        ]
        self.parts = [Shard(s, k * size) for k, s in enumerate(made)]

    def shards(self) -> list[Shard]:
        return self.parts

    def merge(self, results: Any) -> Any:
        joined = tuple(torch.cat([r[k] for r in results]) for k in range(4))
        infos = {k: torch.cat([r[4][k] for r in results]) for k in results[0][4]}
        return (*joined, infos)

    @rose_compiler.component(reads=["self"], writes=["self"])
    def step(self, actions: Tensor) -> Any:
        rows = [actions[s.offset : s.offset + s.num_envs] for s in self.parts]
        return self.merge([s.step(a) for s, a in zip(self.parts, rows, strict=True)])


class Agent(nn.Module):
    def __init__(self, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        sizes = [(3, hidden), (hidden, hidden)]
        body = [m for i, o in sizes for m in (nn.Linear(i, o), nn.Tanh())]
        self.actor = nn.Sequential(*body, nn.Linear(hidden, 1))
        body = [m for i, o in sizes for m in (nn.Linear(i, o), nn.Tanh())]
        self.critic = nn.Sequential(*body, nn.Linear(hidden, 1))
        self.logstd = nn.Parameter(torch.zeros(1, 1))
        self.to(dtype)

    def act(self, obs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean = self.actor(obs)
        dist = Normal(mean, self.logstd.exp().expand_as(mean))
        action = dist.sample()
        return action, dist.log_prob(action).sum(1), self.critic(obs)

    def judge(self, obs: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        mean = self.actor(obs)
        dist = Normal(mean, self.logstd.exp().expand_as(mean))
        return dist.log_prob(action).sum(1), self.critic(obs)


class Buffers:
    def __init__(self, steps: int, envs: int, dtype: torch.dtype) -> None:
        self.obs = torch.zeros(steps, envs, 3, dtype=dtype)
        self.actions = torch.zeros(steps, envs, 1, dtype=dtype)
        self.logprobs = torch.zeros(steps, envs, dtype=dtype)
        self.values = torch.zeros(steps, envs, dtype=dtype)
        self.rewards = torch.zeros(steps, envs, dtype=dtype)
        self.dones = torch.zeros(steps, envs, dtype=dtype)


def iteration(agent, optimizer, envs, buf, cfg, obs):  # type: ignore[no-untyped-def]
    for t in range(cfg.steps):
        buf.obs[t] = obs
        with torch.no_grad():
            action, logprob, value = agent.act(obs)
        buf.actions[t] = action
        buf.logprobs[t] = logprob
        buf.values[t] = value.flatten()
        obs, reward, terminated, truncated, _ = envs.step(action)
        buf.rewards[t] = reward
        buf.dones[t] = (terminated | truncated).to(buf.dones.dtype)
    with torch.no_grad():
        following = agent.critic(obs).flatten()
    advantages = torch.zeros_like(buf.rewards)
    last = torch.zeros_like(following)
    for t in reversed(range(cfg.steps)):
        alive = 1.0 - buf.dones[t]
        delta = buf.rewards[t] + cfg.gamma * following * alive - buf.values[t]
        last = delta + cfg.gamma * cfg.lam * alive * last
        advantages[t] = last
        following = buf.values[t]
    returns = (advantages + buf.values).reshape(-1)
    b_obs, b_actions = buf.obs.reshape(-1, 3), buf.actions.reshape(-1, 1)
    b_logprobs, b_advantages = buf.logprobs.reshape(-1), advantages.reshape(-1)
    for _epoch in range(cfg.epochs):
        order = torch.randperm(b_obs.shape[0])
        for start in range(0, b_obs.shape[0], cfg.minibatch):
            rows = order[start : start + cfg.minibatch]
            logprob, value = agent.judge(b_obs[rows], b_actions[rows])
            ratio = (logprob - b_logprobs[rows]).exp()
            adv = b_advantages[rows]
            adv = (adv - adv.mean()) / (adv.std() + 1e-8)
            gain = torch.min(adv * ratio, adv * ratio.clamp(0.8, 1.2)).mean()
            loss = 0.5 * (value.flatten() - returns[rows]).pow(2).mean() - gain
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return obs, loss.item()


class Setup:
    """Everything one training run owns."""

    def __init__(
        self,
        *,
        dtype: torch.dtype = torch.float64,
        envs: int = 8,
        shards: int = 4,
        steps: int = 24,
        hidden: int = 128,
        seed: int = 0,
    ) -> None:
        torch.manual_seed(seed)
        self.agent = Agent(hidden, dtype)
        self.optimizer = torch.optim.Adam(self.agent.parameters(), lr=3e-4)
        self.envs = TorchShards(envs, shards, dtype=dtype, limit=10)
        self.buf = Buffers(steps, envs, dtype)
        self.cfg = SimpleNamespace(
            steps=steps, gamma=0.99, lam=0.95, epochs=2, minibatch=steps * envs // 4
        )
        parts = [s.simulator.observe(s.simulator.state) for s in self.envs.shards()]
        self.obs = torch.cat(parts)
        self.losses: list[float] = []

    def run(self, step: Callable[..., Any], times: int = 1) -> None:
        for _ in range(times):
            self.obs, loss = step(
                self.agent, self.optimizer, self.envs, self.buf, self.cfg, self.obs
            )
            self.losses.append(loss)

    def state(self) -> dict[str, Tensor]:
        """Parameters, gradients, optimizer state, buffers, simulators and the generator."""
        found: dict[str, Tensor] = {}
        for name, p in self.agent.named_parameters():
            found[f"param.{name}"] = p.detach().clone()
            if p.grad is not None:
                found[f"grad.{name}"] = p.grad.clone()
            for key, value in self.optimizer.state[p].items():
                found[f"adam.{name}.{key}"] = value.clone()
        found |= {f"buf.{k}": v.clone() for k, v in vars(self.buf).items()}
        for k, shard in enumerate(self.envs.shards()):
            found |= {f"sim.{k}.{n}": v for n, v in shard.simulator.get_state().items()}
        found["obs"] = self.obs.clone()
        found["rng"] = torch.get_rng_state()
        return found
