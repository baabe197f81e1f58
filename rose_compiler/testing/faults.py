"""Faults put into compiled trainings at random points, and what has to be true afterwards.

A training over a sharded simulator in threads or processes runs well for a while. Then something
fails: in a shard, on the coordinator, in both, from outside. :func:`inject` does that once and says
what was wrong about how it ended. It has to end in one error of the expected type within
:data:`LIMIT` seconds, leave no thread, process or shared memory behind, and the next call has to
work, or to name the state that is lost.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import torch

from rose_compiler.api import compile as compile_
from rose_compiler.base.decision import Decision
from rose_compiler.base.errors import HostDied, HostTimeout, RuntimeFault
from rose_compiler.sim import ShardedEnv
from rose_compiler.testing.robots import Fallen, Robot, Sealed

#: Seconds from a fault's detection to the error in the user's hands.
LIMIT = 5.0
#: Seconds that threads and processes get to come to their end.
SETTLE = 5.0
#: The user's own time limit of a step, where a simulator hangs.
TIMEOUT = 0.5
STEPS, ENVS = 5, 4
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

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)

    def due(self, name: str) -> None:
        """Count a call, and fail if it is the planned one."""
        self.calls[name] = self.calls.get(name, 0) + 1
        at, what = self.plan.get(name, (-1, None))
        if self.calls[name] == at and what is not None:
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


@dataclass(frozen=True)
class Fault:
    """One kind of fault: what is planted, and the error that has to come of it. ``lost``: the
    simulator is gone afterwards whatever happens; ``hosts`` it can occur in."""

    name: str
    plant: Callable[[ShardedEnv, Agent, random.Random], None]
    expected: tuple[type[BaseException], ...]
    lost: bool
    hosts: tuple[Hosts, ...] = ("thread", "process")
    timeout: float | None = None
    tune: bool = False


@dataclass(frozen=True)
class Outcome:
    """How one fault ended. ``wrong`` is empty where all was as it has to be."""

    fault: str
    hosts: Hosts
    error: str
    seconds: float
    wrong: str = ""
    hung: bool = False


def _in_shard(how: str) -> Callable[[ShardedEnv, Agent, random.Random], None]:
    def plant(env: ShardedEnv, agent: Agent, draw: random.Random) -> None:
        env.call("arm", draw.randrange(ENVS), how, draw.randrange(2 * STEPS))

    return plant


def _raise(error: Callable[[], BaseException]) -> Callable[[], None]:
    def fail() -> None:
        raise error()

    return fail


def _in_agent(
    error: Callable[[], BaseException],
) -> Callable[[ShardedEnv, Agent, random.Random], None]:
    def plant(env: ShardedEnv, agent: Agent, draw: random.Random) -> None:
        name = draw.choice(["act", "record", "update"])
        later = 1 if name == "update" else draw.randint(1, STEPS)
        agent.plan[name] = (agent.calls.get(name, 0) + later, _raise(error))

    return plant


def _two(env: ShardedEnv, agent: Agent, draw: random.Random) -> None:
    _in_shard("raise")(env, agent, draw)
    _in_agent(lambda: Stopped("the agent stopped"))(env, agent, draw)


def _interrupt(env: ShardedEnv, agent: Agent, draw: random.Random) -> None:
    name = draw.choice(["act", "record", "update"])

    def press() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    agent.plan[name] = (agent.calls.get(name, 0) + 1, press)


def _nan(env: ShardedEnv, agent: Agent, draw: random.Random) -> None:
    agent.plan["nan"] = (len(agent.log), _raise(lambda: Stopped("unused")))


#: The kinds of faults by name.
FAULTS: dict[str, Fault] = {
    f.name: f
    for f in (
        Fault("shard", _in_shard("raise"), (Fallen,), lost=True),
        Fault("coordinator", _in_agent(lambda: Stopped("stopped")), (Stopped,), lost=False),
        Fault("two at once", _two, (Fallen, Stopped), lost=False),
        Fault("SIGKILL", _in_shard("kill"), (HostDied,), lost=True, hosts=("process",)),
        Fault("Ctrl-C", _interrupt, (KeyboardInterrupt,), lost=False),
        Fault("MemoryError", _in_agent(lambda: MemoryError("full")), (MemoryError,), lost=False),
        Fault("MemoryError in a shard", _in_shard("memory"), (MemoryError,), lost=True),
        Fault("NaN, anomaly detection", _nan, (RuntimeError,), lost=False),
        Fault("hang", _in_shard("hang"), (HostTimeout,), lost=True, timeout=TIMEOUT),
        Fault("unpicklable", _in_shard("sealed"), (RuntimeFault, Sealed), lost=True),
        Fault("while tuning", _in_shard("raise"), (Fallen,), lost=True, tune=True),
        Fault(
            "while tuning, agent", _in_agent(lambda: Stopped("no")), (Stopped,), False, tune=True
        ),
    )
}


def inject(fault: Fault, hosts: Hosts, seed: int) -> Outcome:
    """Run a training until a fault ends it, and look at what is left."""
    draw = random.Random(f"{fault.name} {hosts} {seed}")
    torch.manual_seed(seed)
    before = _left()
    env = ShardedEnv.split(
        [partial(Robot, k) for k in range(ENVS)],
        shards=draw.choice([2, 4]),
        hosts=hosts,
        timeout=fault.timeout,
    )
    agent = Agent()
    decision = Decision(
        groups=draw.choice([0, 2]),
        late=draw.choice(["shadow", "inline"]),
        lanes=draw.choice(["native", "thread", "inline"]),
    )
    with TemporaryDirectory() as folder:
        chosen = Path(folder) / "decision.json"
        decision.save(chosen)
        compiled = compile_(train, tune=True if fault.tune else chosen)
        outcome = Outcome(fault.name, hosts, "", 0.0)
        try:
            obs, _ = env.reset(seed=seed)
            # a fault while tuning comes early, others when the schedule is in force
            for _ in range(draw.randint(1, 2) if fault.tune else 2):
                obs, _ = compiled(env, agent, obs)
            outcome = _fail(fault, outcome, lambda: compiled(env, agent, obs), env, agent, draw)
            if not outcome.wrong:
                agent.plan.clear()
                wrong = _again(fault, env, lambda: compiled(env, agent, obs))
                outcome = replace(outcome, wrong=wrong)
        finally:
            compiled.close()
            env.close()
    left = _settled(before)
    if left and not outcome.wrong:
        outcome = replace(outcome, wrong=f"left behind: {', '.join(left)}")
    return outcome


def _fail(
    fault: Fault,
    outcome: Outcome,
    call: Callable[[], Any],
    env: ShardedEnv,
    agent: Agent,
    draw: random.Random,
) -> Outcome:
    fault.plant(env, agent, draw)
    anomaly = fault.name.startswith("NaN")
    begin = time.monotonic()
    try:
        with torch.autograd.set_detect_anomaly(anomaly):
            for _ in range(3):  # a step planned for later comes in a later iteration
                begin = time.monotonic()
                call()
    except BaseException as error:  # Ctrl-C among them; whatever comes is looked at
        seconds = time.monotonic() - begin
        told = f"{type(error).__name__}: {error}".splitlines()[0]
        wrong = ""
        if not isinstance(error, fault.expected):
            names = " or ".join(e.__name__ for e in fault.expected)
            wrong = f"expected {names}, got {told}"
        late = seconds > LIMIT + (fault.timeout or 0.0)
        if late:
            wrong = wrong or f"took {seconds:.1f} s"
        return replace(outcome, error=told, seconds=seconds, wrong=wrong, hung=late)
    return replace(outcome, wrong="nothing was raised")


def _again(fault: Fault, env: ShardedEnv, call: Callable[[], Any]) -> str:
    """What is wrong about the next call."""
    try:
        env.call("calm")  # of two that were planned, the other one has not come yet
        call()
    except RuntimeFault as error:
        # the simulator was in a step that failed, or that nobody will wait for any more
        return "" if "lost" in str(error) or "closed" in str(error) else f"then: {error}"
    except BaseException as error:
        return f"the next call raised {type(error).__name__}: {error}"
    return "the next call worked on a simulator that is lost" if fault.lost else ""


def _left() -> set[str]:
    """Threads and processes of ours, and shared memory."""
    found = {f"thread {t.name}" for t in threading.enumerate() if t.name.startswith("rose")}
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    for pid in children.read_text().split() if children.exists() else ():
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if b"rose_compiler" in command:
            found.add(f"process {pid}")
    shared = Path("/dev/shm")
    if shared.exists():
        found |= {f"shared memory {p.name}" for p in shared.iterdir() if "rose" in p.name}
    return found


def _settled(before: set[str]) -> list[str]:
    """What is left behind after a while that was not there before."""
    deadline = time.monotonic() + SETTLE
    while (left := _left() - before) and time.monotonic() < deadline:
        time.sleep(0.02)
    return sorted(left)


def cases(count: int, seed: int) -> list[tuple[Fault, Hosts, int]]:
    """So many faults, each kind in each of its hosts in turn."""
    kinds = [(f, h) for f in FAULTS.values() for h in f.hosts]
    return [(*kinds[k % len(kinds)], seed + k) for k in range(count)]
