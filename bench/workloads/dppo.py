"""Policy gradient through a diffusion policy, after DPPO (Ren et al. 2024): every step of the
denoising chain is a step of the decision process. State observations, chunks of actions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bench.envs import ACT, OBS
from bench.handwritten import Clock
from bench.workloads.base import Function, Size, Threads, Training, Workload
from bench.workloads.chunks import CHUNK, make_chunked
from rose_compiler.sim import ShardedEnv

ENTRIES = CHUNK * ACT


@dataclass(frozen=True)
class DPPOConfig:
    """`denoise` steps a chunk; `steps` chunks of `num_envs` environments an iteration."""

    num_envs: int = 16
    shards: int = 2
    steps: int = 16
    denoise: int = 10
    hidden: int = 256
    epochs: int = 2
    minibatches: int = 4
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip: float = 0.1
    sigma: float = 0.1
    lr: float = 1e-4

    @property
    def batch(self) -> int:
        """Chunks an iteration plays."""
        return self.steps * self.num_envs


class Diffusion(nn.Module):
    """Denoises a chunk of actions given an observation; a critic beside it."""

    def __init__(self, cfg: DPPOConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.denoiser = nn.Sequential(
            *(nn.Linear(ENTRIES + OBS + 8, cfg.hidden), nn.Mish()),
            *(nn.Linear(cfg.hidden, cfg.hidden), nn.Mish(), nn.Linear(cfg.hidden, ENTRIES)),
        )
        self.critic = nn.Sequential(
            *(nn.Linear(OBS, cfg.hidden), nn.Mish()),
            *(nn.Linear(cfg.hidden, cfg.hidden), nn.Mish(), nn.Linear(cfg.hidden, 1)),
        )
        frequencies = torch.exp(torch.linspace(0, 3, 4))
        phase = torch.arange(cfg.denoise)[:, None] / cfg.denoise * frequencies
        self.register_buffer("times", torch.cat([phase.sin(), phase.cos()], 1))

    def mean(self, x: Tensor, obs: Tensor, times: Tensor) -> Tensor:
        """Where one denoising step leads; `times` (rows, 8) are the embedded steps."""
        change: Tensor = self.denoiser(torch.cat([x, obs, times], 1))
        return x + change / self.cfg.denoise


def collect(model: Diffusion, envs: Any, buf: Any, cfg: DPPOConfig, obs: Tensor) -> Tensor:
    """Play chunks; keep every chain of denoising steps."""
    for t in range(cfg.steps):
        buf.obs[t] = obs
        with torch.no_grad():
            x = torch.randn(cfg.num_envs, ENTRIES)
            buf.chains[t, 0] = x
            for k in range(cfg.denoise):
                mean = model.mean(x, obs, model.times[k].expand(cfg.num_envs, 8))
                x = mean + cfg.sigma * torch.randn_like(mean)
                buf.chains[t, k + 1] = x
                buf.means[t, k] = mean
            buf.values[t] = model.critic(obs).flatten()
        obs, reward, terminated, truncated, _infos = envs.step(x.numpy())
        buf.rewards[t] = torch.as_tensor(reward, dtype=torch.float32)
        buf.dones[t] = torch.as_tensor(terminated | truncated, dtype=torch.float32)
        obs = torch.as_tensor(obs, dtype=torch.float32)
    return obs


def update(
    model: Diffusion, optimizer: torch.optim.Optimizer, buf: Any, cfg: DPPOConfig, obs: Tensor
) -> float:
    """Advantages of chunks, then epochs over all denoising steps."""
    with torch.no_grad():
        following = model.critic(obs).flatten()
        advantages = torch.zeros_like(buf.rewards)
        last = torch.zeros(cfg.num_envs)
        for t in reversed(range(cfg.steps)):
            alive = 1.0 - buf.dones[t]
            delta = buf.rewards[t] + cfg.gamma * following * alive - buf.values[t]
            last = delta + cfg.gamma * cfg.gae_lambda * alive * last
            advantages[t] = last
            following = buf.values[t]
        returns = advantages + buf.values
    b_obs, b_returns = buf.obs.flatten(0, 1), returns.flatten()
    b_advantages = (advantages.flatten() - advantages.mean()) / (advantages.std() + 1e-8)
    b_chains = buf.chains.transpose(1, 2).flatten(0, 1)
    b_means = buf.means.transpose(1, 2).flatten(0, 1)
    size = cfg.batch // cfg.minibatches
    for _epoch in range(cfg.epochs):
        order = torch.randperm(cfg.batch)
        for start in range(0, cfg.batch, size):
            rows = order[start : start + size]
            seen = b_obs[rows]
            before = b_chains[rows, :-1].flatten(0, 1)
            after = b_chains[rows, 1:].flatten(0, 1)
            times = model.times.repeat(size, 1)
            mean = model.mean(before, seen.repeat_interleave(cfg.denoise, 0), times)
            old = b_means[rows].flatten(0, 1)
            logratio = ((after - old).pow(2) - (after - mean).pow(2)).mean(1) / (2 * cfg.sigma**2)
            ratio = logratio.clamp(-5, 5).exp().view(size, cfg.denoise)
            adv = b_advantages[rows].unsqueeze(1)
            clipped = ratio.clamp(1 - cfg.clip, 1 + cfg.clip)
            pg_loss = torch.max(-adv * ratio, -adv * clipped).mean()
            v_loss = 0.5 * (model.critic(seen).flatten() - b_returns[rows]).pow(2).mean()
            loss = pg_loss + 0.5 * v_loss
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return float(loss.item())


def iteration(
    model: Diffusion,
    optimizer: torch.optim.Optimizer,
    envs: Any,
    buf: Any,
    cfg: DPPOConfig,
    obs: Tensor,
) -> tuple[Tensor, float]:
    """One iteration."""
    obs = collect(model, envs, buf, cfg, obs)
    loss = update(model, optimizer, buf, cfg, obs)
    return obs, loss


class Chains:
    """What a rollout leaves for the update, time first."""

    def __init__(self, cfg: DPPOConfig) -> None:
        shape = (cfg.steps, cfg.num_envs)
        self.obs = torch.zeros(*shape, OBS)
        self.chains = torch.zeros(cfg.steps, cfg.denoise + 1, cfg.num_envs, ENTRIES)
        self.means = torch.zeros(cfg.steps, cfg.denoise, cfg.num_envs, ENTRIES)
        self.values = torch.zeros(shape)
        self.rewards = torch.zeros(shape)
        self.dones = torch.zeros(shape)


class DPPO(Workload):
    """The row."""

    name = "dppo"
    about = "DPPO-like, 16 gymnasium environments, chunks of 4 actions from 10 denoising steps"

    def make(self, size: Size = Size(), seed: int = 1) -> Training:  # noqa: B008
        cfg = DPPOConfig()
        if size.tiny:
            cfg = replace(cfg, num_envs=4, steps=4, denoise=3, hidden=16, minibatches=2)
        if size.part:
            cfg = replace(cfg, num_envs=cfg.num_envs // cfg.shards, shards=1)
        hosts = "inline" if size.tiny or size.one_core or size.part else "process"
        envs = ShardedEnv.split([make_chunked] * cfg.num_envs, shards=cfg.shards, hosts=hosts)
        torch.manual_seed(seed)
        model = Diffusion(cfg)
        optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr)
        obs, _ = envs.reset(seed=seed)
        obs = torch.as_tensor(np.asarray(obs), dtype=torch.float32)
        return Training(
            iteration, [model, optimizer, envs, Chains(cfg), cfg, obs], (5,), [envs.close]
        )

    def sequential(self, rollout: int, update_: int, clock: Clock | None = None) -> Function:
        phase = Threads(rollout, update_, clock)

        def run(model, optimizer, envs, buf, cfg, obs):  # type: ignore[no-untyped-def]
            phase.start()
            obs = collect(model, envs, buf, cfg, obs)
            phase.update()
            loss = update(model, optimizer, buf, cfg, obs)
            phase.end()
            return obs, loss

        return run

    def by_hand(self, training: Training) -> Function | None:
        model: Any = training.args[0]
        for group in training.args[1].param_groups:
            group["fused"] = True
        model.mean = torch.compile(model.mean, dynamic=False)
        model.critic = torch.compile(model.critic, dynamic=False)
        return iteration

    def overlapped(self) -> Mapping[str, Function]:
        return {
            f"halves, update threads {n}": pipelined(n)
            for n in sorted({1, torch.get_num_threads()})
        }


def pipelined(threads: int) -> Function:
    """H: the shards in two halves, one denoising while the other plays; values in one call."""

    def run(model, optimizer, envs, buf, cfg, obs):  # type: ignore[no-untyped-def]
        torch.set_num_threads(1)
        noise: list[Tensor] = []
        shards = envs.shards()
        rows = [slice(s.offset, s.offset + s.num_envs) for s in shards]
        last = torch.empty_like(obs)

        def act(shard: Any, at: slice, t: int) -> None:
            if len(noise) == t:  # drawn whole and in the loop's order: its numbers
                each = [torch.randn(cfg.num_envs, ENTRIES) for _ in range(cfg.denoise + 1)]
                noise.append(torch.stack(each))
            x = buf.chains[t, 0, at] = noise[t][0, at]
            for k in range(cfg.denoise):
                mean = model.mean(x, buf.obs[t, at], model.times[k].expand(x.shape[0], 8))
                x = mean + cfg.sigma * noise[t][k + 1, at]
                buf.chains[t, k + 1, at], buf.means[t, k, at] = x, mean
            shard.step_async(x.numpy())

        with torch.no_grad():
            buf.obs[0] = obs
            for shard, at in zip(shards, rows, strict=True):
                act(shard, at, 0)
            for t in range(cfg.steps):
                for shard, at in zip(shards, rows, strict=True):
                    seen, reward, terminated, truncated, _ = shard.step_wait()
                    more = t + 1 < cfg.steps
                    (buf.obs[t + 1] if more else last)[at] = torch.from_numpy(np.asarray(seen))
                    if more:
                        act(shard, at, t + 1)
                    buf.rewards[t, at] = torch.from_numpy(np.asarray(reward))
                    buf.dones[t, at] = torch.from_numpy((terminated | truncated).astype(np.float32))
            torch.set_num_threads(threads)
            buf.values[:] = model.critic(buf.obs.flatten(0, 1)).view(buf.values.shape)
        return last, update(model, optimizer, buf, cfg, last)

    return run
