"""GRPO of a small vision-language-action policy on frames of the table scene: groups of rollouts
with one start and one instruction, compared with each other; a frozen reference; no critic."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bench.handwritten import Clock
from bench.workloads.base import Function, Size, Threads, Training, Workload
from bench.workloads.scene import PROMPT, Table, environment, prompt_of, source
from bench.workloads.vla import MiniVLA, VLAConfig
from rose_compiler.sim import ShardedEnv


@dataclass(frozen=True)
class GRPOConfig:
    """`groups` of `size` rollouts of `chunks` action chunks each; `epochs` over them."""

    groups: int = 2
    size: int = 4
    chunks: int = 3
    epochs: int = 1
    clip: float = 0.2
    beta: float = 0.02
    lr: float = 1e-4
    policy: VLAConfig = field(default_factory=VLAConfig)

    @property
    def count(self) -> int:
        """Environments."""
        return self.groups * self.size


class Tasks:
    """Seeds of tables: one for each group, handed to all its rollouts."""

    def __init__(self, groups: int, size: int, seed: int) -> None:
        self.groups, self.size = groups, size
        self.rng = np.random.default_rng(seed)

    def draw(self) -> list[int]:
        """A seed for each environment."""
        return [
            int(s) for s in self.rng.integers(1 << 20, size=self.groups) for _ in range(self.size)
        ]


class Rollouts:
    """What a rollout leaves for the update, chunks first."""

    def __init__(self, cfg: GRPOConfig) -> None:
        shape, p = (cfg.chunks, cfg.count), cfg.policy
        self.frames = torch.zeros(*shape, p.frame, p.frame, 3, dtype=torch.uint8)
        self.joints = torch.zeros(*shape, p.joints)
        self.tokens = torch.zeros(cfg.count, PROMPT, dtype=torch.int64)
        self.paths = torch.zeros(*shape, p.flow_steps + 1, p.action)
        self.old = torch.zeros(shape)
        self.reference = torch.zeros(shape)
        self.rewards = torch.zeros(shape)


def collect(policy: MiniVLA, envs: Any, tasks: Tasks, buf: Rollouts, cfg: GRPOConfig) -> None:
    """Play every task to its end."""
    seeds = tasks.draw()
    obs, _ = envs.reset(seed=seeds)
    buf.tokens[:] = torch.tensor([prompt_of(s) for s in seeds])
    for c in range(cfg.chunks):
        frame = torch.as_tensor(obs["frame"])
        joints = torch.as_tensor(obs["joints"])
        with torch.no_grad():
            action, path, log_prob = policy.sample(frame, joints, buf.tokens)
        buf.frames[c] = frame
        buf.joints[c] = joints
        buf.paths[c] = path
        buf.old[c] = log_prob
        obs, reward, _terminated, _truncated, _infos = envs.step(action.numpy())
        buf.rewards[c] = torch.as_tensor(reward, dtype=torch.float32)


def update(
    policy: MiniVLA,
    reference: MiniVLA,
    optimizer: torch.optim.Optimizer,
    buf: Rollouts,
    cfg: GRPOConfig,
    log: list[dict[str, float]],
) -> None:
    """Compare the rollouts of a group, and follow the better ones."""
    with torch.no_grad():
        for c in range(cfg.chunks):
            buf.reference[c] = reference.log_prob(
                buf.frames[c], buf.joints[c], buf.tokens, buf.paths[c]
            )
    returns = buf.rewards.sum(0).view(cfg.groups, cfg.size)
    spread = returns.std(1, keepdim=True) + 1e-4
    advantages = ((returns - returns.mean(1, keepdim=True)) / spread).view(-1)
    for _epoch in range(cfg.epochs):
        for c in range(cfg.chunks):
            log_prob = policy.log_prob(buf.frames[c], buf.joints[c], buf.tokens, buf.paths[c])
            ratio = (log_prob - buf.old[c]).clamp(-5, 5).exp()
            surrogate = torch.min(
                ratio * advantages, ratio.clamp(1 - cfg.clip, 1 + cfg.clip) * advantages
            )
            drift = (buf.reference[c] - log_prob).clamp(-5, 5)
            loss = (cfg.beta * (drift.exp() - drift - 1) - surrogate).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
    log.append({"return": returns.mean().item(), "loss": loss.item()})


def iteration(
    policy: MiniVLA,
    reference: MiniVLA,
    optimizer: torch.optim.Optimizer,
    envs: Any,
    tasks: Tasks,
    buf: Rollouts,
    cfg: GRPOConfig,
    log: list[dict[str, float]],
) -> None:
    """One iteration of GRPO."""
    collect(policy, envs, tasks, buf, cfg)
    update(policy, reference, optimizer, buf, cfg, log)


def pipelined(threads: int) -> Function:
    """H: the shards in two halves, one acting while the other plays; instructions are encoded once,
    the reference looks at all chunks in one call."""

    def run(
        policy: MiniVLA,
        reference: MiniVLA,
        optimizer: torch.optim.Optimizer,
        envs: Any,
        tasks: Tasks,
        buf: Rollouts,
        cfg: GRPOConfig,
        log: list[dict[str, float]],
    ) -> None:
        torch.set_num_threads(1)
        with torch.no_grad():
            _halves(policy, envs, tasks, buf, cfg)
            torch.set_num_threads(threads)
            flat = cfg.chunks * cfg.count
            buf.reference[:] = reference.log_prob(
                buf.frames.flatten(0, 1),
                buf.joints.flatten(0, 1),
                buf.tokens.repeat(cfg.chunks, 1),
                buf.paths.flatten(0, 1),
            ).view(cfg.chunks, -1)
            assert flat == buf.reference.numel()
        _learn(policy, optimizer, buf, cfg, log)

    return run


def _halves(policy: MiniVLA, envs: Any, tasks: Tasks, buf: Rollouts, cfg: GRPOConfig) -> None:
    seeds = tasks.draw()
    obs, _ = envs.reset(seed=seeds)
    buf.tokens[:] = torch.tensor([prompt_of(s) for s in seeds])
    prompt = policy.prompt_encoder(buf.tokens)
    steps, sigma = cfg.policy.flow_steps, cfg.policy.sigma
    noise: list[Tensor] = []
    rows = [slice(s.offset, s.offset + s.num_envs) for s in envs.shards()]

    def act(shard: Any, at: slice, c: int, frame: Any, joints: Any) -> None:
        if len(noise) == c:  # drawn whole and in the loop's order: its numbers
            noise.append(
                torch.stack([torch.randn(cfg.count, cfg.policy.action) for _ in range(steps + 1)])
            )
        buf.frames[c, at] = torch.as_tensor(frame)
        buf.joints[c, at] = torch.as_tensor(joints)
        context = policy.vision(buf.frames[c, at], buf.joints[c, at], prompt[at])
        x = buf.paths[c, at, 0] = noise[c][0, at]
        for k in range(steps):
            x = policy.mean_of(x, context, k) + sigma * noise[c][k + 1, at]
            buf.paths[c, at, k + 1] = x
        shard.step_async(x.numpy())

    for shard, at in zip(envs.shards(), rows, strict=True):
        act(shard, at, 0, obs["frame"][at], obs["joints"][at])
    for c in range(cfg.chunks):
        for shard, at in zip(envs.shards(), rows, strict=True):
            obs, reward, *_ = shard.step_wait()
            if c + 1 < cfg.chunks:
                act(shard, at, c + 1, obs["frame"], obs["joints"])
            buf.rewards[c, at] = torch.as_tensor(reward, dtype=torch.float32)
    drawn = torch.stack(noise)[:, 1:]  # chunks, steps, rows, action
    buf.old[:] = (
        policy.density(drawn.transpose(1, 2).flatten(0, 2).view(-1, cfg.policy.action))
        .view(cfg.chunks, cfg.count, steps)
        .sum(2)
    )


def _learn(
    policy: MiniVLA,
    optimizer: torch.optim.Optimizer,
    buf: Rollouts,
    cfg: GRPOConfig,
    log: list[dict[str, float]],
) -> None:
    returns = buf.rewards.sum(0).view(cfg.groups, cfg.size)
    spread = returns.std(1, keepdim=True) + 1e-4
    advantages = ((returns - returns.mean(1, keepdim=True)) / spread).view(-1)
    params = list(policy.parameters())
    for _epoch in range(cfg.epochs):
        for c in range(cfg.chunks):
            log_prob = policy.log_prob(buf.frames[c], buf.joints[c], buf.tokens, buf.paths[c])
            ratio = (log_prob - buf.old[c]).clamp(-5, 5).exp()
            clipped = ratio.clamp(1 - cfg.clip, 1 + cfg.clip)
            surrogate = torch.min(ratio * advantages, clipped * advantages)
            drift = (buf.reference[c] - log_prob).clamp(-5, 5)
            loss = (cfg.beta * (drift.exp() - drift - 1) - surrogate).mean()
            for p, g in zip(params, torch.autograd.grad(loss, params), strict=True):
                p.grad = g
            nn.utils.clip_grad_norm_(params, 1.0)
            optimizer.step()
    log.append({"return": returns.mean().item(), "loss": loss.item()})


class GRPO(Workload):
    """The row."""

    name = "grpo"
    about = (
        "GRPO, mini-VLA (ViT of 5M parameters, flow of 4 steps) on 84x84 frames of the table scene"
    )

    def config(self, size: Size) -> GRPOConfig:
        """Sizes; the largest shard alone holds half of the rollouts."""
        cfg = GRPOConfig()
        if size.tiny:
            small = VLAConfig(width=24, depth=1, heads=2, patch=28, flow_steps=2)
            cfg = replace(cfg, groups=2, size=2, chunks=2, policy=small)
        return replace(cfg, groups=cfg.groups // 2) if size.part else cfg

    def make(self, size: Size = Size(), seed: int = 1) -> Training:  # noqa: B008
        cfg = self.config(size)
        inline = size.tiny or size.one_core or size.part
        # a tiny one runs in the test's own process, which may have loaded MuJoCo without a GL
        frames = "raster" if size.tiny else source()
        if inline:
            os.environ.update(environment() if not size.tiny else {})
        shards = 1 if size.part else 2
        envs = ShardedEnv.split(
            [partial(Table, frames)] * cfg.count,
            shards=shards,
            hosts="inline" if inline else "process",
            **({} if inline else {"environment": environment()}),
        )
        torch.manual_seed(seed)
        policy, reference = MiniVLA(cfg.policy), MiniVLA(cfg.policy)
        reference.load_state_dict(policy.state_dict())
        reference.requires_grad_(False)
        optimizer = torch.optim.AdamW(policy.parameters(), lr=cfg.lr)
        tasks = Tasks(cfg.groups, cfg.size, seed)
        args = [policy, reference, optimizer, envs, tasks, Rollouts(cfg), cfg, []]
        return Training(iteration, args, (), [envs.close])

    def sequential(self, rollout: int, update_: int, clock: Clock | None = None) -> Function:
        phase = Threads(rollout, update_, clock)

        def run(policy, reference, optimizer, envs, tasks, buf, cfg, log):  # type: ignore[no-untyped-def]
            phase.start()
            collect(policy, envs, tasks, buf, cfg)
            phase.update()
            update(policy, reference, optimizer, buf, cfg, log)
            phase.end()

        return run

    def by_hand(self, training: Training) -> Function | None:
        policy, reference, optimizer = training.args[:3]
        for model in (policy, reference):
            model.sample = torch.compile(model.sample)
            model.log_prob = torch.compile(model.log_prob)
        for group in optimizer.param_groups:
            group["fused"] = True
        return iteration

    def overlapped(self) -> Mapping[str, Function]:
        return {
            f"halves, update threads {n}": pipelined(n)
            for n in sorted({1, torch.get_num_threads()})
        }
