"""A toy simulator made of shards, and a toy agent, small enough to run thousands of times.

The simulator's arithmetic is elementwise in float64, so a shard's rows have the same bits as the
same rows of the whole batch.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from torch import nn

OBS, ACT = 5, 3


class ToyShard:
    """``n`` environments from ``first`` on. ``step_async`` and ``step_wait`` are ``step`` in two.

    With ``lends=True`` the observation array handed out is the shard's own buffer, which the next
    step overwrites.
    """

    def __init__(self, n: int, first: int, *, lends: bool = False) -> None:
        self.n = n
        self.first = first
        self.lends = lends
        self.x = np.linspace(-1, 1, n * OBS).reshape(n, OBS) + first / 7
        self.obs = np.zeros((n, OBS), dtype=np.float32)
        self.age = np.zeros(n, dtype=np.int64)
        self.total = np.zeros(n)
        self.pending: np.ndarray | None = None
        self.calls = 0

    def reset(self) -> np.ndarray:
        self.obs[...] = self.x
        return self.obs.copy()

    def step(self, action: np.ndarray) -> tuple[Any, ...]:
        if self.pending is not None:
            raise RuntimeError("a step is under way")
        if action.shape != (self.n, ACT):
            raise ValueError(f"action of shape {action.shape} for {self.n} environments")
        self.calls += 1
        push = np.zeros((self.n, OBS))
        push[:, :ACT] = action
        self.x = 0.9 * self.x + 0.1 * push - 0.01 * self.x * self.x
        reward = self.x[:, 0] - 0.1 * self.x[:, 1]
        self.age += 1
        self.total += reward
        ended = self.age % 4 == (self.first + np.arange(self.n)) % 4
        truncated = self.age % 7 == 0
        infos: dict[str, Any] = {}
        if ended.any():
            infos = {"episode": {"r": np.where(ended, self.total, 0.0)}, "_episode": ended.copy()}
        self.total[ended] = 0.0
        self.obs[...] = self.x
        obs = self.obs if self.lends else self.obs.copy()
        return obs, reward, ended, truncated, infos

    def step_async(self, action: np.ndarray) -> None:
        if self.pending is not None:
            raise RuntimeError("a step is under way")
        # the action itself, not a copy: who writes it before step_wait is caught by the comparison
        self.pending = action

    def step_wait(self) -> tuple[Any, ...]:
        action, self.pending = self.pending, None
        if action is None:
            raise RuntimeError("no step is under way")
        return self.step(action)

    def state(self) -> tuple[Any, ...]:
        """Everything that a step changes."""
        return self.x.copy(), self.age.copy(), self.total.copy(), self.calls


class ToyEnvs:
    """The whole batch: a tuple of independent shards behind one ``step``."""

    def __init__(self, rows: tuple[int, ...], *, lends: bool = False) -> None:
        self.rows = rows
        self.lends = lends
        self.obs = np.zeros((sum(rows), OBS), dtype=np.float32)
        starts = np.cumsum((0, *rows))
        self._shards = [
            ToyShard(n, int(s), lends=lends) for n, s in zip(rows, starts, strict=False)
        ]
        self.spans = [slice(int(a), int(b)) for a, b in itertools.pairwise(starts)]

    def shards(self) -> list[ToyShard]:
        return self._shards

    def reset(self) -> np.ndarray:
        return np.concatenate([s.reset() for s in self._shards])

    def step(self, action: np.ndarray) -> tuple[Any, ...]:
        parts = [s.step(action[k]) for s, k in zip(self._shards, self.spans, strict=True)]
        return self._lent(self.merge(parts))

    def _lent(self, result: tuple[Any, ...]) -> tuple[Any, ...]:
        if not self.lends:
            return result
        self.obs[...] = result[0]
        return (self.obs, *result[1:])

    def step_async(self, action: np.ndarray) -> None:
        for shard, span in zip(self._shards, self.spans, strict=True):
            shard.step_async(action[span])

    def step_wait(self) -> tuple[Any, ...]:
        return self._lent(self.merge([s.step_wait() for s in self._shards]))

    def merge(self, results: list[tuple[Any, ...]]) -> tuple[Any, ...]:
        """The shards' results as one, infos with gymnasium's masks."""
        arrays = [np.concatenate([r[i] for r in results]) for i in range(4)]
        infos: dict[str, Any] = {}
        if any(r[4] for r in results):
            total, mask = np.zeros(sum(self.rows)), np.zeros(sum(self.rows), dtype=bool)
            for r, span in zip(results, self.spans, strict=True):
                if r[4]:
                    total[span], mask[span] = r[4]["episode"]["r"], r[4]["_episode"]
            infos = {"episode": {"r": total}, "_episode": mask}
        return (*arrays, infos)

    def state(self) -> tuple[Any, ...]:
        return tuple(s.state() for s in self._shards)


class ToyAgent(nn.Module):
    """A Gaussian policy and a critic, one hidden layer each."""

    def __init__(self, hidden: int, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.actor = nn.Sequential(nn.Linear(OBS, hidden), nn.Tanh(), nn.Linear(hidden, ACT))
            self.critic = nn.Sequential(nn.Linear(OBS, hidden), nn.Tanh(), nn.Linear(hidden, 1))
        self.logstd = nn.Parameter(torch.full((1, ACT), -0.5))


class ToyBuffers:
    """Preallocated rollout storage, time first."""

    def __init__(self, steps: int, envs: int) -> None:
        self.obs = torch.zeros(steps, envs, OBS)
        self.actions = torch.zeros(steps, envs, ACT)
        self.logprobs = torch.zeros(steps, envs)
        self.values = torch.zeros(steps, envs)
        self.rewards = torch.zeros(steps, envs)
        self.dones = torch.zeros(steps, envs)
