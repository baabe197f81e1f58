"""Fine-tuning of a policy that denoises chunks of actions, by groups of rollouts compared with each
other, in our own words: a frozen reference, rewards by rule, no critic."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from bench.capture_onpolicy import Log, mlp


class Kitchen:
    """Batched reaching tasks as plain tensors: a group of identical starts for each task."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.hand = torch.zeros(count, 2)
        self.goal = torch.zeros(count, 2)
        self.elapsed = 0

    def reset(self, goal: torch.Tensor) -> torch.Tensor:
        self.goal = goal.clone()
        self.hand = torch.zeros(self.count, 2)
        self.elapsed = 0
        return self.observe()

    def observe(self) -> torch.Tensor:
        return torch.cat([self.hand, self.goal], 1)

    def chunk_step(self, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for k in range(actions.shape[1]):
            self.hand = self.hand + 0.2 * torch.clamp(actions[:, k], -1, 1)
            self.elapsed += 1
        success = (self.hand - self.goal).norm(dim=1) < 0.3
        return self.observe(), success.float()


class DenoisingPolicy(nn.Module):
    """A chunk of actions out of noise, in a few steps; the log-probability of the whole path."""

    def __init__(self, chunk: int = 3, steps: int = 4) -> None:
        super().__init__()
        self.chunk = chunk
        self.denoise_steps = steps
        self.prefix = mlp(4, 32, 32)
        self.velocity = mlp(32 + 2 * chunk + 1, 64, 2 * chunk)
        self.log_std = nn.Parameter(torch.full((1,), -1.0))

    def encode(self, obs: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.prefix(obs))

    def mean_of(self, x: torch.Tensor, context: torch.Tensor, k: int) -> torch.Tensor:
        time = torch.full((len(x), 1), k / self.denoise_steps)
        flow = self.velocity(torch.cat([x, context, time], 1))
        return x + flow / self.denoise_steps

    def sample(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        context = self.encode(obs)
        x = torch.randn(len(obs), 2 * self.chunk)
        path = torch.zeros(self.denoise_steps + 1, len(obs), 2 * self.chunk)
        path[0] = x
        for k in range(self.denoise_steps):
            mean = self.mean_of(x, context, k)
            x = mean + self.log_std.exp() * torch.randn_like(x)
            path[k + 1] = x
        return x.view(-1, self.chunk, 2), path

    def log_prob(self, obs: torch.Tensor, path: torch.Tensor) -> torch.Tensor:
        context = self.encode(obs)
        total = torch.zeros(len(obs))
        for k in range(self.denoise_steps):
            mean = self.mean_of(path[k], context, k)
            gap = (path[k + 1] - mean) / self.log_std.exp()
            total = total - 0.5 * gap.square().sum(1) - gap.shape[1] * self.log_std.sum()
        return total


class Prompts:
    """Tasks to draw from."""

    def __init__(self, groups: int, size: int) -> None:
        self.groups, self.size = groups, size
        self.generator = torch.Generator().manual_seed(0)

    def draw(self) -> torch.Tensor:
        goals = torch.rand(self.groups, 2, generator=self.generator) * 2 - 1
        return goals.repeat_interleave(self.size, 0)


def reward_of(success: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
    return success - 0.01 * length


def grpo(cfg, policy, reference, optimizer, env, prompts, log):  # type: ignore[no-untyped-def]
    goals = prompts.draw()
    for it in range(cfg.iterations):
        shape = (cfg.chunks, env.count)
        observations = torch.zeros(*shape, 4)
        paths = torch.zeros(cfg.chunks, policy.denoise_steps + 1, env.count, 2 * policy.chunk)
        old_log_probs = torch.zeros(shape)
        success = torch.zeros(env.count)
        length = torch.zeros(env.count)
        with torch.no_grad():
            obs = env.reset(goals)
            for c in range(cfg.chunks):
                actions, path = policy.sample(obs)
                observations[c] = obs
                paths[c] = path
                old_log_probs[c] = policy.log_prob(obs, path)
                obs, done = env.chunk_step(actions)
                length += (success == 0).float()
                success = torch.maximum(success, done)
            reference_log_probs = torch.zeros(shape)
            for c in range(cfg.chunks):
                reference_log_probs[c] = reference.log_prob(observations[c], paths[c])
            rewards = reward_of(success, length)
            grouped = rewards.view(-1, prompts.size)
            advantages = (grouped - grouped.mean(1, keepdim=True)) / (
                grouped.std(1, keepdim=True) + 1e-6
            )
            advantages = advantages.view(-1)
        next_goals = prompts.draw()
        for _ in range(cfg.epochs):
            for c in range(cfg.chunks):
                log_probs = policy.log_prob(observations[c], paths[c])
                ratio = (log_probs - old_log_probs[c]).clamp(-5, 5).exp()
                surrogate = torch.min(
                    ratio * advantages, ratio.clamp(1 - cfg.clip, 1 + cfg.clip) * advantages
                )
                drift = reference_log_probs[c] - log_probs
                kl = drift.clamp(-5, 5).exp() - drift - 1
                loss = (-surrogate + cfg.beta * kl).mean() / cfg.chunks
                loss.backward()
            grad_norm = nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        log.add_scalar("reward", rewards.mean().item(), it)
        log.add_scalar("success", success.mean().item(), it)
        log.add_scalar("grad_norm", grad_norm.item(), it)
        goals = next_goals


def make_grpo() -> tuple[Any, ...]:
    torch.manual_seed(0)
    policy, reference = DenoisingPolicy(), DenoisingPolicy()
    reference.load_state_dict(policy.state_dict())
    reference.requires_grad_(False)
    cfg = SimpleNamespace(iterations=2, chunks=4, epochs=2, clip=0.2, beta=0.01)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    return cfg, policy, reference, optimizer, Kitchen(12), Prompts(3, 4), Log()
