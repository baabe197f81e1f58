"""PPO on HalfCheetah as a researcher writes it: the input of the compiler and the baseline E0.

`make(SHAPES["c"])` builds agent, optimizer, simulator and buffers of one of the four shapes;
`iteration` is one PPO iteration over them, a plain function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Normal

from bench.envs import ACT, OBS, Hosts, make_envs


@dataclass(frozen=True)
class Config:
    """Sizes and hyperparameters of one PPO run; rates are per update, sizes in rows.

    Without epochs an iteration collects and does not train.
    """

    num_envs: int
    num_steps: int
    hidden: int
    layers: int
    epochs: int
    minibatches: int
    shards: int
    hosts: Hosts = "process"
    simulator: Literal["gymnasium", "envpool"] = "gymnasium"
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip: float = 0.2
    vf_coef: float = 0.5
    ent_coef: float = 0.0
    max_grad_norm: float = 0.5
    target_kl: float = 0.05
    lr: float = 3e-4

    @property
    def batch(self) -> int:
        """Transitions an iteration collects."""
        return self.num_envs * self.num_steps


SHAPES: dict[str, Config] = {
    "a": Config(1, 2048, 64, 2, 10, 32, 1, hosts="inline"),
    "b": Config(64, 32, 512, 3, 1, 4, 4, hosts="inline", simulator="envpool"),
    "c": Config(32, 64, 256, 2, 2, 8, 2),
    "d": Config(64, 32, 512, 3, 1, 4, 2),
}


def _layer(inputs: int, outputs: int, gain: float = 2**0.5) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def _mlp(inputs: int, hidden: int, layers: int, outputs: int, gain: float) -> nn.Sequential:
    modules: list[nn.Module] = []
    for _ in range(layers):
        modules += [_layer(inputs, hidden), nn.Tanh()]
        inputs = hidden
    return nn.Sequential(*modules, _layer(inputs, outputs, gain))


class Agent(nn.Module):
    """Gaussian policy with a state-independent scale, and a separate critic."""

    def __init__(self, obs_dim: int, act_dim: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.critic = _mlp(obs_dim, hidden, layers, 1, 1.0)
        self.actor_mean = _mlp(obs_dim, hidden, layers, act_dim, 0.01)
        self.actor_logstd = nn.Parameter(torch.zeros(1, act_dim))

    def get_value(self, obs: Tensor) -> Tensor:
        """State values, shape (rows, 1)."""
        value: Tensor = self.critic(obs)
        return value

    def get_action_and_value(
        self, obs: Tensor, action: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Sampled (or given) actions, their log-probabilities, entropies and state values."""
        mean = self.actor_mean(obs)
        std = torch.exp(self.actor_logstd.expand_as(mean))
        dist = Normal(mean, std)
        if action is None:
            action = dist.sample()
        return action, dist.log_prob(action).sum(1), dist.entropy().sum(1), self.critic(obs)


class Buffers:
    """Preallocated rollout storage, time first."""

    def __init__(self, cfg: Config, obs_dim: int, act_dim: int) -> None:
        steps, envs = cfg.num_steps, cfg.num_envs
        self.obs = torch.zeros(steps, envs, obs_dim)
        self.actions = torch.zeros(steps, envs, act_dim)
        self.logprobs = torch.zeros(steps, envs)
        self.rewards = torch.zeros(steps, envs)
        self.dones = torch.zeros(steps, envs)
        self.values = torch.zeros(steps, envs)


def iteration(
    agent: Agent,
    optimizer: torch.optim.Optimizer,
    envs: Any,
    buf: Buffers,
    cfg: Config,
    log: list[float],
    next_obs: Tensor,
    next_done: Tensor,
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """One iteration: collect `num_steps` from every environment, then update on them."""
    for t in range(cfg.num_steps):
        buf.obs[t] = next_obs
        buf.dones[t] = next_done
        with torch.no_grad():
            action, logprob, _, value = agent.get_action_and_value(next_obs)
        buf.actions[t] = action
        buf.logprobs[t] = logprob
        buf.values[t] = value.flatten()
        obs, reward, terminated, truncated, infos = envs.step(action.cpu().numpy())
        buf.rewards[t] = torch.as_tensor(reward, dtype=torch.float32)
        next_obs = torch.as_tensor(obs, dtype=torch.float32)
        next_done = torch.as_tensor(np.logical_or(terminated, truncated), dtype=torch.float32)
        if "episode" in infos:
            for i in np.flatnonzero(infos["_episode"]):
                log.append(float(infos["episode"]["r"][i]))

    with torch.no_grad():
        next_value = agent.get_value(next_obs).flatten()
    advantages = torch.zeros_like(buf.rewards)
    last = torch.zeros(cfg.num_envs)
    for t in reversed(range(cfg.num_steps)):
        if t == cfg.num_steps - 1:
            alive = 1.0 - next_done
            following = next_value
        else:
            alive = 1.0 - buf.dones[t + 1]
            following = buf.values[t + 1]
        delta = buf.rewards[t] + cfg.gamma * following * alive - buf.values[t]
        last = delta + cfg.gamma * cfg.gae_lambda * alive * last
        advantages[t] = last
    returns = advantages + buf.values

    b_obs = buf.obs.reshape(cfg.batch, -1)
    b_actions = buf.actions.reshape(cfg.batch, -1)
    b_logprobs = buf.logprobs.reshape(-1)
    b_advantages = advantages.reshape(-1)
    b_returns = returns.reshape(-1)
    size = cfg.batch // cfg.minibatches
    stats: dict[str, float] = {}
    for _epoch in range(cfg.epochs):
        order = torch.randperm(cfg.batch)
        for start in range(0, cfg.batch, size):
            rows = order[start : start + size]
            _, newlogprob, entropy, newvalue = agent.get_action_and_value(
                b_obs[rows], b_actions[rows]
            )
            logratio = newlogprob - b_logprobs[rows]
            ratio = logratio.exp()
            with torch.no_grad():
                approx_kl = ((ratio - 1) - logratio).mean()
            adv = b_advantages[rows]
            adv = (adv - adv.mean()) / (adv.std() + 1e-8)
            clipped = torch.clamp(ratio, 1 - cfg.clip, 1 + cfg.clip)
            pg_loss = torch.max(-adv * ratio, -adv * clipped).mean()
            v_loss = 0.5 * (newvalue.view(-1) - b_returns[rows]).pow(2).mean()
            loss = pg_loss - cfg.ent_coef * entropy.mean() + cfg.vf_coef * v_loss
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), cfg.max_grad_norm)
            optimizer.step()
        stats = {"kl": approx_kl.item(), "pg_loss": pg_loss.item(), "v_loss": v_loss.item()}
        if stats["kl"] > cfg.target_kl:
            break
    return next_obs, next_done, stats


Iteration = Callable[..., tuple[Tensor, Tensor, dict[str, float]]]


@dataclass
class Setup:
    """A live training run: everything `iteration` takes, and what it last returned."""

    cfg: Config
    agent: Agent
    optimizer: torch.optim.Optimizer
    envs: Any
    buf: Buffers
    next_obs: Tensor
    next_done: Tensor
    log: list[float] = field(default_factory=list)
    stats: dict[str, float] = field(default_factory=dict)

    def run(self, fn: Iteration, cfg: Config | None = None) -> None:
        """Advance the training by one call of `fn`, which has the signature of `iteration`."""
        self.next_obs, self.next_done, self.stats = fn(
            self.agent,
            self.optimizer,
            self.envs,
            self.buf,
            cfg or self.cfg,
            self.log,
            self.next_obs,
            self.next_done,
        )

    def close(self) -> None:
        """Stop the simulator's hosts."""
        self.envs.close()


def make(
    cfg: Config,
    seed: int = 1,
    *,
    shards: int | None = None,
    hosts: Hosts | None = None,
    threads: int = 1,
    envs: Any = None,
) -> Setup:
    """Build a training run; everything random in it derives from `seed`.

    `shards` and `hosts` replace the configuration's; `threads` are those of an EnvPool shard.
    `envs` replaces the simulator.
    """
    if envs is None:
        envs = make_envs(
            cfg.simulator,
            cfg.num_envs,
            shards or cfg.shards,
            hosts=hosts or cfg.hosts,
            seed=seed,
            threads=threads,
        )
    torch.manual_seed(seed)
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # orthogonal initialization differs in bits with the thread count
    agent = Agent(OBS, ACT, cfg.hidden, cfg.layers)
    torch.set_num_threads(before)
    optimizer = torch.optim.Adam(agent.parameters(), lr=cfg.lr, eps=1e-5)
    obs, _ = envs.reset(seed=seed if cfg.simulator == "gymnasium" else None)
    next_obs = torch.as_tensor(obs, dtype=torch.float32)
    return Setup(
        cfg, agent, optimizer, envs, Buffers(cfg, OBS, ACT), next_obs, torch.zeros(cfg.num_envs)
    )
