"""Random trainings that add up a gradient over groups: what :mod:`~rose_compiler.passes.accumulate`
is about.

:func:`groups` draws a :class:`Grouped`, a program as text with its operations bound: a loop that
plays group after group into a buffer, and an update behind it, with random statements in both and
between them that touch the same few states. Losses and gradients are real ones.
"""

# ruff: noqa: E501 (programs as text have long lines)

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from rose_compiler.ir import interp
from rose_compiler.ir.parse import parse
from rose_compiler.ir.program import Program
from rose_compiler.testing.program_pool import Draw
from rose_compiler.testing.programs import Types, frozen
from rose_compiler.testing.rollouts import signatures
from rose_compiler.testing.updates import indented

GROUPS, STEPS = 4, 3
F64 = torch.float64


class Net:
    """A policy of three weights, with real gradients."""

    def __init__(self) -> None:
        self.weight = torch.tensor([0.3, -0.7, 1.1], dtype=F64, requires_grad=True)


class Buffer:
    """What groups leave: rows of observations, one lead each."""

    def __init__(self) -> None:
        self.obs = torch.zeros(GROUPS, STEPS, 3, dtype=F64)
        self.lead = torch.zeros(GROUPS, dtype=F64)


class Optimizer:
    """Plain gradient descent."""

    def __init__(self, net: Net) -> None:
        self.net, self.steps = net, 0


def act(obs: torch.Tensor, net: Net) -> torch.Tensor:
    return obs * 0.5 + net.weight.detach()


def explore(obs: torch.Tensor, net: Net) -> torch.Tensor:
    return act(obs, net) + torch.randn(3, dtype=F64)


def step(action: torch.Tensor, env: list[float]) -> torch.Tensor:
    env.append(env[-1] * 0.5 + float(action.sum()))
    return torch.tensor([env[-1], 1.0, -0.25 * env[-1]], dtype=F64)


def put(buf: Buffer, g: int, t: int, obs: torch.Tensor) -> None:
    buf.obs[g, t] = obs


def compare(buf: Buffer, g: int) -> None:
    buf.lead[g] = buf.obs[g].sum().sin()


def refine(buf: Buffer, g: int) -> None:
    buf.lead[g] *= 1.0 + buf.obs[g, 0, 0].cos()


def whiten(buf: Buffer) -> None:
    buf.lead -= buf.lead.mean()


def measure(buf: Buffer, g: int, norm: list[float]) -> None:
    norm.append(norm[-1] * 0.5 + float(buf.obs[g].abs().max()))


def rescale(norm: list[float]) -> None:
    norm.append(norm[-1] * 0.5)


def note(log: list[float], g: int) -> None:
    log.append(float(g))


def zero_grad(opt: Optimizer) -> None:
    opt.net.weight.grad = None


def opt_step(opt: Optimizer) -> None:
    grad = opt.net.weight.grad
    opt.steps += 1
    if grad is not None:
        opt.net.weight.data.sub_(0.125 * grad)


def seen_of(buf: Buffer, g: int) -> torch.Tensor:
    return buf.obs[g]


def loss_of(obs: torch.Tensor, buf: Buffer, g: int, net: Net) -> torch.Tensor:
    return ((obs * net.weight).tanh().sum(1) * buf.lead[g]).mean()


def loss_of_all(obs: torch.Tensor, buf: Buffer, net: Net) -> torch.Tensor:
    return ((obs * net.weight).tanh().sum(1) * buf.lead.mean()).mean()


def noisy_loss(obs: torch.Tensor, net: Net) -> torch.Tensor:
    return (obs * net.weight * torch.randn(3, dtype=F64)).sum()


def normed_loss(obs: torch.Tensor, net: Net, norm: list[float]) -> torch.Tensor:
    return (obs * net.weight).sin().sum() / (1.0 + abs(norm[-1]))


def back(loss: torch.Tensor) -> None:
    time.sleep(0.0005)  # others may write meanwhile what the graph holds
    loss.backward()


def add(total: float, loss: torch.Tensor) -> float:
    return total + float(loss.detach())


def told(log: list[float], loss: torch.Tensor) -> None:
    log.append(float(loss.detach()))


def peek(log: list[float], net: Net) -> None:
    log.append(0.0 if net.weight.grad is None else float(net.weight.grad.sum()))


def spoil(buf: Buffer, g: int) -> None:
    buf.obs[g] *= 0.5


BIND: dict[str, Any] = {
    one.__name__: one
    for one in (
        *(act, explore, step, put, compare, refine, whiten, measure, rescale, note, zero_grad),
        *(opt_step, seen_of, loss_of, loss_of_all, noisy_loss, normed_loss, back, add, told, peek),
        spoil,
    )
}
SIGNATURES = """
@op(reads=["net.params"], writes=[])
def act(obs, net): ...

@op(reads=["net.params", "rng:torch"], writes=["rng:torch"])
def explore(obs, net): ...

@op(kind="step", reads=["env"], writes=["env"], attributes={"step": {"env": "env", "action": "action"}})
def step(action, env): ...

@op(reads=[], writes=["buf.obs[g, t]"], results=0)
def put(buf, g, t, obs): ...

@op(reads=["buf.obs[g]"], writes=["buf.lead[g]"], results=0)
def compare(buf, g): ...

@op(reads=["buf.obs[g]", "buf.lead[g]"], writes=["buf.lead[g]"], results=0)
def refine(buf, g): ...

@op(reads=["buf.lead"], writes=["buf.lead"], results=0)
def whiten(buf): ...

@op(reads=["buf.obs[g]", "norm"], writes=["norm"], results=0)
def measure(buf, g, norm): ...

@op(reads=["norm"], writes=["norm"], results=0)
def rescale(norm): ...

@op(reads=["log"], writes=["log"], results=0)
def note(log, g): ...

@op(reads=["opt"], writes=["@net.grads"], results=0, calls=["optimizer"])
def zero_grad(opt): ...

@op(reads=["opt", "@net.grads"], writes=["opt", "@net.params"], results=0, calls=["optimizer"])
def opt_step(opt): ...

@op(reads=["buf.obs[g]"], writes=[], attributes={"views": ("buf.obs[g]",)})
def seen_of(buf, g): ...

@op(reads=["net.params", "buf.lead[g]"], writes=[], records=["net.params"])
def loss_of(obs, buf, g, net): ...

@op(reads=["net.params", "buf.lead"], writes=[], records=["net.params"])
def loss_of_all(obs, buf, net): ...

@op(reads=["net.params", "rng:torch"], writes=["rng:torch"], records=["net.params"])
def noisy_loss(obs, net): ...

@op(reads=["net.params", "norm"], writes=[], records=["net.params"])
def normed_loss(obs, net, norm): ...

@op(reads=["@net.grads", "@net.params", "@buf.obs", "@buf.lead"], writes=["@net.grads"], results=0, calls=["backward"], attributes={"through": ("loss",)})
def back(loss): ...

@op(reads=[], writes=[])
def add(total, loss): ...

@op(reads=["log"], writes=["log"], results=0)
def told(log, loss): ...

@op(reads=["log", "net.grads"], writes=["log"], results=0)
def peek(log, net): ...

@op(reads=["buf.obs[g]"], writes=["buf.obs[g]"], results=0)
def spoil(buf, g): ...
"""
#: Statements behind the steps of a group, between the loops, and of an update's trip; what stands
#: behind ``back`` may write what its graph held.
PLAYED = ("measure(buf, g, norm)", "note(log, g)", "refine(buf, g)")
BETWEEN = (
    *("whiten(buf)", "note(log, 7)", "rescale(norm)", "zero_grad(opt)", "peek(log, net)"),
    *(
        "for g in compared({trips}):\n    refine(buf, g)",
        "for g in some(0, 2, 1):\n    note(log, g)",
    ),
    "for g in measured({trips}):\n    measure(buf, g, norm)",
)
LOSSES = (
    *["loss = loss_of(obs, buf, g, net)"] * 6,
    "loss = loss_of_all(obs, buf, net)",
    "loss = loss_of(obs, buf, 0, net)",
    "loss = noisy_loss(obs, net)",
    "loss = normed_loss(obs, net, norm)",
)
BEHIND = ("told(log, loss)", "peek(log, net)", "spoil(buf, g)", "note(log, g)", "opt_step(opt)")


@dataclass
class Grouped:
    """A random training as text."""

    text: str

    def program(self) -> Program:
        """A fresh program with the types of its values, as they are known after a first trip."""
        program = parse(self.text, BIND)
        self.run(lambda p, values, objects: interp.run(p, values, objects, hooks=Types()), program)
        return program

    def run(
        self, run: Callable[[Program, dict[str, Any], dict[str, Any]], Any], of: Program
    ) -> Any:
        """Everything that can be seen after ``run(program, values, objects)`` on fresh objects."""
        net, buf = Net(), Buffer()
        opt = Optimizer(net)
        lists: dict[str, Any] = {"env": [0.5], "norm": [1.0], "log": [1.0]}
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(3)
            start = torch.tensor([0.25, 1.0, -0.5], dtype=F64)
            result = run(of, {"obs0": start}, {**lists, "net": net, "buf": buf, "opt": opt})
            rng = torch.get_rng_state()
        grad = net.weight.grad
        kept = [net.weight.detach(), grad, buf.obs, buf.lead, opt.steps]
        return frozen(result), frozen(lists), frozen(kept), frozen(rng)


@st.composite
def groups(draw: Draw) -> Grouped:
    """Random trainings of a few groups and epochs."""

    def some(options: tuple[str, ...], most: int) -> list[str]:
        return draw(st.lists(st.sampled_from(options), max_size=most, unique=True))

    def chance(one_in: int) -> bool:
        return draw(st.integers(1, one_in)) == one_in

    count = draw(st.sampled_from([4, 4, 4, 3, 2, 1]))
    trips = f"0, {count}, 1"
    played = [
        "for t, obs in trips(0, 3, 1, obs=obs0):",
        *indented(
            [
                f"action = {'explore' if chance(3) else 'act'}(obs, net)",
                "put(buf, g, t, obs)",
                "seen = step(action, env)",
                "yield seen",
            ]
        ),
        "compare(buf, g)",
        *some(PLAYED, 2),
    ]
    row = "g" if not chance(6) else draw(st.sampled_from(["0", "1", "3"]))
    trained = [
        *["zero_grad(opt)"] * chance(12),
        f"obs = seen_of(buf, {row}) @ facts(alias=['buf.obs'])".replace("'", '"'),
        draw(st.sampled_from(LOSSES)),
        *["told(log, loss)"] * chance(5),
        "back(loss)",
        *[s for s in some(BEHIND, 2) if s != "opt_step(opt)" or chance(3)],
        "more = add(total, loss)",
        "yield more",
    ]
    between = [s.format(trips=trips) for s in some(BETWEEN, 2)] if chance(2) else []
    epochs = draw(st.sampled_from([0, 1, 1, 2, 3]))
    start = "0.0" if not epochs else "total"
    update = [
        *["zero_grad(opt)"] * (not chance(8)),
        f"for g, total in again({trips}, total={start}):",
        *indented(trained),
        "opt_step(opt)",
    ]
    if epochs:
        update = [
            f"for e, total in epochs(0, {epochs}, 1, total=0.0):",
            *indented([*update, "yield again.total"]),
        ]
    lines = [
        f"for g in played({trips}):",
        *indented(played),
        *[part for s in between for part in s.split("\n")],
        *update,
        f"return {'epochs' if epochs else 'again'}.total",
    ]
    body = "\n".join(indented(lines))
    head = "def train(obs0, *, net, env, buf, opt, norm, log):\n"
    return Grouped(signatures(SIGNATURES, body) + "\n" + head + body + "\n")
