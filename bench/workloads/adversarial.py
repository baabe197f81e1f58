"""Trainings in which the obvious transformation loses: the loop as written has to win."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from bench.handwritten import Clock
from bench.workloads.base import Function, Size, Threads, Training, Workload

OBS, ACT = 32, 8


@dataclass(frozen=True)
class Shape:
    """`call` and `row` are what a step of the simulator costs, in products of two 96x96 matrices:
    each call, and each environment of it. `width` and `layers` are the policy's."""

    num_envs: int = 8
    shards: int = 2
    steps: int = 48
    width: int = 64
    layers: int = 2
    call: int = 0
    row: int = 4
    asynchronous: bool = True
    serial: bool = False


class Part:
    """Some environments of `Costly`."""

    def __init__(self, whole: Costly, offset: int, num_envs: int) -> None:
        self.whole, self.offset, self.num_envs = whole, offset, num_envs
        self.native_async = whole.shape.asynchronous
        self.pending: Future[Any] | None = None

    def step_async(self, actions: Any) -> None:
        """Begin a step."""
        actions = np.array(actions)
        if self.native_async:
            self.pending = self.whole.pool.submit(self.whole.advance, self, actions)
        else:
            self.pending = Future()
            self.pending.set_result(self.whole.advance(self, actions))

    def step_wait(self) -> Any:
        """End it."""
        assert self.pending is not None
        found, self.pending = self.pending.result(), None
        return found

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        """Start anew."""
        self.whole.state[self.offset : self.offset + self.num_envs] = 0.1
        return self.whole.state[self.offset : self.offset + self.num_envs].copy(), {}


class Costly:
    """Independent linear systems; what a step costs is set, per call and per environment.

    A step of the whole batch is one call, a step of a part is one too. With `serial` all
    calls queue for one device.
    """

    def __init__(self, shape: Shape) -> None:
        self.shape, self.num_envs = shape, shape.num_envs
        rng = np.random.default_rng(0)
        self.state = np.full((shape.num_envs, OBS), 0.1, np.float32)
        self.dynamics = (0.3 * rng.standard_normal((ACT, OBS))).astype(np.float32)
        self.load = rng.standard_normal((96, 96)).astype(np.float32)
        self.device = threading.Lock()
        self.pool = ThreadPoolExecutor(2)
        per = shape.num_envs // shape.shards
        self.parts = [Part(self, i * per, per) for i in range(shape.shards)]
        self.all = Part(self, 0, shape.num_envs)

    def shards(self) -> list[Part]:
        """The parts."""
        return self.parts

    def merge(self, results: Any) -> Any:
        """The result of the batch from those of its parts."""
        arrays = [np.concatenate(column) for column in zip(*(r[:4] for r in results), strict=True)]
        return (*arrays, {})

    def step(self, actions: Any) -> Any:
        """Step the whole batch in one call."""
        return self.advance(self.all, np.asarray(actions))

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        """Start anew."""
        return self.all.reset()

    def advance(self, part: Part, actions: np.ndarray) -> Any:
        """The step of a part."""
        if self.shape.serial:
            with self.device:
                self.work(part.num_envs)
        else:
            self.work(part.num_envs)
        rows = slice(part.offset, part.offset + part.num_envs)
        self.state[rows] = 0.9 * self.state[rows] + np.tanh(actions @ self.dynamics)
        obs = self.state[rows].copy()
        no = np.zeros(part.num_envs, bool)
        return obs, -np.abs(obs).mean(1), no, no.copy(), {}

    def work(self, rows: int) -> None:
        """What the step costs."""
        for _ in range(self.shape.call + rows * self.shape.row):
            self.load @ self.load

    def close(self) -> None:
        """End the threads."""
        self.pool.shutdown()


def collect(policy: nn.Module, envs: Any, buf: Any, shape: Shape, obs: Any) -> Any:
    """A rollout."""
    for t in range(shape.steps):
        buf.obs[t] = torch.as_tensor(obs)
        with torch.no_grad():
            action = policy(buf.obs[t])
        obs, reward, _terminated, _truncated, _infos = envs.step(action.numpy())
        buf.actions[t] = action
        buf.rewards[t] = torch.as_tensor(reward)
    return obs


def update(policy: nn.Module, optimizer: torch.optim.Optimizer, buf: Any) -> None:
    """One step towards the actions that were rewarded."""
    weight = (buf.rewards - buf.rewards.mean()).unsqueeze(2)
    loss = (weight * (policy(buf.obs) - buf.actions).pow(2)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def iteration(
    policy: nn.Module, optimizer: torch.optim.Optimizer, envs: Any, buf: Any, shape: Shape, obs: Any
) -> tuple[Any]:
    """One iteration."""
    obs = collect(policy, envs, buf, shape, obs)
    update(policy, optimizer, buf)
    return (obs,)


class Buffer:
    """What a rollout leaves."""

    def __init__(self, shape: Shape) -> None:
        size = (shape.steps, shape.num_envs)
        self.obs = torch.zeros(*size, OBS)
        self.actions = torch.zeros(*size, ACT)
        self.rewards = torch.zeros(size)


class Adverse(Workload):
    """One of the set."""

    def __init__(self, name: str, about: str, shape: Shape) -> None:
        self.name, self.about, self.shape = name, about, shape

    def make(self, size: Size = Size(), seed: int = 1) -> Training:  # noqa: B008
        shape = self.shape
        if size.tiny:
            shape = Shape(4, 2, 4, 8, 2, 1, 1, shape.asynchronous, shape.serial)
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for k in range(shape.layers):
            layers += [nn.Linear(OBS if k == 0 else shape.width, shape.width), nn.Tanh()]
        policy = nn.Sequential(*layers, nn.Linear(shape.width, ACT))
        optimizer = torch.optim.SGD(policy.parameters(), lr=1e-3)
        envs = Costly(shape)
        obs, _ = envs.reset()
        args: list[Any] = [policy, optimizer, envs, Buffer(shape), shape, obs]
        return Training(iteration, args, (5,), [envs.close])

    def sequential(self, rollout: int, update_: int, clock: Clock | None = None) -> Function:
        phase = Threads(rollout, update_, clock)

        def run(policy, optimizer, envs, buf, shape, obs):  # type: ignore[no-untyped-def]
            phase.start()
            obs = collect(policy, envs, buf, shape, obs)
            phase.update()
            update(policy, optimizer, buf)
            phase.end()
            return (obs,)

        return run


def adversarial() -> dict[str, Workload]:
    """The set, by name."""
    rows = (
        Adverse(
            "memory-bound",
            "a policy of 100 MB whose halves of a batch each read all weights",
            Shape(num_envs=8, steps=12, width=2048, layers=6, row=8),
        ),
        Adverse(
            "fixed-cost",
            "a simulator on one device that costs the same for any number of environments",
            Shape(num_envs=64, steps=48, width=64, call=120, row=0, serial=True),
        ),
        Adverse(
            "sequential",
            "a rollout of one environment in this thread, 98% of the time",
            Shape(num_envs=1, shards=1, steps=96, width=64, call=120, row=0, asynchronous=False),
        ),
    )
    return {w.name: w for w in rows}
