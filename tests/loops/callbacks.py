"""On-policy algorithms made of base classes with callbacks: what was observed last, episode starts
and counters are attributes; one loop of its own collects, callbacks see every step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

from tests.loops.envs import Corridor, with_statistics
from tests.loops.harness import ITERATIONS, Script


@dataclass
class OptimizerConfig:
    lr: float = 3e-3
    max_grad_norm: float = 0.5


@dataclass
class Config:
    n_steps: int = 6
    n_epochs: int = 2
    batch_size: int = 16
    gamma: float = 0.98
    gae_lambda: float = 0.95
    clip_range: float = 0.2
    ent_coef: float = 0.01
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)


class Batch(NamedTuple):
    observations: torch.Tensor
    actions: torch.Tensor
    old_values: torch.Tensor
    old_log_prob: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor


class RolloutBuffer:
    """Numpy arrays, filled row by row; minibatches come from a generator."""

    def __init__(self, size: int, n_envs: int, width: int, gamma: float, lam: float) -> None:
        self.buffer_size, self.n_envs, self.width = size, n_envs, width
        self.gamma, self.gae_lambda = gamma, lam
        self.reset()

    def reset(self) -> None:
        shape = (self.buffer_size, self.n_envs)
        self.observations = np.zeros((*shape, self.width), np.float32)
        self.actions = np.zeros(shape, np.int64)
        self.rewards = np.zeros(shape, np.float32)
        self.episode_starts = np.zeros(shape, np.float32)
        self.values = np.zeros(shape, np.float32)
        self.log_probs = np.zeros(shape, np.float32)
        self.advantages = np.zeros(shape, np.float32)
        self.returns = np.zeros(shape, np.float32)
        self.pos = 0
        self.full = False

    def add(self, obs, action, reward, episode_start, value, log_prob) -> None:  # type: ignore[no-untyped-def]
        self.observations[self.pos] = np.array(obs)
        self.actions[self.pos] = np.array(action)
        self.rewards[self.pos] = np.array(reward)
        self.episode_starts[self.pos] = np.array(episode_start)
        self.values[self.pos] = value.clone().cpu().numpy().flatten()
        self.log_probs[self.pos] = log_prob.clone().cpu().numpy()
        self.pos += 1
        if self.pos == self.buffer_size:
            self.full = True

    def compute_returns_and_advantage(self, last_values: torch.Tensor, dones: np.ndarray) -> None:
        last = last_values.clone().cpu().numpy().flatten()
        last_gae_lam = 0
        for step in reversed(range(self.buffer_size)):
            if step == self.buffer_size - 1:
                next_non_terminal = 1.0 - dones.astype(np.float32)
                next_values = last
            else:
                next_non_terminal = 1.0 - self.episode_starts[step + 1]
                next_values = self.values[step + 1]
            delta = (
                self.rewards[step]
                + self.gamma * next_values * next_non_terminal
                - self.values[step]
            )
            last_gae_lam = delta + self.gamma * self.gae_lambda * next_non_terminal * last_gae_lam
            self.advantages[step] = last_gae_lam
        self.returns = self.advantages + self.values

    def get(self, batch_size: int) -> Iterator[Batch]:
        assert self.full, "the buffer is not full"
        indices = np.random.permutation(self.buffer_size * self.n_envs)  # noqa: NPY002
        for start in range(0, len(indices), batch_size):
            rows = indices[start : start + batch_size]
            yield Batch(
                *(
                    torch.as_tensor(a.swapaxes(0, 1).reshape(-1, *a.shape[2:])[rows])
                    for a in (
                        self.observations,
                        self.actions,
                        self.values,
                        self.log_probs,
                        self.advantages,
                        self.returns,
                    )
                )
            )


class Callback:
    """Hooks that a training calls; the base class of those that do something."""

    def __init__(self) -> None:
        self.n_calls = 0

    def on_rollout_start(self, algorithm: Any) -> None:
        pass

    def on_step(self, algorithm: Any, infos: dict[str, Any]) -> bool:
        self.n_calls += 1
        return True

    def on_rollout_end(self, algorithm: Any) -> None:
        pass


class EpisodeMonitor(Callback):
    """Keeps the last episodes' returns."""

    def __init__(self) -> None:
        super().__init__()
        self.episodes: deque[tuple[float, int]] = deque(maxlen=20)

    def on_step(self, algorithm: Any, infos: dict[str, Any]) -> bool:
        super().on_step(algorithm, infos)
        for k in np.flatnonzero(infos.get("_episode", ())):
            self.episodes.append((float(infos["episode"]["r"][k]), int(infos["episode"]["l"][k])))
        return True

    def on_rollout_end(self, algorithm: Any) -> None:
        algorithm.logger["rollout/ep_rew_mean"] = float(
            np.mean([r for r, _ in self.episodes]) if self.episodes else 0.0
        )


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(2, 12), nn.Tanh())
        self.action_net = nn.Linear(12, 2)
        self.value_net = nn.Linear(12, 1)

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        features = self.features(obs)
        distribution = Categorical(logits=self.action_net(features))
        actions = distribution.sample()
        return actions, self.value_net(features), distribution.log_prob(actions)

    def evaluate_actions(self, obs: torch.Tensor, actions: torch.Tensor) -> Any:
        features = self.features(obs)
        distribution = Categorical(logits=self.action_net(features))
        value = self.value_net(features).flatten()
        return value, distribution.log_prob(actions), distribution.entropy()

    def predict_values(self, obs: torch.Tensor) -> torch.Tensor:
        return self.value_net(self.features(obs))


class BaseAlgorithm:
    def __init__(self, policy: nn.Module, env: Any, cfg: Config) -> None:
        self.policy, self.env, self.cfg = policy, env, cfg
        self.optimizer = torch.optim.Adam(policy.parameters(), lr=cfg.optimizer.lr, eps=1e-5)
        self.num_timesteps = 0
        self._n_updates = 0
        self._last_obs, _ = env.reset(seed=4)
        self._last_episode_starts = np.ones((env.num_envs,), dtype=bool)
        self.logger: dict[str, float] = {}

    def _update_learning_rate(self, progress: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.cfg.optimizer.lr * progress


class OnPolicyAlgorithm(BaseAlgorithm):
    def __init__(self, policy: nn.Module, env: Any, cfg: Config) -> None:
        super().__init__(policy, env, cfg)
        self.rollout_buffer = RolloutBuffer(cfg.n_steps, env.num_envs, 2, cfg.gamma, cfg.gae_lambda)

    def collect_rollouts(self, callback: Callback) -> bool:
        self.policy.train(False)
        self.rollout_buffer.reset()
        callback.on_rollout_start(self)
        for _ in range(self.cfg.n_steps):
            with torch.no_grad():
                actions, values, log_probs = self.policy(torch.as_tensor(self._last_obs))
            actions = actions.cpu().numpy()
            new_obs, rewards, terminated, truncated, infos = self.env.step(actions)
            dones = np.logical_or(terminated, truncated)
            self.num_timesteps += self.env.num_envs
            callback.on_step(self, infos)
            self.rollout_buffer.add(
                self._last_obs, actions, rewards, self._last_episode_starts, values, log_probs
            )
            self._last_obs = new_obs
            self._last_episode_starts = dones
        with torch.no_grad():
            values = self.policy.predict_values(torch.as_tensor(self._last_obs))
        self.rollout_buffer.compute_returns_and_advantage(values, self._last_episode_starts)
        callback.on_rollout_end(self)
        return True


class PPO(OnPolicyAlgorithm):
    def train(self) -> None:
        self.policy.train(True)
        losses, clip_fractions = [], []
        for _ in range(self.cfg.n_epochs):
            for batch in self.rollout_buffer.get(self.cfg.batch_size):
                values, log_prob, entropy = self.policy.evaluate_actions(
                    batch.observations, batch.actions
                )
                advantages = batch.advantages
                advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
                ratio = torch.exp(log_prob - batch.old_log_prob)
                clipped = torch.clamp(ratio, 1 - self.cfg.clip_range, 1 + self.cfg.clip_range)
                policy_loss = -torch.min(advantages * ratio, advantages * clipped).mean()
                value_loss = nn.functional.mse_loss(batch.returns, values)
                loss = policy_loss + 0.5 * value_loss - self.cfg.ent_coef * entropy.mean()
                moved = (torch.abs(ratio - 1) > self.cfg.clip_range).float()
                clip_fractions.append(moved.mean().item())
                self.optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.policy.parameters(), self.cfg.optimizer.max_grad_norm)
                self.optimizer.step()
                losses.append(loss.item())
            self._n_updates += 1
        self.logger["train/loss"] = float(np.mean(losses))
        self.logger["train/clip_fraction"] = float(np.mean(clip_fractions))

    def iterate(self, callback: Callback, progress: float) -> dict[str, float]:
        self.collect_rollouts(callback)
        self._update_learning_rate(progress)
        self.train()
        return dict(self.logger)


def run(compile: Any, vectorize: Any) -> Any:
    algorithm = PPO(Policy(), vectorize([with_statistics(Corridor)] * 8), Config())
    monitor = EpisodeMonitor()
    step = compile(algorithm.iterate)
    logs = [step(monitor, 1.0 - k / ITERATIONS) for k in range(ITERATIONS)]
    assert monitor.episodes, "no episode ended"
    return algorithm, monitor, logs


SCRIPTS = [
    Script("PPO, base classes and callbacks", run, sharded=True, applied=("split", "tile_batch"))
]
