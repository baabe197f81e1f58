"""Memories of other shapes: an episodic store with relabelled goals, sequences replayed from stored
hidden states that are zeroed in place, prioritized replay over a sum tree."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from tests.loops.envs import Corridor, Reach
from tests.loops.harness import ITERATIONS, Script

# -- an episodic store, goals relabelled -----------------------------------------------------------


class EpisodicStore:
    """One open episode for each environment; closed ones are kept, the oldest leave."""

    def __init__(self, num_envs: int, keep: int) -> None:
        self.open: list[list[dict[str, np.ndarray]]] = [[] for _ in range(num_envs)]
        self.closed: dict[int, list[dict[str, np.ndarray]]] = {}
        self.keep, self.number = keep, 0

    def append(self, env: int, transition: dict[str, Any]) -> None:
        self.open[env].append(transition)

    def close(self, env: int) -> None:
        if len(self.open[env]) > 1:
            self.closed[self.number] = self.open[env]
            self.number += 1
        self.open[env] = []
        while len(self.closed) > self.keep:
            del self.closed[next(iter(self.closed))]

    def sample(self, count: int) -> dict[str, torch.Tensor]:
        rows = []
        for _ in range(count):
            episode = random.choice(list(self.closed.values()))
            t = random.randrange(len(episode))
            row = dict(episode[t])
            if random.random() < 0.8:  # a place that was reached later
                goal = episode[random.randint(t, len(episode) - 1)]["next"][:2]
                row["obs"] = np.concatenate([row["obs"][:2], goal])
                row["next"] = np.concatenate([row["next"][:2], goal])
                row["reward"] = -float(np.linalg.norm(row["next"][:2] - goal))
            rows.append(row)
        return {k: torch.as_tensor(np.stack([r[k] for r in rows])).float() for k in rows[0]}


def hindsight(policy, critic, policy_opt, critic_opt, envs, store, obs, losses):  # type: ignore[no-untyped-def]
    for _ in range(6):
        with torch.no_grad():
            action = torch.tanh(policy(torch.from_numpy(obs)))
            action = (action + 0.2 * torch.randn_like(action)).clamp(-1, 1).numpy()
        next_obs, reward, terminated, truncated, _ = envs.step(action)
        for i in range(envs.num_envs):
            store.append(
                i, {"obs": obs[i], "act": action[i], "reward": reward[i], "next": next_obs[i]}
            )
            if terminated[i] or truncated[i]:
                store.close(i)
        obs = next_obs
    if not store.closed:
        return obs
    for _ in range(3):
        batch = store.sample(8)
        with torch.no_grad():
            future = critic(torch.cat([batch["next"], torch.tanh(policy(batch["next"]))], 1))
            target = batch["reward"].unsqueeze(1) + 0.9 * future
        critic_loss = F.smooth_l1_loss(critic(torch.cat([batch["obs"], batch["act"]], 1)), target)
        critic_opt.zero_grad()
        critic_loss.backward()
        critic_opt.step()
        policy_loss = -critic(torch.cat([batch["obs"], torch.tanh(policy(batch["obs"]))], 1)).mean()
        policy_opt.zero_grad()
        policy_loss.backward()
        policy_opt.step()
        losses.append((critic_loss.item(), policy_loss.item()))
    return obs


def run_hindsight(compile: Any, vectorize: Any) -> Any:
    envs, store = vectorize([Reach] * 8), EpisodicStore(8, keep=6)
    policy, critic = nn.Linear(4, 2), nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
    policy_opt = torch.optim.SGD(policy.parameters(), lr=1e-2, momentum=0.9)
    critic_opt = torch.optim.Adam(critic.parameters(), lr=1e-2)
    obs, losses = envs.reset(seed=13)[0], []
    step = compile(hindsight)
    for _ in range(ITERATIONS):
        obs = step(policy, critic, policy_opt, critic_opt, envs, store, obs, losses)
    assert losses
    return policy, critic, policy_opt, critic_opt, envs, store, obs, losses


# -- sequences from stored hidden states -----------------------------------------------------------


class RecurrentQ(nn.Module):
    """Keeps the hidden state of the environments that it acts in, as an attribute."""

    def __init__(self, num_envs: int) -> None:
        super().__init__()
        self.gru = nn.GRU(2, 8, batch_first=True)
        self.head = nn.Linear(8, 2)
        self.hidden = torch.zeros(1, num_envs, 8)

    def act(self, obs: torch.Tensor) -> torch.Tensor:
        out, hidden = self.gru(obs.unsqueeze(1), self.hidden)
        self.hidden.copy_(hidden)
        return self.head(out[:, 0])

    def reset(self, dones: torch.Tensor) -> None:
        self.hidden[:, dones] = 0.0

    def unroll(self, obs: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(self.gru(obs, hidden)[0])


class SequenceBuffer:
    def __init__(self, capacity: int, length: int) -> None:
        self.obs = torch.zeros(capacity, length + 1, 2)
        self.actions = torch.zeros(capacity, length, dtype=torch.int64)
        self.rewards = torch.zeros(capacity, length)
        self.alive = torch.zeros(capacity, length)
        self.hidden = torch.zeros(capacity, 8)
        self.capacity, self.at, self.filled = capacity, 0, 0

    def slots(self, count: int) -> torch.Tensor:
        rows = torch.arange(self.at, self.at + count) % self.capacity
        self.at = (self.at + count) % self.capacity
        self.filled = min(self.filled + count, self.capacity)
        return rows


class Driver:
    """Acts with a network whose hidden state is its own, and trains on what it stored."""

    def __init__(self, envs: Any) -> None:
        self.envs, self.length = envs, 4
        self.online = RecurrentQ(envs.num_envs)
        self.target = RecurrentQ(envs.num_envs)
        self.target.load_state_dict(self.online.state_dict())
        self.buffer = SequenceBuffer(24, self.length)
        self.optimizer = torch.optim.Adam(self.online.parameters(), lr=5e-3)
        self.generator = torch.Generator().manual_seed(3)
        self.obs = torch.from_numpy(envs.reset(seed=17)[0])
        self.number = 0

    @torch.no_grad()
    def gather(self) -> None:
        rows = self.buffer.slots(self.envs.num_envs)
        self.buffer.hidden[rows] = self.online.hidden[0]
        for t in range(self.length):
            q = self.online.act(self.obs)
            action = q.argmax(-1)
            explore = torch.rand(len(action), generator=self.generator) < 0.3
            action = torch.where(
                explore, torch.randint(0, 2, action.shape, generator=self.generator), action
            )
            self.buffer.obs[rows, t] = self.obs
            obs, reward, terminated, truncated, _ = self.envs.step(action.numpy())
            done = torch.from_numpy(np.logical_or(terminated, truncated))
            self.buffer.actions[rows, t] = action
            self.buffer.rewards[rows, t] = torch.from_numpy(reward).float()
            self.buffer.alive[rows, t] = (~done).float()
            self.online.reset(done)
            self.obs = torch.from_numpy(obs)
        self.buffer.obs[rows, self.length] = self.obs

    def fit(self) -> torch.Tensor:
        rows = torch.randint(0, self.buffer.filled, (6,), generator=self.generator)
        hidden = self.buffer.hidden[rows].unsqueeze(0)
        q = self.online.unroll(self.buffer.obs[rows], hidden)
        with torch.no_grad():
            best = q[:, 1:].argmax(-1, keepdim=True)
            follow = self.target.unroll(self.buffer.obs[rows], hidden)[:, 1:].gather(2, best)
            target = self.buffer.rewards[rows] + 0.97 * self.buffer.alive[rows] * follow[..., 0]
        picked = q[:, :-1].gather(2, self.buffer.actions[rows].unsqueeze(2)).squeeze(2)
        loss = F.huber_loss(picked, target)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def run(self, count: int) -> list[torch.Tensor]:
        losses = []
        for _ in range(count):
            self.gather()
            losses += [self.fit() for _ in range(2)]
            self.number += 1
            if self.number % 2 == 0:
                self.target.load_state_dict(self.online.state_dict())
        return losses


def run_sequences(compile: Any, vectorize: Any) -> Any:
    driver = Driver(vectorize([Corridor] * 8))
    go = compile(driver.run)
    losses = go(2)
    driver.online.hidden.zero_()  # between calls, as an evaluation would
    losses += go(2)
    return driver, losses


# -- prioritized replay ----------------------------------------------------------------------------


class SumTree:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.tree = np.zeros(2 * capacity - 1)
        self.data: list[Any] = [None] * capacity
        self.write = self.count = 0

    def update(self, index: int, priority: float) -> None:
        change = priority - self.tree[index]
        self.tree[index] = priority
        while index != 0:
            index = (index - 1) // 2
            self.tree[index] += change

    def add(self, priority: float, data: Any) -> None:
        self.data[self.write] = data
        self.update(self.write + self.capacity - 1, priority)
        self.write = (self.write + 1) % self.capacity
        self.count = min(self.count + 1, self.capacity)

    def get(self, mass: float) -> int:
        index = 0
        while 2 * index + 1 < len(self.tree):
            left = 2 * index + 1
            if mass <= self.tree[left]:
                index = left
            else:
                mass -= self.tree[left]
                index = left + 1
        return index


def prioritized(net, optimizer, envs, memory, obs, beta):  # type: ignore[no-untyped-def]
    errors = []
    for t in range(4):  # noqa: B007 (the else clause reads it)
        with torch.no_grad():
            action = net(torch.from_numpy(obs)).argmax(1).numpy()
        if np.random.rand() < 0.4:  # noqa: NPY002
            action = np.random.randint(0, 2, size=len(action))  # noqa: NPY002
        next_obs, reward, terminated, truncated, _ = envs.step(action)
        done = terminated | truncated
        top = memory.tree[-memory.capacity :].max() or 1.0
        for item in zip(obs, action, reward, next_obs, done, strict=True):
            memory.add(top, item)
        obs = next_obs
        if memory.count < 8:
            continue
        segment = memory.tree[0] / 4
        leaves = [memory.get(random.uniform(segment * k, segment * (k + 1))) for k in range(4)]
        rows = [memory.data[leaf - memory.capacity + 1] for leaf in leaves]
        s, a, r, s2, d = (torch.as_tensor(np.array(x)) for x in zip(*rows, strict=True))
        weights = torch.tensor([memory.tree[leaf] for leaf in leaves]) / memory.tree[0]
        weights = (memory.count * weights).pow(-beta)
        weights = (weights / weights.max()).float()
        with torch.no_grad():
            target = r.float() + 0.95 * net(s2).max(1).values * (~d).float()
        td = target - net(s).gather(1, a.unsqueeze(1)).squeeze(1)
        loss = (weights * td.pow(2)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for leaf, error in zip(leaves, td.detach().abs().tolist(), strict=True):
            memory.update(leaf, (error + 0.01) ** 0.6)
        errors.append(float(td.abs().mean()))
    else:
        beta = min(1.0, beta + 0.1 * (t + 1) / 4)
    return obs, beta, errors


def run_prioritized(compile: Any, vectorize: Any) -> Any:
    envs, memory = vectorize([Corridor] * 8), SumTree(16)
    net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    obs, beta, all_errors = envs.reset(seed=19)[0], 0.4, []
    step = compile(prioritized)
    for _ in range(ITERATIONS):
        obs, beta, errors = step(net, optimizer, envs, memory, obs, beta)
        all_errors.append(errors)
    return net, optimizer, envs, memory, obs, beta, all_errors


SCRIPTS = [
    Script("episodic store, goals relabelled", run_hindsight, sharded=True),
    Script("recurrent policy, sequences replayed", run_sequences, sharded=True, applied=("late",)),
    Script("prioritized replay", run_prioritized, sharded=True),
]
