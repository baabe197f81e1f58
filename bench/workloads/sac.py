"""Soft actor-critic on HalfCheetah: an update a step, on a batch that was drawn before the step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.envs import ACT, OBS, make_env
from bench.handwritten import Clock
from bench.workloads.base import Function, Size, Threads, Training, Workload
from rose_compiler.sim import ShardedEnv


@dataclass(frozen=True)
class SACConfig:
    """Sizes and rates; `steps` of all environments an iteration."""

    num_envs: int = 8
    shards: int = 1
    steps: int = 32
    batch: int = 256
    hidden: int = 256
    size: int = 20_000
    warm: int = 64
    gamma: float = 0.99
    tau: float = 0.005
    lr: float = 3e-4


class Critic(nn.Module):
    """Two value functions of observation and action."""

    def __init__(self, hidden: int) -> None:
        super().__init__()

        def net() -> nn.Sequential:
            return nn.Sequential(
                *(nn.Linear(OBS + ACT, hidden), nn.ReLU()),
                *(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1)),
            )

        self.q1, self.q2 = net(), net()

    def forward(self, obs: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Both values, (rows, 1) each."""
        x = torch.cat([obs, action], 1)
        return self.q1(x), self.q2(x)


class Actor(nn.Module):
    """A squashed Gaussian."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Linear(OBS, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU()
        )
        self.mean, self.log_std = nn.Linear(hidden, ACT), nn.Linear(hidden, ACT)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Actions (rows, 6) in [-1, 1] and their log-probabilities (rows, 1)."""
        x = self.trunk(obs)
        log_std = -5.0 + 3.5 * (torch.tanh(self.log_std(x)) + 1.0)
        noise = torch.randn_like(log_std)
        raw = self.mean(x) + log_std.exp() * noise
        action = torch.tanh(raw)
        density = -0.5 * noise.pow(2) - log_std - 0.9189385332046727
        density = density - torch.log(1.0 - action.pow(2) + 1e-6)
        return action, density.sum(1, keepdim=True)


class Replay:
    """A ring of transitions in preallocated arrays."""

    def __init__(self, size: int, num_envs: int, seed: int) -> None:
        self.size, self.num_envs = size // num_envs, num_envs
        shape = (self.size, num_envs)
        self.obs = np.zeros((*shape, OBS), np.float32)
        self.next_obs = np.zeros((*shape, OBS), np.float32)
        self.actions = np.zeros((*shape, ACT), np.float32)
        self.rewards = np.zeros(shape, np.float32)
        self.ends = np.zeros(shape, np.float32)
        self.at = 0
        self.filled = 0
        self.rng = np.random.default_rng(seed)

    def add(self, obs: Any, next_obs: Any, action: Any, reward: Any, end: Any) -> None:
        """Keep a step of all environments."""
        self.obs[self.at], self.next_obs[self.at] = obs, next_obs
        self.actions[self.at], self.rewards[self.at], self.ends[self.at] = action, reward, end
        self.at = (self.at + 1) % self.size
        self.filled = min(self.filled + 1, self.size)

    def sample(self, count: int) -> tuple[Tensor, ...]:
        """`count` transitions, as copies."""
        rows = self.rng.integers(0, self.filled, count)
        envs = self.rng.integers(0, self.num_envs, count)
        return (
            torch.as_tensor(self.obs[rows, envs]),
            torch.as_tensor(self.next_obs[rows, envs]),
            torch.as_tensor(self.actions[rows, envs]),
            torch.as_tensor(self.rewards[rows, envs]).view(-1, 1),
            torch.as_tensor(self.ends[rows, envs]).view(-1, 1),
        )


class Learner:
    """Networks, their optimizers, and the temperature."""

    def __init__(self, cfg: SACConfig) -> None:
        self.actor = Actor(cfg.hidden)
        self.critic, self.target = Critic(cfg.hidden), Critic(cfg.hidden)
        self.target.load_state_dict(self.critic.state_dict())
        self.log_alpha = torch.zeros(1, requires_grad=True)
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr=cfg.lr)
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), lr=cfg.lr)
        self.alpha_optimizer = torch.optim.Adam([self.log_alpha], lr=cfg.lr)


def critic_loss(learner: Learner, cfg: SACConfig, batch: tuple[Tensor, ...]) -> Tensor:
    """Squared distance of both values from the target."""
    obs, next_obs, action, reward, end = batch
    with torch.no_grad():
        next_action, next_log_prob = learner.actor(next_obs)
        q1, q2 = learner.target(next_obs, next_action)
        soft = torch.min(q1, q2) - learner.log_alpha.exp() * next_log_prob
        wanted = reward + (1.0 - end) * cfg.gamma * soft
    q1, q2 = learner.critic(obs, action)
    return F.mse_loss(q1, wanted) + F.mse_loss(q2, wanted)


def actor_loss(learner: Learner, obs: Tensor) -> tuple[Tensor, Tensor]:
    """The actor's loss, and the entropy that the temperature follows."""
    action, log_prob = learner.actor(obs)
    q1, q2 = learner.critic(obs, action)
    loss = (learner.log_alpha.exp().detach() * log_prob - torch.min(q1, q2)).mean()
    return loss, log_prob.detach()


def update(learner: Learner, cfg: SACConfig, batch: tuple[Tensor, ...]) -> None:
    """One gradient step of critics, actor and temperature; the targets follow."""
    loss = critic_loss(learner, cfg, batch)
    learner.critic_optimizer.zero_grad()
    loss.backward()
    learner.critic_optimizer.step()
    loss, log_prob = actor_loss(learner, batch[0])
    learner.actor_optimizer.zero_grad()
    loss.backward()
    learner.actor_optimizer.step()
    alpha_loss = -(learner.log_alpha.exp() * (log_prob - ACT)).mean()
    learner.alpha_optimizer.zero_grad()
    alpha_loss.backward()
    learner.alpha_optimizer.step()
    with torch.no_grad():
        for p, q in zip(learner.critic.parameters(), learner.target.parameters(), strict=True):
            q.mul_(1.0 - cfg.tau).add_(p, alpha=cfg.tau)


def iteration(learner: Learner, envs: Any, replay: Replay, cfg: SACConfig, obs: Any) -> tuple[Any]:
    """`steps` steps, each with an update."""
    for _ in range(cfg.steps):
        batch = replay.sample(cfg.batch)
        with torch.no_grad():
            action, _ = learner.actor(torch.as_tensor(obs, dtype=torch.float32))
        action = action.numpy()
        next_obs, reward, terminated, _truncated, _infos = envs.step(action)
        update(learner, cfg, batch)
        replay.add(obs, next_obs, action, reward, terminated)
        obs = next_obs
    return (obs,)


def beside(threads: int) -> Function:
    """H: the simulator steps while the update runs."""

    def run(learner: Learner, envs: Any, replay: Replay, cfg: SACConfig, obs: Any) -> tuple[Any]:
        torch.set_num_threads(threads)
        for _ in range(cfg.steps):
            batch = replay.sample(cfg.batch)
            with torch.no_grad():
                action, _ = learner.actor(torch.from_numpy(obs))
            action = action.numpy()
            for shard in envs.shards():
                shard.step_async(action[shard.offset : shard.offset + shard.num_envs])
            update(learner, cfg, batch)
            parts = [shard.step_wait() for shard in envs.shards()]
            next_obs, reward, end = (np.concatenate([p[k] for p in parts]) for k in range(3))
            next_obs = next_obs.astype(np.float32, copy=False)
            replay.add(obs, next_obs, action, reward, end)
            obs = next_obs
        return (obs,)

    return run


class SAC(Workload):
    """The row."""

    name = "sac"
    about = "SAC, 8 gymnasium environments, an update of 256 rows a step, MLP 2x256"
    interleaved = True

    def make(self, size: Size = Size(), seed: int = 1) -> Training:  # noqa: B008
        cfg = SACConfig()
        if size.tiny:
            cfg = replace(cfg, num_envs=2, steps=4, batch=16, hidden=16, size=400, warm=8)
        hosts = "inline" if size.tiny or size.one_core or size.part else "process"
        envs = ShardedEnv.split([make_env] * cfg.num_envs, shards=cfg.shards, hosts=hosts)
        torch.manual_seed(seed)
        learner, replay = Learner(cfg), Replay(cfg.size, cfg.num_envs, seed)
        obs, _ = envs.reset(seed=seed)
        rng = np.random.default_rng(seed)
        for _ in range(cfg.warm):
            action = rng.uniform(-1, 1, (cfg.num_envs, ACT)).astype(np.float32)
            next_obs, reward, end, _, _ = envs.step(action)
            replay.add(obs, next_obs, action, reward, end)
            obs = next_obs
        obs = np.asarray(obs, np.float32)
        return Training(iteration, [learner, envs, replay, cfg, obs], (4,), [envs.close])

    def sequential(self, rollout: int, update_: int, clock: Clock | None = None) -> Function:
        phase = Threads(rollout, update_, clock)

        def run(learner, envs, replay, cfg, obs):  # type: ignore[no-untyped-def]
            for _ in range(cfg.steps):
                phase.start()
                batch = replay.sample(cfg.batch)
                with torch.no_grad():
                    action, _ = learner.actor(torch.as_tensor(obs, dtype=torch.float32))
                action = action.numpy()
                next_obs, reward, terminated, _truncated, _infos = envs.step(action)
                phase.update()
                update(learner, cfg, batch)
                phase.end()
                replay.add(obs, next_obs, action, reward, terminated)
                obs = next_obs
            return (obs,)

        return run

    def by_hand(self, training: Training) -> Function | None:
        learner: Any = training.args[0]
        for optimizer in (
            learner.actor_optimizer,
            learner.critic_optimizer,
            learner.alpha_optimizer,
        ):
            for group in optimizer.param_groups:
                group["fused"] = True
        act = torch.compile(learner.actor, dynamic=False)
        c_loss, a_loss = (
            torch.compile(critic_loss, dynamic=False),
            torch.compile(actor_loss, dynamic=False),
        )
        params, targets = list(learner.critic.parameters()), list(learner.target.parameters())

        def run(learner, envs, replay, cfg, obs):  # type: ignore[no-untyped-def]
            for _ in range(cfg.steps):
                batch = replay.sample(cfg.batch)
                with torch.no_grad():
                    action, _ = act(torch.from_numpy(obs))
                action = action.numpy()
                next_obs, reward, terminated, _truncated, _infos = envs.step(action)
                loss = c_loss(learner, cfg, batch)
                learner.critic_optimizer.zero_grad()
                loss.backward()
                learner.critic_optimizer.step()
                loss, log_prob = a_loss(learner, batch[0])
                learner.actor_optimizer.zero_grad()
                loss.backward()
                learner.actor_optimizer.step()
                alpha_loss = -(learner.log_alpha.exp() * (log_prob - ACT)).mean()
                learner.alpha_optimizer.zero_grad()
                alpha_loss.backward()
                learner.alpha_optimizer.step()
                with torch.no_grad():
                    torch._foreach_lerp_(targets, params, cfg.tau)
                next_obs = np.asarray(next_obs, np.float32)
                replay.add(obs, next_obs, action, reward, terminated)
                obs = next_obs
            return (obs,)

        return run

    def overlapped(self) -> Mapping[str, Function]:
        return {
            f"update beside the step, threads {n}": beside(n)
            for n in sorted({1, torch.get_num_threads()})
        }
