"""A trainer with hooks in the manner of Lightning: a module that knows its losses, a trainer that
loops, callbacks, an average of the weights, a schedule of the learning rate, mixed precision."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributions import Independent, Normal
from torch.utils.data import DataLoader, TensorDataset

from tests.loops.envs import Reach, with_statistics
from tests.loops.harness import ITERATIONS, Script


@dataclass(frozen=True)
class TrainerConfig:
    horizon: int = 6
    epochs: int = 2
    batch_size: int = 16
    gamma: float = 0.95
    decay: float = 0.9
    precision: str = "bf16"


class RunningMeanStd:
    """Mean and variance over everything seen, by the parallel algorithm."""

    def __init__(self, width: int) -> None:
        self.mean = np.zeros(width, np.float64)
        self.var = np.ones(width, np.float64)
        self.count = 1e-4

    def update(self, x: np.ndarray) -> None:
        batch_mean, batch_var, batch_count = x.mean(axis=0), x.var(axis=0), x.shape[0]
        delta = batch_mean - self.mean
        total = self.count + batch_count
        self.mean = self.mean + delta * batch_count / total
        m2 = self.var * self.count + batch_var * batch_count
        m2 = m2 + np.square(delta) * self.count * batch_count / total
        self.var = m2 / total
        self.count = total

    def normalize(self, x: np.ndarray) -> np.ndarray:
        return np.clip((x - self.mean) / np.sqrt(self.var + 1e-8), -5, 5).astype(np.float32)


class EMA:
    """A slowly following copy of a module."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.shadow = copy.deepcopy(module).eval().requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, module: nn.Module) -> None:
        for slow, fast in zip(self.shadow.parameters(), module.parameters(), strict=True):
            slow.mul_(self.decay).add_(fast, alpha=1 - self.decay)


class ActorModule(nn.Module):
    """The policy with its losses and optimizers."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, 16), nn.SiLU(), nn.Linear(16, 2))
        self.critic = nn.Sequential(nn.Linear(4, 16), nn.SiLU(), nn.Linear(16, 1))
        self.log_std = nn.Parameter(torch.zeros(2))

    def distribution(self, obs: torch.Tensor) -> Independent:
        return Independent(Normal(self.actor(obs), self.log_std.exp()), 1)

    @torch.no_grad()
    def act(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        dist = self.distribution(obs)
        action = dist.sample()
        return action, dist.log_prob(action)

    def training_step(self, batch: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
        obs, actions, old_log_prob, returns = batch
        value = self.critic(obs).squeeze(-1)
        advantage = returns - value.detach()
        ratio = (self.distribution(obs).log_prob(actions) - old_log_prob).exp()
        policy = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        critic = nn.functional.smooth_l1_loss(value, returns)
        return {"loss": policy + 0.5 * critic, "policy": policy.detach(), "critic": critic.detach()}

    def configure_optimizers(self) -> tuple[Any, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=4e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=ITERATIONS)
        return optimizer, schedule


class Summary:
    """What a writer of scalars keeps."""

    def __init__(self) -> None:
        self.scalars: dict[str, list[tuple[int, float]]] = {}

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.scalars.setdefault(tag, []).append((step, float(value)))


class Trainer:
    def __init__(self, cfg: TrainerConfig, module: ActorModule, envs: Any) -> None:
        self.cfg, self.module, self.envs = cfg, module, envs
        self.optimizer, self.schedule = module.configure_optimizers()
        self.scaler = torch.amp.GradScaler("cpu", enabled=False)
        self.ema = EMA(module, cfg.decay)
        self.stats = RunningMeanStd(4)
        self.summary = Summary()
        self.generator = torch.Generator().manual_seed(5)
        self.timings: dict[str, float] = {}
        self.global_step = 0
        self.obs = envs.reset(seed=6)[0]

    @contextlib.contextmanager
    def profile(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - start
            self.timings[name] = self.timings.get(name, 0.0) + elapsed

    def rollout(self) -> TensorDataset:
        observations, actions, log_probs, rewards, dones = [], [], [], [], []
        for _ in range(self.cfg.horizon):
            normal = torch.from_numpy(self.stats.normalize(self.obs))
            action, log_prob = self.module.act(normal)
            next_obs, reward, terminated, truncated, info = self.envs.step(action.numpy())
            observations.append(normal)
            actions.append(action)
            log_probs.append(log_prob)
            rewards.append(torch.as_tensor(reward, dtype=torch.float32))
            dones.append(torch.as_tensor(terminated | truncated, dtype=torch.float32))
            self.global_step += self.envs.num_envs
            if "episode" in info:
                finished = info["episode"]["r"][info["_episode"]]
                self.summary.add_scalar("episode/return", finished.mean(), self.global_step)
            self.obs = next_obs
        self.stats.update(np.concatenate([o.numpy() for o in observations]))
        running = torch.zeros(self.envs.num_envs)
        returns = []
        for reward, done in zip(reversed(rewards), reversed(dones), strict=True):
            running = reward + self.cfg.gamma * running * (1 - done)
            returns.append(running)
        returns.reverse()
        parts = (observations, actions, log_probs, returns)
        return TensorDataset(*(torch.stack(p).flatten(0, 1) for p in parts))

    def fit_epochs(self, data: TensorDataset) -> None:
        loader = DataLoader(
            data, self.cfg.batch_size, shuffle=True, generator=self.generator, drop_last=True
        )
        for _ in range(self.cfg.epochs):
            for batch in loader:
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=True):
                    logs = self.module.training_step(batch)
                self.optimizer.zero_grad(set_to_none=True)
                self.scaler.scale(logs["loss"]).backward()
                self.scaler.unscale_(self.optimizer)
                nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.ema.update(self.module)
        for name, value in logs.items():
            self.summary.add_scalar(f"train/{name}", value.item(), self.global_step)

    def fit_one(self) -> float:
        with self.profile("rollout"):
            data = self.rollout()
        with self.profile("fit"):
            self.fit_epochs(data)
        self.schedule.step()
        return self.schedule.get_last_lr()[0]


def run(compile: Any, vectorize: Any) -> Any:
    trainer = Trainer(TrainerConfig(), ActorModule(), vectorize([with_statistics(Reach)] * 8))
    step = compile(trainer.fit_one)
    rates = [step() for _ in range(ITERATIONS)]
    assert trainer.summary.scalars["episode/return"]
    assert min(trainer.timings.pop(name) for name in ("rollout", "fit")) > 0
    return trainer, rates


SCRIPTS = [
    Script(
        "PPO, a trainer with hooks and a DataLoader",
        run,
        sharded=True,
        applied=("tile_batch", "defer"),
    )
]
