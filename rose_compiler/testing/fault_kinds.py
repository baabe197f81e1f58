"""The kinds of faults that are put into trainings, and the trainings (:mod:`faults` does it)."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from rose_compiler.base.errors import HostDied, HostTimeout, RuntimeFault
from rose_compiler.sim import ShardedEnv
from rose_compiler.testing.robots import Fallen, Sealed

#: The user's own time limit of a step, where a simulator hangs.
TIMEOUT = 0.5
STEPS, ENVS = 5, 4
#: Calls in which a planned fault has to come.
CALLS = 3
Hosts = Literal["thread", "process"]


class Stopped(RuntimeError):
    """What the agent raises: a type of the user's own."""


@dataclass
class Agent:
    """A policy, a trainer and a log. ``plan`` says which call of which method fails, and how."""

    net: torch.nn.Module = field(default_factory=lambda: torch.nn.Linear(2, 1))
    plan: dict[str, tuple[int, Callable[[], None]]] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    log: list[float] = field(default_factory=list)
    failed: float = 0.0  # when it did, by the monotonic clock

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)

    def due(self, name: str) -> None:
        """Count a call, and fail if it is the planned one."""
        self.calls[name] = self.calls.get(name, 0) + 1
        at, what = self.plan.get(name, (-1, None))
        if self.calls[name] == at and what is not None:
            self.failed = time.monotonic()
            what()

    def act(self, obs: torch.Tensor) -> torch.Tensor:
        self.due("act")
        with torch.no_grad():
            return torch.tanh(self.net(obs))

    def record(self, reward: np.ndarray) -> None:
        self.due("record")
        self.log.append(float(reward.sum()))

    def update(self, observations: list[torch.Tensor]) -> float:
        self.due("update")
        loss = (self.net(torch.cat(observations)) ** 2).mean()
        self.optimizer.zero_grad()
        if "nan" in self.plan and len(self.log) > self.plan["nan"][0]:
            loss = torch.sqrt(loss * 0 - 1)
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())


def train(env: ShardedEnv, agent: Agent, obs: np.ndarray) -> tuple[np.ndarray, float]:
    """One iteration: a rollout and an update."""
    kept: list[torch.Tensor] = []
    for _ in range(STEPS):
        seen = torch.as_tensor(obs)
        kept.append(seen)
        action = agent.act(seen).numpy()
        obs, reward, _, _, _ = env.step(action)
        agent.record(reward)
    return obs, agent.update(kept)


def judged(env: ShardedEnv, agent: Agent, obs: np.ndarray, judge: Any) -> tuple[np.ndarray, float]:
    """One iteration that a component in a host of its own scores meanwhile."""
    score = judge.score(1.0)
    obs, loss = train(env, agent, obs)
    agent.log.append(score)
    return obs, loss


@dataclass(frozen=True)
class Scene:
    """What a training is called with. ``judge``: a component in a host, where there is one."""

    env: ShardedEnv
    agent: Agent
    judge: Any = None

    def calm(self) -> None:
        """Plan nothing any more: of two faults that were planned, one has not come yet."""
        self.agent.plan.clear()
        self.env.call("calm")
        if self.judge is not None:
            self.judge.calm()


Plant = Callable[[Scene, random.Random], None]


@dataclass(frozen=True)
class Fault:
    """One kind of fault: what is planted, and the error that has to come of it. ``lost``: the
    simulator, or the component, is gone afterwards whatever happens; ``hosts`` it can occur in.
    ``judged``: the host is that of a component, and the simulator is in this thread."""

    name: str
    plant: Plant
    expected: tuple[type[BaseException], ...]
    lost: bool
    hosts: tuple[Hosts, ...] = ("thread", "process")
    timeout: float | None = None
    tune: bool = False
    profile: bool = False
    judged: bool = False


def _in_shard(how: str) -> Plant:
    def plant(scene: Scene, draw: random.Random) -> None:
        scene.env.call("arm", draw.randrange(ENVS), how, draw.randrange(2 * STEPS))

    return plant


def _in_judge(how: str) -> Plant:
    def plant(scene: Scene, draw: random.Random) -> None:
        scene.judge.arm(how, draw.randrange(CALLS))

    return plant


def _hanging(scene: Scene, draw: random.Random) -> None:
    """All shards hang in one step, with no limit to that, and the agent raises beside them."""
    for index in range(ENVS):
        scene.env.call("arm", index, "hang", 1)
    _in_agent(lambda: Stopped("the agent stopped"))(scene, draw)


def _raise(error: Callable[[], BaseException]) -> Callable[[], None]:
    def fail() -> None:
        raise error()

    return fail


def _in_agent(error: Callable[[], BaseException]) -> Plant:
    def plant(scene: Scene, draw: random.Random) -> None:
        name = draw.choice(["act", "record", "update"])
        later = 1 if name == "update" else draw.randint(1, STEPS)
        scene.agent.plan[name] = (scene.agent.calls.get(name, 0) + later, _raise(error))

    return plant


def _both(first: Plant, second: Plant) -> Plant:
    def plant(scene: Scene, draw: random.Random) -> None:
        first(scene, draw)
        second(scene, draw)

    return plant


def _interrupt(scene: Scene, draw: random.Random) -> None:
    name = draw.choice(["act", "record", "update"])

    def press() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    scene.agent.plan[name] = (scene.agent.calls.get(name, 0) + 1, press)


def _nan(scene: Scene, draw: random.Random) -> None:
    scene.agent.plan["nan"] = (len(scene.agent.log), _raise(lambda: Stopped("unused")))


_STOPPED = _in_agent(lambda: Stopped("the agent stopped"))


def _component(
    name: str, how: str, expected: tuple[type[BaseException], ...], lost: bool = False, **more: Any
) -> Fault:
    return Fault(name, _in_judge(how), expected, lost, judged=True, **more)


#: The kinds of faults by name.
FAULTS: dict[str, Fault] = {
    f.name: f
    for f in (
        Fault("shard", _in_shard("raise"), (Fallen,), lost=True),
        Fault("coordinator", _in_agent(lambda: Stopped("stopped")), (Stopped,), lost=False),
        Fault("two at once", _both(_in_shard("raise"), _STOPPED), (Fallen, Stopped), lost=False),
        Fault("SIGKILL", _in_shard("kill"), (HostDied,), lost=True, hosts=("process",)),
        Fault("Ctrl-C", _interrupt, (KeyboardInterrupt,), lost=False),
        Fault("MemoryError", _in_agent(lambda: MemoryError("full")), (MemoryError,), lost=False),
        Fault("MemoryError in a shard", _in_shard("memory"), (MemoryError,), lost=True),
        Fault("NaN, anomaly detection", _nan, (RuntimeError,), lost=False),
        Fault("hang", _in_shard("hang"), (HostTimeout,), lost=True, timeout=TIMEOUT),
        Fault("all hang, coordinator", _hanging, (Stopped,), lost=False),
        Fault("unpicklable", _in_shard("sealed"), (RuntimeFault, Sealed), lost=True),
        Fault("while tuning", _in_shard("raise"), (Fallen,), lost=True, tune=True),
        Fault("while tuning, agent", _STOPPED, (Stopped,), lost=False, tune=True),
        Fault("while profiling", _in_shard("raise"), (Fallen,), lost=True, profile=True),
        Fault("while profiling, agent", _STOPPED, (Stopped,), lost=False, profile=True),
        _component("component", "raise", (Fallen,)),
        _component("component, SIGKILL", "kill", (HostDied,), lost=True, hosts=("process",)),
        _component("component, hang", "hang", (HostTimeout,), lost=True, timeout=TIMEOUT),
        _component("component, unpicklable", "sealed", (RuntimeFault, Sealed)),
        _component("component, MemoryError", "memory", (MemoryError,)),
        _component("component, while tuning", "raise", (Fallen,), tune=True),
        _component("component, while profiling", "raise", (Fallen,), profile=True),
        Fault(
            "component and coordinator",
            _both(_in_judge("raise"), _STOPPED),
            (Fallen, Stopped),
            lost=False,
            judged=True,
        ),
    )
}
