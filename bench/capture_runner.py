"""An on-policy loop made of classes (runner, algorithm, policy, storage) over a simulator of
tensors, in the style of legged-robot training code, in our own words."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributions import Normal

from bench.capture_onpolicy import Log, mlp


class Walkers:
    """Many point masses, batched: one tensor an attribute, buffers reused by every step."""

    def __init__(self, num_envs: int, horizon: int = 20) -> None:
        self.num_envs = num_envs
        self.num_obs = 4
        self.num_actions = 2
        self.max_episode_length = horizon
        self.position = torch.zeros(num_envs, 2)
        self.velocity = torch.zeros(num_envs, 2)
        self.obs_buf = torch.zeros(num_envs, self.num_obs)
        self.rew_buf = torch.zeros(num_envs)
        self.reset_buf = torch.zeros(num_envs, dtype=torch.long)
        self.episode_length_buf = torch.zeros(num_envs, dtype=torch.long)
        self.extras: dict[str, Any] = {}

    def step(self, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict]:
        self.velocity += 0.1 * torch.clip(actions, -1.0, 1.0)
        self.velocity *= 0.98
        self.position += 0.1 * self.velocity
        self.episode_length_buf += 1
        self.rew_buf[:] = 1.0 - self.position.square().sum(1)
        self.reset_buf[:] = self.episode_length_buf > self.max_episode_length
        self.extras["time_outs"] = self.reset_buf.clone()
        ids = self.reset_buf.nonzero(as_tuple=False).flatten()
        if len(ids) > 0:
            self.reset_idx(ids)
        self.compute_observations()
        return self.obs_buf, self.rew_buf, self.reset_buf, self.extras

    def reset_idx(self, ids: torch.Tensor) -> None:
        self.position[ids] = torch.rand(len(ids), 2) - 0.5
        self.velocity[ids] = 0.0
        self.extras["episode"] = {"length": self.episode_length_buf[ids].float().mean()}
        self.episode_length_buf[ids] = 0

    def compute_observations(self) -> None:
        self.obs_buf[:, :2] = self.position
        self.obs_buf[:, 2:] = self.velocity

    def get_observations(self) -> torch.Tensor:
        return self.obs_buf


class ActorCritic(nn.Module):
    def __init__(self, num_obs: int, num_actions: int) -> None:
        super().__init__()
        self.actor = mlp(num_obs, 32, 32, num_actions)
        self.critic = mlp(num_obs, 32, 32, 1)
        self.std = nn.Parameter(torch.ones(num_actions))
        self.distribution: Normal | None = None

    @property
    def action_mean(self) -> torch.Tensor:
        return self.distribution.mean

    @property
    def action_std(self) -> torch.Tensor:
        return self.distribution.stddev

    @property
    def entropy(self) -> torch.Tensor:
        return self.distribution.entropy().sum(dim=-1)

    def update_distribution(self, observations: torch.Tensor) -> None:
        mean = self.actor(observations)
        self.distribution = Normal(mean, mean * 0.0 + self.std)

    def act(self, observations: torch.Tensor) -> torch.Tensor:
        self.update_distribution(observations)
        return self.distribution.sample()

    def get_actions_log_prob(self, actions: torch.Tensor) -> torch.Tensor:
        return self.distribution.log_prob(actions).sum(dim=-1)

    def evaluate(self, observations: torch.Tensor) -> torch.Tensor:
        return self.critic(observations)


class Transition:
    """What is known of one step; the same object for every step."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.observations = None
        self.actions = None
        self.rewards = None
        self.dones = None
        self.values = None
        self.log_probs = None
        self.mean = None
        self.std = None


class Storage:
    def __init__(self, num_envs: int, steps: int, num_obs: int, num_actions: int) -> None:
        self.steps = steps
        self.num_envs = num_envs
        self.step = 0
        self.observations = torch.zeros(steps, num_envs, num_obs)
        self.actions = torch.zeros(steps, num_envs, num_actions)
        self.mean = torch.zeros(steps, num_envs, num_actions)
        self.std = torch.zeros(steps, num_envs, num_actions)
        self.rewards = torch.zeros(steps, num_envs, 1)
        self.dones = torch.zeros(steps, num_envs, 1).byte()
        self.values = torch.zeros(steps, num_envs, 1)
        self.log_probs = torch.zeros(steps, num_envs, 1)
        self.returns = torch.zeros(steps, num_envs, 1)
        self.advantages = torch.zeros(steps, num_envs, 1)

    def add_transitions(self, transition: Transition) -> None:
        if self.step >= self.steps:
            raise AssertionError("rollout buffer overflow")
        self.observations[self.step].copy_(transition.observations)
        self.actions[self.step].copy_(transition.actions)
        self.rewards[self.step].copy_(transition.rewards.view(-1, 1))
        self.dones[self.step].copy_(transition.dones.view(-1, 1))
        self.values[self.step].copy_(transition.values)
        self.log_probs[self.step].copy_(transition.log_probs.view(-1, 1))
        self.mean[self.step].copy_(transition.mean)
        self.std[self.step].copy_(transition.std)
        self.step += 1

    def clear(self) -> None:
        self.step = 0

    def compute_returns(self, last_values: torch.Tensor, gamma: float, lam: float) -> None:
        advantage = 0
        for step in reversed(range(self.steps)):
            next_values = last_values if step == self.steps - 1 else self.values[step + 1]
            alive = 1.0 - self.dones[step].float()
            delta = self.rewards[step] + alive * gamma * next_values - self.values[step]
            advantage = delta + alive * gamma * lam * advantage
            self.returns[step] = advantage + self.values[step]
        self.advantages = self.returns - self.values
        self.advantages = (self.advantages - self.advantages.mean()) / (
            self.advantages.std() + 1e-8
        )

    def mini_batches(self, count: int, epochs: int) -> Iterator[tuple[torch.Tensor, ...]]:
        size = self.num_envs * self.steps // count
        indices = torch.randperm(count * size)
        flat = [
            x.flatten(0, 1)
            for x in (
                self.observations, self.actions, self.values, self.advantages, self.returns,
                self.log_probs, self.mean, self.std,
            )
        ]  # fmt: skip
        for _ in range(epochs):
            for i in range(count):
                batch = indices[i * size : (i + 1) * size]
                yield tuple(x[batch] for x in flat)


class PPO:
    def __init__(self, policy: ActorCritic, storage: Storage) -> None:
        self.policy = policy
        self.storage = storage
        self.optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
        self.transition = Transition()
        self.learning_rate = 1e-3
        self.schedule = "adaptive"
        self.desired_kl = 0.01
        self.clip = 0.2
        self.gamma = 0.99
        self.lam = 0.95
        self.epochs = 2
        self.mini_batches = 2

    def act(self, obs: torch.Tensor) -> torch.Tensor:
        self.transition.actions = self.policy.act(obs).detach()
        self.transition.values = self.policy.evaluate(obs).detach()
        self.transition.log_probs = self.policy.get_actions_log_prob(
            self.transition.actions
        ).detach()
        self.transition.mean = self.policy.action_mean.detach()
        self.transition.std = self.policy.action_std.detach()
        self.transition.observations = obs
        return self.transition.actions

    def process_env_step(self, rewards: torch.Tensor, dones: torch.Tensor, infos: dict) -> None:
        self.transition.rewards = rewards.clone()
        self.transition.dones = dones
        if "time_outs" in infos:
            self.transition.rewards += self.gamma * torch.squeeze(
                self.transition.values * infos["time_outs"].unsqueeze(1), 1
            )
        self.storage.add_transitions(self.transition)
        self.transition.clear()

    def compute_returns(self, last_obs: torch.Tensor) -> None:
        last_values = self.policy.evaluate(last_obs).detach()
        self.storage.compute_returns(last_values, self.gamma, self.lam)

    def update(self) -> dict[str, float]:
        mean_value_loss = 0.0
        mean_surrogate_loss = 0.0
        for batch in self.storage.mini_batches(self.mini_batches, self.epochs):
            obs, actions, _, advantages, returns, old_log_probs, old_mean, old_std = batch
            self.policy.act(obs)
            log_probs = self.policy.get_actions_log_prob(actions)
            value = self.policy.evaluate(obs)
            mean, std = self.policy.action_mean, self.policy.action_std
            if self.desired_kl is not None and self.schedule == "adaptive":
                with torch.inference_mode():
                    kl = torch.sum(
                        torch.log(std / old_std + 1.0e-5)
                        + (old_std.square() + (old_mean - mean).square()) / (2.0 * std.square())
                        - 0.5,
                        axis=-1,
                    )
                    kl_mean = torch.mean(kl)
                    if kl_mean > self.desired_kl * 2.0:
                        self.learning_rate = max(1e-5, self.learning_rate / 1.5)
                    elif self.desired_kl / 2.0 > kl_mean > 0.0:
                        self.learning_rate = min(1e-2, self.learning_rate * 1.5)
                    for group in self.optimizer.param_groups:
                        group["lr"] = self.learning_rate
            ratio = torch.exp(log_probs - torch.squeeze(old_log_probs))
            surrogate = -torch.squeeze(advantages) * ratio
            clipped = -torch.squeeze(advantages) * torch.clamp(
                ratio, 1.0 - self.clip, 1.0 + self.clip
            )
            surrogate_loss = torch.max(surrogate, clipped).mean()
            value_loss = (returns - value).pow(2).mean()
            loss = surrogate_loss + value_loss - 0.01 * self.policy.entropy.mean()
            self.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
            self.optimizer.step()
            mean_value_loss += value_loss.item()
            mean_surrogate_loss += surrogate_loss.item()
        updates = self.mini_batches * self.epochs
        self.storage.clear()
        return {"value": mean_value_loss / updates, "surrogate": mean_surrogate_loss / updates}


class Runner:
    def __init__(self, env: Walkers, steps: int = 8) -> None:
        self.env = env
        self.num_steps_per_env = steps
        policy = ActorCritic(env.num_obs, env.num_actions)
        storage = Storage(env.num_envs, steps, env.num_obs, env.num_actions)
        self.alg = PPO(policy, storage)
        self.writer = Log()
        self.iteration = 0
        self.tot_timesteps = 0

    def learn(self, iterations: int) -> None:
        obs = self.env.get_observations()
        ep_infos: list[dict] = []
        rewbuffer: deque = deque(maxlen=100)
        lenbuffer: deque = deque(maxlen=100)
        cur_reward_sum = torch.zeros(self.env.num_envs)
        cur_episode_length = torch.zeros(self.env.num_envs)
        start_iter = self.iteration
        for it in range(start_iter, start_iter + iterations):
            start = time.time()
            with torch.inference_mode():
                for _ in range(self.num_steps_per_env):
                    actions = self.alg.act(obs)
                    obs, rewards, dones, infos = self.env.step(actions)
                    self.alg.process_env_step(rewards, dones, infos)
                    if "episode" in infos:
                        ep_infos.append(infos["episode"])
                    cur_reward_sum += rewards
                    cur_episode_length += 1
                    new_ids = (dones > 0).nonzero(as_tuple=False)
                    rewbuffer.extend(cur_reward_sum[new_ids][:, 0].cpu().numpy().tolist())
                    lenbuffer.extend(cur_episode_length[new_ids][:, 0].cpu().numpy().tolist())
                    cur_reward_sum[new_ids] = 0
                    cur_episode_length[new_ids] = 0
                collection_time = time.time() - start
                self.alg.compute_returns(obs)
            losses = self.alg.update()
            self.iteration = it
            self.log(it, losses, rewbuffer, collection_time)
            ep_infos.clear()

    def log(self, it: int, losses: dict, rewbuffer: deque, collection_time: float) -> None:
        self.tot_timesteps += self.num_steps_per_env * self.env.num_envs
        for key, value in losses.items():
            self.writer.add_scalar(f"Loss/{key}", value, it)
        self.writer.add_scalar("Perf/collection_time", collection_time, it)
        if len(rewbuffer) > 0:
            self.writer.add_scalar("Train/mean_reward", statistics.mean(rewbuffer), it)


def learn(runner: Runner, iterations: int) -> None:
    runner.learn(iterations)


def make_runner() -> tuple[Any, ...]:
    torch.manual_seed(0)
    return Runner(Walkers(8)), 2
