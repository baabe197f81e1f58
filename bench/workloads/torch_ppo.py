"""PPO on a simulator that is tensor code itself: one device, one program, no conversion."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from bench.handwritten import Clock
from bench.loops import Agent, Buffers, Config
from bench.workloads.base import Function, Size, Threads, Training, Workload
from rose_compiler.sim.torch_envs import TorchPendulum

CONFIG = Config(
    num_envs=512, num_steps=64, hidden=64, layers=2, epochs=2, minibatches=4, shards=1,
    target_kl=math.inf,
)  # fmt: skip


def collect(
    agent: Agent, envs: Any, buf: Buffers, cfg: Config, obs: Tensor, done: Tensor
) -> tuple[Tensor, Tensor]:
    """Fill the buffers."""
    for t in range(cfg.num_steps):
        buf.obs[t] = obs
        buf.dones[t] = done
        with torch.no_grad():
            action, logprob, _, value = agent.get_action_and_value(obs)
        buf.actions[t] = action
        buf.logprobs[t] = logprob
        buf.values[t] = value.flatten()
        obs, reward, terminated, truncated, _infos = envs.step(action)
        buf.rewards[t] = reward
        done = (terminated | truncated).float()
    return obs, done


def update(
    agent: Agent,
    optimizer: torch.optim.Optimizer,
    buf: Buffers,
    cfg: Config,
    obs: Tensor,
    done: Tensor,
) -> float:
    """Advantages, then epochs of minibatches."""
    with torch.no_grad():
        following = agent.get_value(obs).flatten()
        advantages = torch.zeros_like(buf.rewards)
        last = torch.zeros(cfg.num_envs)
        alive = 1.0 - done
        for t in reversed(range(cfg.num_steps)):
            delta = buf.rewards[t] + cfg.gamma * following * alive - buf.values[t]
            last = delta + cfg.gamma * cfg.gae_lambda * alive * last
            advantages[t] = last
            following = buf.values[t]
            alive = 1.0 - buf.dones[t]
        returns = advantages + buf.values
    b_obs, b_actions = buf.obs.flatten(0, 1), buf.actions.flatten(0, 1)
    b_logprobs, b_advantages, b_returns = (
        buf.logprobs.flatten(),
        advantages.flatten(),
        returns.flatten(),
    )
    size = cfg.batch // cfg.minibatches
    for _epoch in range(cfg.epochs):
        order = torch.randperm(cfg.batch)
        for start in range(0, cfg.batch, size):
            rows = order[start : start + size]
            _, logprob, entropy, value = agent.get_action_and_value(b_obs[rows], b_actions[rows])
            ratio = (logprob - b_logprobs[rows]).exp()
            adv = b_advantages[rows]
            adv = (adv - adv.mean()) / (adv.std() + 1e-8)
            clipped = torch.clamp(ratio, 1 - cfg.clip, 1 + cfg.clip)
            pg_loss = torch.max(-adv * ratio, -adv * clipped).mean()
            v_loss = 0.5 * (value.view(-1) - b_returns[rows]).pow(2).mean()
            loss = pg_loss + cfg.vf_coef * v_loss - cfg.ent_coef * entropy.mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), cfg.max_grad_norm)
            optimizer.step()
    return float(v_loss.item())


def iteration(
    agent: Agent,
    optimizer: torch.optim.Optimizer,
    envs: Any,
    buf: Buffers,
    cfg: Config,
    obs: Tensor,
    done: Tensor,
) -> tuple[Tensor, Tensor, float]:
    """One iteration of PPO."""
    obs, done = collect(agent, envs, buf, cfg, obs, done)
    v_loss = update(agent, optimizer, buf, cfg, obs, done)
    return obs, done, v_loss


class TorchPPO(Workload):
    """The row."""

    name = "ppo-torch"
    about = "PPO, 512 pendulums as tensor code, 64 steps, MLP 2x64"

    def make(self, size: Size = Size(), seed: int = 1) -> Training:  # noqa: B008
        cfg = replace(CONFIG, num_envs=8, num_steps=8, hidden=16) if size.tiny else CONFIG
        generator = torch.Generator().manual_seed(seed)
        envs = TorchPendulum(cfg.num_envs, generator=generator)
        torch.manual_seed(seed)
        agent = Agent(envs.obs_dim, envs.act_dim, cfg.hidden, cfg.layers)
        optimizer = torch.optim.Adam(agent.parameters(), lr=cfg.lr)
        obs, _ = envs.reset(seed=seed)
        buf = Buffers(cfg, envs.obs_dim, envs.act_dim)
        args = [agent, optimizer, envs, buf, cfg, obs, torch.zeros(cfg.num_envs)]
        return Training(iteration, args, (5, 6))

    def sequential(self, rollout: int, update_: int, clock: Clock | None = None) -> Function:
        phase = Threads(rollout, update_, clock)

        def run(agent, optimizer, envs, buf, cfg, obs, done):  # type: ignore[no-untyped-def]
            phase.start()
            obs, done = collect(agent, envs, buf, cfg, obs, done)
            phase.update()
            v_loss = update(agent, optimizer, buf, cfg, obs, done)
            phase.end()
            return obs, done, v_loss

        return run

    def by_hand(self, training: Training) -> Function | None:
        from bench.workloads.torch_hand import compiled_by_hand

        for group in training.args[1].param_groups:
            group["fused"] = True
        return compiled_by_hand(training.args[0], training.args[2])

    def overlapped(self) -> Mapping[str, Function]:
        return {}
