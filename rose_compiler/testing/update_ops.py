"""The operations of random trainings that update an actor on some trips only, and what they say that
they read and write."""

# ruff: noqa: E501 (programs as text have long lines)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Net = list[float]


class Envs:
    """A simulator of one environment. ``lends``: each observation is its own buffer, which the next
    step overwrites."""

    def __init__(self, *, lends: bool) -> None:
        self.lends = lends
        self.trace = [0.5]
        self.outputs = torch.zeros(2, dtype=torch.float64)

    def step(self, action: float) -> tuple[torch.Tensor, float]:
        self.trace.append(self.trace[-1] * 0.5 + action)
        self.outputs[0], self.outputs[1] = self.trace[-1], -action
        return self.outputs if self.lends else self.outputs.clone(), self.trace[-1] * 0.25


def _uniform() -> float:
    return float(torch.rand((), dtype=torch.float64))


def act(obs: torch.Tensor, actor: Net) -> float:
    return float(obs[0]) * 0.3 + actor[-1]


def explore(obs: torch.Tensor, actor: Net) -> float:
    return act(obs, actor) + 0.125 * _uniform()


def add(buf: Net, obs: torch.Tensor, reward: float) -> None:
    buf.append(float(obs.sum()) + reward)


def sample(buf: Net) -> tuple[float, float]:
    return buf[-1], buf[len(buf) // 2]


def choose(buf: Net) -> tuple[float, float]:
    return buf[int(_uniform() * len(buf))], buf[-1]


def train_critic(a: float, b: float, critic: Net) -> float:
    critic.append(critic[-1] * 0.9 + 0.01 * (a + b))
    return critic[-1]


def train_actor(a: float, critic: Net, actor: Net) -> float:
    actor.append(actor[-1] * 0.9 + 0.01 * (a + critic[-1]))
    return actor[-1]


def follow(target: Net, critic: Net) -> None:
    target.append(target[-1] * 0.75 + critic[-1] * 0.25)


def shrink(net: Net) -> None:
    net.append(net[-1] * 0.875)


def peek(net: Net) -> float:
    return net[-1] + len(net)


def note(log: list[Any], x: float, y: float) -> None:
    log.append((x, y))


def shown(log: list[Any], x: float) -> None:
    log.append(x)


def store(buf: Net, x: float) -> None:
    buf.append(x)


def blend(x: float, y: float) -> float:
    return x * 0.5 - y


def wobble(x: float) -> float:
    return x + _uniform()


def fresh(x: float) -> Net:
    return [x]


def poke(cell: Net, x: float) -> None:
    cell[0] = cell[0] * 0.5 + x


def count(n: int) -> int:
    return n + 1


def warm(t: int) -> bool:
    return t > 1


def due(t: int) -> bool:
    return t % 3 == 0


def full(log: list[Any]) -> bool:
    return len(log) % 3 == 0


def over(t: int) -> bool:
    return t == 5


BIND: dict[str, Callable[..., Any]] = {
    **{
        f.__name__: f
        for f in (
            *(act, explore, add, sample, choose, train_critic, train_actor, follow, shrink, peek),
            *(note, shown, store, blend, wobble, fresh, poke, count, warm, due, full, over),
        )
    },
    "step": lambda action, envs: envs.step(action),
    "unpack": tuple,
    "own": lambda x: x.clone(),
}
_PURE = "@op(reads=[], writes=[], may_raise=False)"
_DRAWS = 'reads=["rng:torch"], writes=["rng:torch"]'
SIGNATURES = f"""
@op(reads=["actor"], writes=[])
def act(obs, actor): ...

@op(reads=["actor", "rng:torch"], writes=["rng:torch"])
def explore(obs, actor): ...

@op(kind="step", reads=["envs"], writes=["envs"], attributes={{"step": {{"env": "envs", "action": "action"}}}})
def step(action, envs): ...

@op(reads=[], writes=[], results=2)
def unpack(r): ...

@op(reads=["x"], writes=[])
def own(x): ...

@op(reads=["buf"], writes=["buf"], results=0)
def add(buf, obs, reward): ...

@op(reads=["buf"], writes=[], results=2)
def sample(buf): ...

@op(reads=["buf", "rng:torch"], writes=["rng:torch"], results=2)
def choose(buf): ...

@op(reads=["critic"], writes=["critic"], calls=["backward", "optimizer"])
def train_critic(a, b, critic): ...

@op(reads=["critic", "actor"], writes=["actor"], calls=["backward", "optimizer"])
def train_actor(a, critic, actor): ...

@op(reads=["target", "critic"], writes=["target"], results=0)
def follow(target, critic): ...

@op(reads=["net"], writes=["net"], results=0)
def shrink(net): ...

@op(reads=["net"], writes=[])
def peek(net): ...

@op(reads=["log"], writes=["log"], results=0)
def note(log, x, y): ...

@op(reads=["log"], writes=["log", "host"], results=0)
def shown(log, x): ...

@op(reads=["buf"], writes=["buf"], results=0)
def store(buf, x): ...

{_PURE}
def blend(x, y): ...

@op({_DRAWS})
def wobble(x): ...

{_PURE}
def fresh(x): ...

@op(reads=["cell"], writes=["cell"], results=0)
def poke(cell, x): ...

{_PURE}
def count(n): ...

{_PURE}
def warm(t): ...

{_PURE}
def due(t): ...

@op(reads=["log"], writes=[], may_raise=False)
def full(log): ...

{_PURE}
def over(t): ...
"""
