"""PPO on HalfCheetah: the four shapes of `bench.ppo_mujoco`, and one with unequal environments."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bench.handwritten import Clock, Overlap, overlapped, sequential
from bench.handwritten_update import lean_gae
from bench.loops import SHAPES, Agent, Buffers, Config, Setup, iteration, make
from bench.workloads.base import Function, Size, Training, Workload
from bench.workloads.unequal import make_random_env
from rose_compiler.sim import ShardedEnv

TINY = Config(
    num_envs=4, num_steps=8, hidden=16, layers=2, epochs=2, minibatches=2, shards=2, hosts="inline"
)


class PPO(Workload):
    """One shape of PPO on HalfCheetah."""

    chain = ("act", "wait")
    tail = ("gae", "update")

    def __init__(self, name: str, about: str, cfg: Config) -> None:
        self.name, self.about = name, about
        # no early stop: every iteration is to hold the same work
        self.cfg = replace(cfg, target_kl=math.inf)

    def make(self, size: Size = Size(), seed: int = 1) -> Training:  # noqa: B008
        return self.of(self.setup(self.sized(size), seed))

    def sized(self, size: Size) -> Config:
        """The configuration in another size."""
        if size.tiny:
            return replace(TINY, simulator=self.cfg.simulator, target_kl=math.inf)
        if size.part:
            # what the largest shard alone has to do, in one place
            envs = -(-self.cfg.num_envs // self.cfg.shards)
            return replace(self.cfg, num_envs=envs, shards=1, hosts="inline", epochs=0)
        return replace(self.cfg, shards=1, hosts="inline") if size.one_core else self.cfg

    def setup(self, cfg: Config, seed: int, **options: Any) -> Setup:
        """Agent, simulator and buffers."""
        return make(cfg, seed, **options)

    def of(self, s: Setup) -> Training:
        """A set-up as a training."""
        args = [s.agent, s.optimizer, s.envs, s.buf, s.cfg, s.log, s.next_obs, s.next_done]
        return Training(iteration, args, (6, 7), [s.close])

    def sequential(self, rollout: int, update: int, clock: Clock | None = None) -> Function:
        return sequential(rollout, update)

    def timed(self, threads: int, clock: Clock) -> Function:
        return overlapped(Overlap(1, update_threads=threads), clock)

    def simulators(self) -> Mapping[str, Callable[[], Training]]:
        if self.cfg.simulator != "envpool":
            return {}
        return {
            "one pool of 2 threads": lambda: self.of(self.setup(self.cfg, 1, shards=1, threads=2))
        }

    def by_hand(self, training: Training) -> Function | None:
        for group in training.args[1].param_groups:
            group["fused"] = True
        return compiled_by_hand(training.args[0])

    def overlapped(self) -> Mapping[str, Function]:
        hows = [
            Overlap(min(2, self.cfg.shards), values, 1, threads)
            for values in ("deferred", "shadow")
            for threads in sorted({1, torch.get_num_threads()})
        ]
        return {
            f"{h.values} values, update threads {h.update_threads}": overlapped(h) for h in hows
        }


def compiled_by_hand(agent: Agent) -> Function:
    """C: acting and the loss of a minibatch through `torch.compile`, advantages in few calls."""

    @torch.compile(dynamic=False)
    def act(obs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean = agent.actor_mean(obs)
        noise = torch.randn_like(mean)
        action = mean + agent.actor_logstd.exp() * noise
        norm = (agent.actor_logstd + 0.5 * math.log(2 * math.pi)).sum()
        return action, -0.5 * noise.pow(2).sum(1) - norm, agent.critic(obs).flatten()

    @torch.compile(dynamic=False)
    def loss_of(
        obs: Tensor, act: Tensor, old: Tensor, adv: Tensor, ret: Tensor, clip: float, vf_coef: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        logstd = agent.actor_logstd
        z = (act - agent.actor_mean(obs)) * torch.exp(-logstd)
        logprob = (-0.5 * z * z - logstd - 0.5 * math.log(2 * math.pi)).sum(1)
        logratio = logprob - old
        ratio = logratio.exp()
        kl = ((ratio - 1) - logratio).mean().detach()
        adv = (adv - adv.mean()) / (adv.std() + 1e-8)
        pg_loss = torch.max(-adv * ratio, -adv * ratio.clamp(1 - clip, 1 + clip)).mean()
        v_loss = 0.5 * (agent.critic(obs).view(-1) - ret).pow(2).mean()
        return pg_loss + vf_coef * v_loss, pg_loss.detach(), v_loss.detach(), kl

    def run(
        agent: Agent,
        optimizer: torch.optim.Optimizer,
        envs: Any,
        buf: Buffers,
        cfg: Config,
        log: list[float],
        next_obs: Tensor,
        next_done: Tensor,
    ) -> tuple[Tensor, Tensor, dict[str, float]]:
        with torch.no_grad():
            for t in range(cfg.num_steps):
                buf.obs[t], buf.dones[t] = next_obs, next_done
                action, buf.logprobs[t], buf.values[t] = act(next_obs)
                buf.actions[t] = action
                obs, reward, terminated, truncated, infos = envs.step(action.numpy())
                buf.rewards[t] = torch.from_numpy(np.asarray(reward))
                next_obs = torch.as_tensor(obs, dtype=torch.float32)
                next_done = torch.from_numpy((terminated | truncated).astype(np.float32))
                if "episode" in infos:
                    for i in np.flatnonzero(infos["_episode"]):
                        log.append(float(infos["episode"]["r"][i]))
        advantages, returns = lean_gae(agent, buf, cfg, next_obs, next_done)
        data = (
            *(buf.obs.reshape(cfg.batch, -1), buf.actions.reshape(cfg.batch, -1)),
            *(buf.logprobs.reshape(-1), advantages.reshape(-1), returns.reshape(-1)),
        )
        size = cfg.batch // cfg.minibatches
        for _epoch in range(cfg.epochs):
            order = torch.randperm(cfg.batch)
            for start in range(0, cfg.batch, size):
                rows = order[start : start + size]
                loss, pg_loss, v_loss, kl = loss_of(*(x[rows] for x in data), cfg.clip, cfg.vf_coef)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), cfg.max_grad_norm)
                optimizer.step()
        stats = {"kl": kl.item(), "pg_loss": pg_loss.item(), "v_loss": v_loss.item()}
        return next_obs, next_done, stats

    return run


class RandomizedPPO(PPO):
    """PPO over environments that differ in their physics and in what a step costs."""

    def setup(self, cfg: Config, seed: int, **options: Any) -> Setup:
        envs = ShardedEnv.split(
            [partial(make_random_env, 100 * seed + i) for i in range(cfg.num_envs)],
            shards=cfg.shards,
            hosts=cfg.hosts,
        )
        return make(cfg, seed, envs=envs)


RANDOMIZED = replace(SHAPES["c"], num_steps=48)

SHAPES_ABOUT = {
    "a": "1 gymnasium environment, MLP 2x64",
    "b": "EnvPool, 64 environments, MLP 3x512",
    "c": "32 gymnasium environments, MLP 2x256",
    "d": "64 gymnasium environments, MLP 3x512",
}


def workloads() -> list[Workload]:
    """The rows of this module."""
    return [
        *(PPO(f"ppo-{k}", f"PPO, {SHAPES_ABOUT[k]}", cfg) for k, cfg in SHAPES.items()),
        RandomizedPPO(
            "ppo-random", "PPO, 32 unequal, randomized environments, MLP 2x256", RANDOMIZED
        ),
    ]
