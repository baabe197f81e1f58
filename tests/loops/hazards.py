"""Habits that make reordering dangerous: a simulator that hands out the same buffers for ever and
reseeds the process, transitions edited after they were handed over, one environment under two
names, an acting net that shares its weights with the learner, reads that write."""

from __future__ import annotations

import copy
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from tests.loops.envs import Reach
from tests.loops.harness import ITERATIONS, Script

# -- a simulator with buffers of its own -----------------------------------------------------------


class Crawlers:
    """Batched physics in place: every step writes into the arrays that it handed out before."""

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.single_observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)
        self.single_action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.obs = np.zeros((num_envs, 4), np.float32)
        self.reward = np.zeros(num_envs, np.float32)
        self.done = np.zeros(num_envs, bool)
        self.age = np.zeros(num_envs, np.int64)
        self.extras: dict[str, Any] = {"episode": {}, "final": np.zeros((num_envs, 4), np.float32)}

    def reset(self) -> tuple[np.ndarray, dict[str, Any]]:
        self.obs[:] = np.random.uniform(-1, 1, self.obs.shape)  # noqa: NPY002
        self.age[:] = 0
        return self.obs, self.extras

    def step(self, action: np.ndarray) -> tuple[Any, ...]:
        self.obs[:, 2:] += 0.3 * np.clip(action, -1, 1)
        self.obs[:, :2] += 0.2 * self.obs[:, 2:]
        np.negative(np.abs(self.obs[:, :2]).sum(1), out=self.reward)
        self.age += 1
        np.greater(self.age, 4 + np.arange(self.num_envs) % 3, out=self.done)
        self.extras["episode"].clear()
        if self.done.any():
            self.extras["final"][:] = self.obs
            self.extras["episode"]["age"] = self.age[self.done].copy()
            np.random.seed(int(self.age.sum()))  # noqa: NPY002 (some simulators do)
            fresh = np.random.uniform(-1, 1, self.obs.shape)  # noqa: NPY002
            self.obs[self.done] = fresh[self.done]
            self.age[self.done] = 0
        return self.obs, self.reward, self.done, np.zeros(self.num_envs, bool), self.extras


def borrowed(sim, policy, critic, optimizer, memory, obs, ages):  # type: ignore[no-untyped-def]
    """Tensors that are views of the simulator's arrays, used before and after it moves on."""
    observations = torch.zeros(5, sim.num_envs, 4)
    rewards, alive, late = torch.zeros(5, sim.num_envs), torch.zeros(5, sim.num_envs), []
    for t in range(5):
        view = torch.from_numpy(obs)
        observations[t] = view
        with torch.no_grad():
            action = policy(view) + 0.3 * torch.randn(sim.num_envs, 2)
            value = critic(view).squeeze(-1)
        transition = {"obs": obs.copy(), "action": action, "value": value}
        memory.append(transition)
        obs, reward, done, _, extras = sim.step(action.numpy())
        transition["reward"] = reward.copy()  # edited after it was handed over
        rewards[t] = torch.from_numpy(reward)
        alive[t] = 1.0 - torch.from_numpy(done).float()
        late.append(float(view.sum()))  # reads what the simulator has written meanwhile
        if extras["episode"]:
            ages.extend(extras["episode"]["age"].tolist())
        noise = np.random.normal(size=2)  # noqa: NPY002 (after the simulator reseeded it)
        ages.append(float(noise.sum()))
    total = torch.zeros(sim.num_envs)
    for t in reversed(range(5)):
        total = rewards[t] + 0.9 * alive[t] * total
    loss = (critic(observations[0]).squeeze(-1) - total).pow(2).mean() - policy(
        observations
    ).mean() * 0.1
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return obs, late


def run_borrowed(compile: Any, vectorize: Any) -> Any:
    del vectorize
    sim, policy, critic = Crawlers(6), nn.Linear(4, 2), nn.Linear(4, 1)
    optimizer = torch.optim.Adam([*policy.parameters(), *critic.parameters()], lr=1e-2)
    memory: list[dict[str, Any]] = []
    ages: list[float] = []
    obs, _ = sim.reset()
    step, lates = compile(borrowed), []
    for _ in range(ITERATIONS):
        obs, late = step(sim, policy, critic, optimizer, memory, obs, ages)
        lates.append(late)
    return sim, policy, critic, optimizer, memory, obs, ages, lates


# -- one environment and one set of weights under two names ----------------------------------------


class Shared:
    def __init__(self, envs: Any) -> None:
        self.train_envs = envs
        self.eval_envs = envs  # the same: evaluation goes on where training stopped
        self.learner = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.actor = copy.deepcopy(self.learner)
        for mine, other in zip(self.actor.parameters(), self.learner.parameters(), strict=True):
            mine.data = other.data  # shares its storage with the learner's
        self.optimizer = torch.optim.SGD(self.learner.parameters(), lr=5e-2)
        self.rollout = torch.zeros(4, envs.num_envs, 4)
        self.flat = self.rollout.view(-1, 4)
        self.scores: list[float] = []

    def iterate(self, obs: torch.Tensor) -> torch.Tensor:
        for t in range(4):
            self.rollout[t] = obs
            with torch.no_grad():
                action = self.actor(obs)
            next_obs, *_ = self.train_envs.step(action.numpy())
            obs = torch.from_numpy(next_obs)
        for rows in torch.arange(len(self.flat)).chunk(2):
            loss = (self.learner(self.flat[rows]) + self.flat[rows, :2]).pow(2).mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.flat[rows] *= 0.5  # the batch is a view of the rollout
        score = 0.0
        for _ in range(2):
            with torch.no_grad():
                action = self.actor(obs)
            next_obs, reward, *_ = self.eval_envs.step(action.numpy())
            score += float(reward.sum())
            obs = torch.from_numpy(next_obs)
        self.scores.append(score)
        return obs


def run_shared(compile: Any, vectorize: Any) -> Any:
    shared = Shared(vectorize([Reach] * 8))
    obs = torch.from_numpy(shared.train_envs.reset(seed=37)[0])
    step = compile(shared.iterate)
    for number in range(ITERATIONS):
        obs = step(obs)
        if number == 1:  # between calls, as users do
            shared.optimizer.param_groups[0]["lr"] = 1e-2
            torch.rand(3)
    return shared, obs


# -- observations without a copy -------------------------------------------------------------------


def uncopied(envs, model, optimizer, obs, seen):  # type: ignore[no-untyped-def]
    """gymnasium's vector environment with ``copy=False``, and tensors that lie in its buffer."""
    losses = []
    for _ in range(4):
        x = torch.as_tensor(obs)
        action = model(x)
        seen.append(x)
        obs, reward, _, _, _ = envs.step(action.detach().numpy())
        target = torch.as_tensor(reward, dtype=torch.float32)
        losses.append((action.sum(1) - target).pow(2).mean())
        seen.append(x.clone())
    loss = sum(value.item() for value in losses)
    optimizer.zero_grad()
    (model(torch.stack(seen[-7::2])).mean() + model(torch.as_tensor(obs)).pow(2).mean()).backward()
    optimizer.step()
    return obs, loss


def run_uncopied(compile: Any, vectorize: Any) -> Any:
    del vectorize
    envs = gym.vector.SyncVectorEnv([Reach] * 4, copy=False)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    seen: list[torch.Tensor] = []
    obs, _ = envs.reset(seed=41)
    step, losses = compile(uncopied), []
    for _ in range(ITERATIONS):
        obs, loss = step(envs, model, optimizer, obs, seen)
        losses.append(loss)
    return envs, model, optimizer, obs, seen, losses


# -- reads that write ------------------------------------------------------------------------------


class Sensors(Crawlers):
    """What it is asked for it computes anew, in place, with noise of the process's generator."""

    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs)
        self.seen = torch.zeros(num_envs, 4)

    def get_observations(self) -> torch.Tensor:
        self.seen.copy_(torch.from_numpy(self.obs)).add_(torch.randn(self.seen.shape), alpha=0.1)
        return self.seen


class Steps:
    """The last transitions; sampling sums rewards over three steps, and for that ends the newest
    trajectory in the memory itself, as long as it looks."""

    def __init__(self, capacity: int, num_envs: int) -> None:
        self.obs = torch.zeros(capacity, num_envs, 4)
        self.rewards, self.alive = (torch.zeros(capacity, num_envs) for _ in range(2))
        self.at, self.capacity = 0, capacity
        self.rng = np.random.default_rng(5)

    def add(self, obs: torch.Tensor, reward: torch.Tensor, alive: torch.Tensor) -> None:
        self.obs[self.at], self.rewards[self.at], self.alive[self.at] = obs, reward, alive
        self.at = (self.at + 1) % self.capacity

    def sample(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        newest = (self.at - 1) % self.capacity
        before = self.alive[newest].clone()
        self.alive[newest] = 0.0
        rows = self.rng.integers(0, self.capacity, size=count)
        total, goes_on = torch.zeros(count, self.obs.shape[1]), torch.ones(1)
        for k in range(3):
            at = (rows + k) % self.capacity
            total = total + goes_on * 0.9**k * self.rewards[at]
            goes_on = goes_on * self.alive[at]
        self.alive[newest] = before
        return self.obs[rows], total


def reading(sim, policy, critic, optimizer, memory, ends):  # type: ignore[no-untyped-def]
    """Observations recomputed when asked for, a sampler that edits what it samples from, logging on
    data, and a ratio to log-probabilities that are computed after the first of two updates."""
    for _ in range(5):
        obs = sim.get_observations().clone()
        with torch.no_grad():
            action = policy(obs)
        _, reward, done, _, extras = sim.step(action.numpy())
        if "age" in extras["episode"]:
            ends.append(float(extras["episode"]["age"].sum()))
        memory.add(obs, torch.from_numpy(reward), 1.0 - torch.from_numpy(done).float())
        seen, total = memory.sample(4)
        loss = (critic(seen).squeeze(-1) - total).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for rows in range(2):
        with torch.no_grad():
            old = policy(memory.obs[rows])
        ratio = (policy(memory.obs[rows]) - old).exp()
        loss = (ratio * critic(memory.obs[rows]).detach()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def run_reading(compile: Any, vectorize: Any) -> Any:
    del vectorize
    sim, policy, critic = Sensors(6), nn.Linear(4, 2), nn.Linear(4, 1)
    optimizer = torch.optim.Adam([*policy.parameters(), *critic.parameters()], lr=1e-2)
    memory, ends = Steps(8, 6), list[float]()
    sim.reset()
    step, losses = compile(reading), []
    for _ in range(ITERATIONS):
        losses.append(step(sim, policy, critic, optimizer, memory, ends))
    return sim, policy, critic, optimizer, memory, ends, losses


SCRIPTS = [
    Script("a simulator's own buffers", run_borrowed),
    Script("two names for one thing", run_shared, sharded=True),
    Script("observations without a copy", run_uncopied),
    Script("reads that write", run_reading),
]
