"""Policies that denoise: policy gradients through the denoising chain (after DPPO), and a
vision-language-action model trained by flow matching with a prompt encoder."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
from gymnasium import spaces
from torch import nn

from tests.loops.envs import Reach
from tests.loops.harness import ITERATIONS, Script

# -- policy gradients through the denoising chain --------------------------------------------------


class DiffusionActor(nn.Module):
    """Denoises an action in a few steps; each step is a Gaussian whose log-probability counts."""

    def __init__(self, steps: int = 3) -> None:
        super().__init__()
        self.steps = steps
        self.net = nn.Sequential(nn.Linear(4 + 2 + 1, 12), nn.Mish(), nn.Linear(12, 2))
        betas = torch.linspace(0.1, 0.4, steps)
        self.register_buffer("alphas", torch.cumprod(1 - betas, 0))
        self.register_buffer("sigmas", betas.sqrt().clamp(min=0.1))

    def mean(self, x: torch.Tensor, k: int, cond: torch.Tensor) -> torch.Tensor:
        time = torch.full((x.shape[0], 1), k / self.steps)
        noise = self.net(torch.cat([cond, x, time], -1))
        return (x - (1 - self.alphas[k]).sqrt() * noise) / self.alphas[k].sqrt()

    @torch.no_grad()
    def sample(self, cond: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(cond.shape[0], 2)
        chain = [x]
        for k in reversed(range(self.steps)):
            mean = self.mean(x, k, cond)
            x = (mean + self.sigmas[k] * torch.randn_like(x)).clamp(-3, 3)
            chain.append(x)
        return x.clamp(-1, 1), torch.stack(chain, 1)

    def log_prob(self, cond: torch.Tensor, before: torch.Tensor, after: torch.Tensor, k: int):  # type: ignore[no-untyped-def]
        dist = torch.distributions.Normal(self.mean(before, k, cond), self.sigmas[k])
        return dist.log_prob(after).sum(-1)


class RunningStats:
    """Mean and spread of all observations so far; ``normalize`` does not update."""

    def __init__(self, size: int) -> None:
        self.mean, self.m2, self.count = torch.zeros(size), torch.ones(size), 1.0

    def update(self, batch: torch.Tensor) -> None:
        for row in batch:
            self.count += 1.0
            delta = row - self.mean
            self.mean += delta / self.count
            self.m2 += delta * (row - self.mean)

    def normalize(self, batch: torch.Tensor) -> torch.Tensor:
        return (batch - self.mean) / (self.m2 / self.count).sqrt().clamp(min=1e-3)


def dppo_iteration(cfg, actor, critic, actor_opt, critic_opt, venv, stats, prev_obs, infos_seen):  # type: ignore[no-untyped-def]
    obs_trajs = torch.zeros(cfg.steps, cfg.envs, 4)
    chains_trajs = torch.zeros(cfg.steps, cfg.envs, actor.steps + 1, 2)
    reward_trajs = np.zeros((cfg.steps, cfg.envs))
    terminated_trajs = np.zeros((cfg.steps, cfg.envs))
    for step in range(cfg.steps):
        stats.update(prev_obs)
        cond = stats.normalize(prev_obs)
        action, chain = actor.sample(cond)
        obs, reward, terminated, truncated, info = venv.step(action.numpy())
        obs_trajs[step] = cond
        chains_trajs[step] = chain
        reward_trajs[step] = reward
        terminated_trajs[step] = terminated | truncated
        if "success" in info:
            infos_seen.append(int(np.sum(info["success"])))
        prev_obs = torch.from_numpy(obs)
    with torch.no_grad():
        values = critic(obs_trajs).squeeze(-1).numpy()
        bootstrap = critic(stats.normalize(prev_obs)).squeeze(-1).numpy()
    advantages = np.zeros_like(reward_trajs)
    last = np.zeros(cfg.envs)
    for t in reversed(range(cfg.steps)):
        nextvalues = bootstrap if t == cfg.steps - 1 else values[t + 1]
        alive = 1.0 - terminated_trajs[t]
        delta = reward_trajs[t] * cfg.scale + 0.99 * nextvalues * alive - values[t]
        advantages[t] = last = delta + 0.99 * 0.95 * alive * last
    returns = torch.from_numpy(advantages + values).float().reshape(-1)
    advantages_k = torch.from_numpy(advantages).float().reshape(-1)
    obs_k, chains_k = obs_trajs.flatten(0, 1), chains_trajs.flatten(0, 1)
    old = torch.zeros(len(obs_k), actor.steps)
    with torch.no_grad():
        for j in range(actor.steps):
            k = actor.steps - 1 - j
            old[:, j] = actor.log_prob(obs_k, chains_k[:, j], chains_k[:, j + 1], k)
    flag_break = False
    for _ in range(cfg.epochs):
        order = torch.randperm(len(obs_k) * actor.steps)
        for inds in order.split(cfg.batch):
            batch_inds, denoising_inds = inds // actor.steps, inds % actor.steps
            new = torch.zeros(len(inds))
            for j in range(actor.steps):
                rows = (denoising_inds == j).nonzero().flatten()
                if len(rows) == 0:
                    continue
                b = batch_inds[rows]
                k = actor.steps - 1 - j
                new[rows] = actor.log_prob(obs_k[b], chains_k[b, j], chains_k[b, j + 1], k)
            logratio = new - old[batch_inds, denoising_inds]
            ratio = logratio.exp()
            with torch.no_grad():
                approx_kl = ((ratio - 1) - logratio).mean()
            discount = 0.9 ** (actor.steps - 1 - denoising_inds).float()
            adv = advantages_k[batch_inds] * discount
            pg_loss = torch.max(-adv * ratio, -adv * ratio.clamp(0.9, 1.1)).mean()
            v_loss = F.mse_loss(critic(obs_k[batch_inds]).flatten(), returns[batch_inds])
            actor_opt.zero_grad()
            critic_opt.zero_grad()
            (pg_loss + 0.5 * v_loss).backward()
            actor_opt.step()
            critic_opt.step()
            if cfg.target_kl is not None and approx_kl > cfg.target_kl:
                flag_break = True
                break
        if flag_break:
            break
    return prev_obs, {"kl": approx_kl.item(), "pg": pg_loss.item(), "stopped": flag_break}


def run_dppo(compile: Any, vectorize: Any) -> Any:
    cfg = SimpleNamespace(steps=4, envs=8, epochs=3, batch=24, scale=0.5, target_kl=0.02)
    venv, actor = vectorize([Reach] * cfg.envs), DiffusionActor()
    critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    actor_opt = torch.optim.AdamW(actor.parameters(), lr=2e-2)
    critic_opt = torch.optim.AdamW(critic.parameters(), lr=1e-2)
    stats, seen, results = RunningStats(4), [], []
    obs = torch.from_numpy(venv.reset(seed=4)[0])
    step = compile(dppo_iteration)
    for _ in range(ITERATIONS):
        obs, logs = step(cfg, actor, critic, actor_opt, critic_opt, venv, stats, obs, seen)
        results.append(logs)
    return cfg, venv, actor, critic, actor_opt, critic_opt, stats, seen, results, obs


# -- a vision-language-action model by flow matching -----------------------------------------------


class Tabletop(gym.Env):
    """A camera image of 8x8 pixels and the arm's position; actions move the arm."""

    def __init__(self) -> None:
        self.observation_space = spaces.Dict(
            {
                "image": spaces.Box(0, 255, (8, 8, 3), np.uint8),
                "state": spaces.Box(-np.inf, np.inf, (2,), np.float32),
            }
        )
        self.action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.at = self.np_random.integers(0, 8, size=2).astype(np.float32)
        self.goal = self.np_random.integers(0, 8, size=2)
        self.count = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self.at = np.clip(self.at + np.asarray(action, np.float32), 0, 7)
        self.count += 1
        distance = float(np.abs(self.at - self.goal).sum())
        return self._observe(), -distance, distance < 1.0, self.count >= 6, {}

    def _observe(self) -> dict[str, np.ndarray]:
        image = np.zeros((8, 8, 3), np.uint8)
        image[tuple(self.at.astype(int))] = (255, 0, 0)
        image[tuple(self.goal)] = (0, 255, 0)
        return {"image": image, "state": self.at.copy()}


class VLA(nn.Module):
    """Encodes prompt and image to a prefix; a head integrates a velocity to a chunk of actions."""

    def __init__(self, chunk: int = 2, steps: int = 3, width: int = 12) -> None:
        super().__init__()
        self.chunk, self.num_steps = chunk, steps
        self.embed = nn.Embedding(10, width)
        self.text = nn.TransformerEncoderLayer(width, 2, 16, dropout=0.0, batch_first=True)
        self.vision = nn.Conv2d(3, width, 4, stride=4)
        self.state = nn.Linear(2, width)
        self.expert = nn.Sequential(
            nn.Linear(width + 2 * chunk + 1, 16), nn.GELU(), nn.Linear(16, 2 * chunk)
        )

    def encode_prompt(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.text(self.embed(tokens)).mean(1)

    def encode(self, prompt: torch.Tensor, obs: dict[str, torch.Tensor]) -> torch.Tensor:
        pixels = obs["image"].permute(0, 3, 1, 2).float() / 255.0
        return prompt + self.vision(pixels).mean((2, 3)) + self.state(obs["state"])

    def velocity(self, x: torch.Tensor, t: torch.Tensor, prefix: torch.Tensor) -> torch.Tensor:
        return self.expert(torch.cat([prefix, x, t], -1))

    @torch.no_grad()
    def sample_actions(self, tokens: torch.Tensor, obs: dict[str, torch.Tensor]) -> torch.Tensor:
        prefix = self.encode(self.encode_prompt(tokens), obs)
        x = torch.randn(len(prefix), 2 * self.chunk)
        dt = 1.0 / self.num_steps
        t = 0.0
        while t < 1.0 - dt / 2:
            x = x + dt * self.velocity(x, torch.full((len(x), 1), t), prefix)
            t += dt
        return x.view(-1, self.chunk, 2)

    def forward(self, tokens, obs, actions, noise, time):  # type: ignore[no-untyped-def]
        x_t = (1 - time) * noise + time * actions
        prefix = self.encode(self.encode_prompt(tokens), obs)
        return F.mse_loss(self.velocity(x_t, time, prefix), actions - noise, reduction="none").mean(
            1
        )


def to_tensors(obs: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {k: torch.from_numpy(v) for k, v in obs.items()}


class Episodes:
    """Chunks with the return that followed, best ones first."""

    def __init__(self, keep: int) -> None:
        self.keep = keep
        self.items: list[tuple[float, dict[str, torch.Tensor], torch.Tensor]] = []

    def extend(self, score: torch.Tensor, obs: dict[str, torch.Tensor], act: torch.Tensor) -> None:
        for i in range(len(score)):
            self.items.append((score[i].item(), {k: v[i] for k, v in obs.items()}, act[i]))
        self.items.sort(key=lambda item: -item[0])
        del self.items[self.keep :]

    def batches(self, size: int) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        order = torch.randperm(len(self.items)).tolist()
        for start in range(0, len(order), size):
            picked = [self.items[i] for i in order[start : start + size]]
            obs = {k: torch.stack([p[1][k] for p in picked]) for k in picked[0][1]}
            yield obs, torch.stack([p[2] for p in picked])


def vla_iteration(model, optimizer, scheduler, envs, episodes, tokens, obs, metrics):  # type: ignore[no-untyped-def]
    """Act by chunks, keep the best, imitate them by flow matching."""
    model.eval()
    for _chunk in range(2):
        actions = model.sample_actions(tokens, obs)
        start, score = obs, torch.zeros(len(actions))
        for k in range(model.chunk):
            step_obs, reward, _, _, _ = envs.step(actions[:, k].numpy())
            score += torch.from_numpy(reward).float()
        obs = to_tensors(step_obs)
        episodes.extend(score, start, actions.flatten(1))
    model.train()
    for batch_obs, batch_actions in episodes.batches(4):
        noise = torch.randn_like(batch_actions)
        time = torch.rand(len(batch_actions), 1)
        loss = model(tokens[: len(batch_actions)], batch_obs, batch_actions, noise, time).mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        metrics["loss"].append(loss.item())
        metrics["norm"].append(norm.item())
    scheduler.step()
    return obs


def run_vla(compile: Any, vectorize: Any) -> Any:
    envs, model = vectorize([Tabletop] * 8), VLA()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)
    episodes, tokens = Episodes(12), torch.randint(0, 10, (8, 5))
    obs = to_tensors(envs.reset(seed=6)[0])
    metrics: dict[str, list[float]] = {"loss": [], "norm": []}
    step = compile(vla_iteration)
    for _ in range(ITERATIONS):
        obs = step(model, optimizer, scheduler, envs, episodes, tokens, obs, metrics)
    return envs, model, optimizer, scheduler, episodes, tokens, obs, metrics


SCRIPTS = [
    Script("DPPO, chains of denoising", run_dppo, sharded=True, applied=("late",)),
    Script("flow-matching VLA", run_vla, sharded=True, applied=("late",)),
]
