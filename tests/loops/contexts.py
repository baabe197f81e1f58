"""Loops around language: minibatches from a generator with an early stop over two levels, mixed
contexts, a simulator of torch tensors, retries until a batch is full, evaluation on a copy."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Normal

from rose_compiler.sim import TorchPendulum
from tests.loops.envs import Reach
from tests.loops.harness import ITERATIONS, Script


class ActorCritic(nn.Module):
    def __init__(self, observations: int, actions: int, width: int = 8) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(observations, width), nn.Tanh())
        self.pi, self.v = nn.Linear(width, actions), nn.Linear(width, 1)
        self.log_std = nn.Parameter(torch.zeros(actions))

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.trunk(obs)
        return self.pi(x), self.v(x).squeeze(-1)


# -- minibatches from a generator ------------------------------------------------------------------


class Storage:
    """Lists that grow in a rollout; a generator hands out minibatches of what they hold."""

    def __init__(self) -> None:
        self.fields: dict[str, list[torch.Tensor]] = {}

    def put(self, **step: torch.Tensor) -> None:
        for name, value in step.items():
            self.fields.setdefault(name, []).append(value)

    def flat(self) -> dict[str, torch.Tensor]:
        return {name: torch.cat(values) for name, values in self.fields.items()}

    def minibatches(self, extra: dict[str, torch.Tensor], count: int) -> Iterator[Any]:
        data = {**self.flat(), **extra}
        total = len(next(iter(data.values())))
        for rows in np.array_split(np.random.permutation(total), count):  # noqa: NPY002
            yield SimpleNamespace(**{name: value[rows] for name, value in data.items()})


def generator_iteration(model, optimizer, envs, obs, limits, events):  # type: ignore[no-untyped-def]
    storage = Storage()
    rewards, masks = [], []
    for _ in range(4):
        with torch.no_grad():
            mean, value = model(obs)
            dist = Normal(mean, model.log_std.exp())
            action = dist.sample()
        storage.put(obs=obs, act=action, logp=dist.log_prob(action).sum(-1), value=value)
        next_obs, reward, terminated, truncated, _ = envs.step(action.clamp(-1, 1).numpy())
        rewards.append(torch.from_numpy(reward).float())
        masks.append(torch.from_numpy(~(terminated | truncated)).float())
        obs = torch.from_numpy(next_obs)
    with torch.no_grad():
        running = model(obs)[1]
    returns: list[torch.Tensor] = []
    for reward, mask in zip(reversed(rewards), reversed(masks), strict=True):
        running = reward + 0.95 * mask * running
        returns.insert(0, running)
    flat_returns = torch.cat(returns)
    advantages = flat_returns - storage.flat()["value"]
    stop = False
    for epoch in range(3):
        for number, mb in enumerate(
            storage.minibatches({"ret": flat_returns, "adv": advantages}, 2)
        ):
            mean, value = model(mb.obs)
            logp = Normal(mean, model.log_std.exp()).log_prob(mb.act).sum(-1)
            kl = (mb.logp - logp).mean()
            if kl.abs() > limits["kl"]:
                stop = True
                break
            ratio = (logp - mb.logp).exp()
            loss = -(ratio * mb.adv).mean() + 0.5 * F.mse_loss(value, mb.ret)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            last = (epoch, number, loss.item())
        else:
            events.append(("epoch done", epoch))
            continue
        if stop:
            events.append(("stopped", epoch))
            break
    return obs, last


def run_generators(compile: Any, vectorize: Any) -> Any:
    envs, model = vectorize([Reach] * 8), ActorCritic(4, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
    obs, limits = torch.from_numpy(envs.reset(seed=23)[0]), {"kl": 0.2}
    events: list[Any] = []
    step, results = compile(generator_iteration), []
    for _ in range(ITERATIONS):
        obs, last = step(model, optimizer, envs, obs, limits, events)
        results.append(last)
    assert {"stopped", "epoch done"} <= {e[0] for e in events}, events
    return model, optimizer, envs, obs, limits, events, results


# -- contexts in contexts --------------------------------------------------------------------------


class EMA:
    """Swaps averaged weights in for the duration of a block."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.module, self.decay = module, decay
        self.shadow = {k: v.clone() for k, v in module.state_dict().items()}

    @torch.no_grad()
    def update(self) -> None:
        for name, value in self.module.state_dict().items():
            self.shadow[name].mul_(self.decay).add_(value, alpha=1 - self.decay)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        kept = {k: v.clone() for k, v in self.module.state_dict().items()}
        self.module.load_state_dict(self.shadow)
        try:
            yield
        finally:
            self.module.load_state_dict(kept)


def mixed(cfg, model, ema, optimizer, scaler, envs, eval_env, obs, seen):  # type: ignore[no-untyped-def]
    stored_obs = torch.empty(cfg.steps, cfg.envs, 4)
    stored_act = torch.empty(cfg.steps, cfg.envs, 2)
    stored_rew = torch.empty(cfg.steps, cfg.envs)
    with torch.inference_mode():
        for t in range(cfg.steps):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                mean, _ = model(obs)
            action = mean.float() + torch.randn(cfg.envs, 2)
            stored_obs[t], stored_act[t] = obs, action
            next_obs, reward, _, _, _ = envs.step(action.numpy())
            stored_rew[t] = torch.from_numpy(reward)
            obs = torch.from_numpy(next_obs)
    gain = stored_rew - stored_rew.mean()
    optimizer.zero_grad()
    for t in range(cfg.steps):  # gradients add up over the steps
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=cfg.amp):
            mean, value = model(stored_obs[t])
            with torch.autocast("cpu", enabled=False):
                logp = Normal(mean.float(), model.log_std.exp()).log_prob(stored_act[t]).sum(-1)
            loss = -(logp * gain[t]).mean() + F.mse_loss(value.float(), stored_rew[t])
        scaler.scale(loss / cfg.steps).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    ema.update()
    with ema.applied(), torch.no_grad():
        model.eval()
        observation, _ = eval_env.reset(seed=1)
        total = 0.0
        for _ in range(3):
            with torch.set_grad_enabled(False):
                action, _ = model(torch.from_numpy(observation))
            observation, reward, _, _, _ = eval_env.step(action.numpy())
            total += reward
        model.train()
    seen.append((loss.item(), total, torch.is_grad_enabled()))
    return obs


def run_contexts(compile: Any, vectorize: Any) -> Any:
    cfg = SimpleNamespace(steps=3, envs=8, amp=True)
    envs, eval_env, model = vectorize([Reach] * 8), Reach(), ActorCritic(4, 2)
    ema = EMA(model, 0.9)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, nesterov=True, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    obs, seen = torch.from_numpy(envs.reset(seed=29)[0]), []
    step = compile(mixed)
    for _ in range(ITERATIONS):
        obs = step(cfg, model, ema, optimizer, scaler, envs, eval_env, obs, seen)
    return cfg, model, ema, optimizer, envs, eval_env, obs, seen


# -- a simulator of tensors ------------------------------------------------------------------------


class FastTrainer:
    """Everything stays in tensors: simulator, replay ring, noise of each environment."""

    def __init__(self, envs: int) -> None:
        self.sim = TorchPendulum(envs, limit=6, generator=torch.Generator().manual_seed(5))
        self.actor = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1), nn.Tanh())
        self.critic = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        self.target = copy.deepcopy(self.critic)
        self.actor_opt = torch.optim.AdamW(self.actor.parameters(), lr=1e-2)
        self.critic_opt = torch.optim.AdamW(self.critic.parameters(), lr=1e-2)
        self.ring = {
            "obs": torch.zeros(8, envs, 3),
            "act": torch.zeros(8, envs, 1),
            "rew": torch.zeros(8, envs),
            "next": torch.zeros(8, envs, 3),
            "cut": torch.zeros(8, envs, dtype=torch.bool),
        }
        self.ptr = 0
        self.noise = torch.linspace(0.05, 0.4, envs).unsqueeze(1)
        self.obs, _ = self.sim.reset()
        self.metrics: list[torch.Tensor] = []

    def step(self) -> None:
        with torch.no_grad():
            action = self.actor(self.obs) + self.noise * torch.randn_like(self.noise)
        next_obs, reward, terminated, truncated, infos = self.sim.step(action)
        true_next = torch.where(truncated[:, None], infos["final_obs"], next_obs)
        slot = self.ptr % 8
        for name, value in (
            ("obs", self.obs),
            ("act", action),
            ("rew", reward),
            ("next", true_next),
            ("cut", terminated),
        ):
            self.ring[name][slot] = value
        self.ptr += 1
        self.obs = next_obs

    def learn(self) -> torch.Tensor:
        rows = torch.randint(0, min(self.ptr, 8), (8,))
        cols = torch.randint(0, self.sim.num_envs, (8,))
        batch = {name: value[rows, cols] for name, value in self.ring.items()}
        with torch.no_grad():
            follow = torch.cat([batch["next"], self.actor(batch["next"])], 1)
            target = batch["rew"] + 0.95 * (~batch["cut"]) * self.target(follow).squeeze(1)
        loss = F.mse_loss(self.critic(torch.cat([batch["obs"], batch["act"]], 1))[:, 0], target)
        self.critic_opt.zero_grad(set_to_none=True)
        loss.backward()
        self.critic_opt.step()
        gain = self.critic(torch.cat([batch["obs"], self.actor(batch["obs"])], 1)).mean()
        self.actor_opt.zero_grad(set_to_none=True)
        (-gain).backward()
        self.actor_opt.step()
        with torch.no_grad():
            torch._foreach_lerp_(
                list(self.target.parameters()), list(self.critic.parameters()), 0.1
            )
        return torch.stack([loss.detach(), gain.detach()])

    def train(self, steps: int, updates: int) -> torch.Tensor:
        for _ in range(steps):
            self.step()
            if self.ptr > 2:
                for _ in range(updates):
                    self.metrics.append(self.learn())
        return torch.stack(self.metrics).mean(0) if self.metrics else torch.zeros(2)


def run_tensors(compile: Any, vectorize: Any) -> Any:
    del vectorize
    trainer = FastTrainer(4)
    train = compile(trainer.train)
    return trainer, [train(3, 2) for _ in range(ITERATIONS)]


# -- retries until a batch is full -----------------------------------------------------------------


def dynamic(model, optimizer, envs, groups, size, log):  # type: ignore[no-untyped-def]
    """Groups whose members all did the same teach nothing: sample until enough are kept."""
    kept, tried = [], 0
    while True:
        tried += 1
        seed = int(torch.randint(0, 1000, ()))
        obs = torch.from_numpy(envs.reset(seed=[seed + k // size for k in range(envs.num_envs)])[0])
        logps, total = [], torch.zeros(envs.num_envs)
        for _ in range(3):
            mean, _ = model(obs)
            dist = Normal(mean, model.log_std.exp())
            action = dist.sample()
            logps.append(dist.log_prob(action).sum(-1))
            next_obs, reward, terminated, _, _ = envs.step(action.numpy())
            total += torch.from_numpy(reward > -1.0).float()
            obs = torch.from_numpy(next_obs)
            if terminated.all():
                break
        grouped = total.view(-1, size)
        spread = grouped.std(1)
        useful = (spread > 0).repeat_interleave(size)
        if useful.any():
            advantage = ((grouped - grouped.mean(1, keepdim=True)) / (spread + 1e-4)[:, None]).view(
                -1
            )
            kept.append((torch.stack(logps).sum(0)[useful], advantage[useful]))
        if sum(len(a) for _, a in kept) >= groups * size or tried >= 6:
            break
    if not kept:
        log.append(("nothing", tried))
        return 0.0
    loss = -torch.cat([p * a for p, a in kept]).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    log.append(("tried", tried, len(kept)))
    return loss.item()


def run_retries(compile: Any, vectorize: Any) -> Any:
    envs, model = vectorize([Reach] * 8), ActorCritic(4, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    log: list[Any] = []
    step = compile(dynamic)
    losses = [step(model, optimizer, envs, 4, 2, log) for _ in range(ITERATIONS)]
    return model, optimizer, envs, log, losses


# -- evaluation, checkpoint and a normalizer shared by all environments ----------------------------


class Normalizer(nn.Module):
    """Running mean and variance in buffers; in training mode its forward updates them."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("var", torch.ones(size))
        self.register_buffer("count", torch.tensor(1e-4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            total = self.count + len(x)
            delta = x.mean(0) - self.mean
            self.mean += delta * len(x) / total
            spread = (
                x.var(0, unbiased=False) * len(x) + delta.square() * self.count * len(x) / total
            )
            self.var.copy_((self.var * self.count + spread) / total)
            self.count.copy_(total)
        return (x - self.mean) / (self.var + 1e-5).sqrt()


def evaluated(run, envs, eval_envs, model, norm, optimizer, schedule, obs):  # type: ignore[no-untyped-def]
    for _ in range(run.every):
        model.train(), norm.train()
        logps, rewards, values = [], [], []
        for _ in range(3):
            mean, value = model(norm(obs))
            dist = Normal(mean, model.log_std.exp())
            action = dist.sample()
            next_obs, reward, _, _, _ = envs.step(action.numpy())
            logps.append(dist.log_prob(action).sum(-1))
            values.append(value)
            rewards.append(torch.as_tensor(reward, dtype=torch.float32))
            obs = torch.as_tensor(next_obs)
        gain, loss = torch.zeros(envs.num_envs), 0.0
        for logp, value, reward in zip(logps[::-1], values[::-1], rewards[::-1], strict=True):
            gain = reward + 0.9 * gain
            loss = loss - (logp * (gain - value.detach())).mean() + (gain - value).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        run.updates += 1
        if run.updates % run.eval_every == 0:
            model.eval(), norm.eval()
            score = 0.0
            observation, _ = eval_envs.reset(seed=99)
            for _ in range(4):
                with torch.no_grad():
                    mean, _ = model(norm(torch.as_tensor(observation)))
                observation, reward, *_ = eval_envs.step(mean.numpy())
                score += float(reward.mean())
            run.scores.append(score)
            if score > run.best:
                run.best = score
                run.checkpoint = copy.deepcopy(
                    {"model": model.state_dict(), "norm": norm.state_dict(), "at": run.updates}
                )
            elif optimizer.param_groups[0]["lr"] > 1e-3:
                optimizer.param_groups[0]["lr"] *= 0.5
    return obs


def run_evaluated(compile: Any, vectorize: Any) -> Any:
    run = SimpleNamespace(
        every=1, eval_every=2, updates=0, scores=[], best=-np.inf, checkpoint=None
    )
    envs = vectorize([Reach] * 8)
    eval_envs = gym.vector.SyncVectorEnv([Reach] * 2)
    model, norm = ActorCritic(4, 2), Normalizer(4)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    obs = torch.as_tensor(envs.reset(seed=31)[0])
    step = compile(evaluated)
    for _ in range(ITERATIONS):
        obs = step(run, envs, eval_envs, model, norm, optimizer, schedule, obs)
    assert run.checkpoint is not None
    return run, envs, eval_envs, model, norm, optimizer, schedule, obs


SCRIPTS = [
    Script("minibatches from a generator", run_generators, sharded=True, applied=("split", "late")),
    Script("mixed contexts", run_contexts, sharded=True, applied=("late",)),
    Script("a simulator of tensors", run_tensors),
    Script("retries until a batch is full", run_retries, sharded=True),
    Script("evaluation and checkpoint every k", run_evaluated, sharded=True, applied=("late",)),
]
