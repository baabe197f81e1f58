"""What the first trip shows of which operations record autograd graphs, and from what."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from rose_compiler.ir.deps import why
from rose_compiler.ir.program import Program, is_call, op_of
from rose_compiler.testing.capturing import first_trip


class Agent:
    def __init__(self) -> None:
        self.net = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
        self.scale = torch.ones(2, requires_grad=True)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)


def update(agent: Agent, x: torch.Tensor) -> Any:
    with torch.no_grad():
        quiet = agent.net(x)
    choice = agent.net(x).argmax(1)
    kept = []
    total = 0.0
    for _ in range(2):
        h = agent.net(x)
        kept.append(h.sum())
        total = total + h.mean()
    both = torch.stack(kept).sum() + total
    own = agent.scale * 2
    wanted = x.clone().requires_grad_()
    slope = torch.autograd.grad(agent.net(wanted).sum(), wanted, create_graph=True)[0]
    loss = both + own.sum() + slope.square().sum()
    agent.optimizer.zero_grad()
    loss.backward()
    agent.net.requires_grad_(False)
    agent.optimizer.step()
    agent.net.requires_grad_(True)
    return quiet, choice


@pytest.fixture(scope="module")
def program() -> Program:
    return first_trip(update, Agent(), torch.randn(3, 2)).captured.program


def called(program: Program, text: str) -> Any:
    found = [
        n for n in program.nodes() if is_call(n) and any(text in line for line in op_of(n).source)
    ]
    assert found, text
    return found[0]


@pytest.mark.parametrize(
    ("text", "records"),
    [
        ("quiet =", ()),
        ("choice =", ()),
        ("h = ", ("x", "agent.net.params")),
        # a number at first, then what the trip before has recorded
        ("total = total", ("h", "total")),
        ("kept.append(", ("*",)),
        ("both =", ("*",)),
        ("own =", ("*",)),
        ("slope =", ("*",)),
        ("optimizer.step()", ()),
    ],
)
def test_what_an_operation_records_from(program: Program, text: str, records: Any) -> None:
    assert op_of(called(program, text)).signature.records == records


def test_backward_looks_at_requires_grad(program: Program) -> None:
    backward = called(program, "loss.backward()")
    for text in ("requires_grad_(False)", "requires_grad_(True)"):
        assert why(program, backward, called(program, text)) is not None


class Partly(nn.Module):
    """Reads one of its parameters only, so that it is a state by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.spare = nn.Linear(2, 2), nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def frozen(net: Partly, x: torch.Tensor) -> None:
    for p in net.parameters():
        p.requires_grad_(False)
    y = net(x)
    for p in net.parameters():
        p.requires_grad_(True)
    y.requires_grad_(True).sum().backward()


def test_a_forward_looks_at_what_each_parameter_asks_for() -> None:
    program = first_trip(frozen, Partly(), torch.randn(3, 2)).captured.program
    forward = called(program, "y = net(x)")
    for text in ("requires_grad_(False)", "p.requires_grad_(True)"):
        assert why(program, forward, called(program, text)) is not None


class Rebuilt:
    """Holds an optimizer that a method may make anew."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net
        self.build()

    def build(self) -> None:
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.1)


def of_its_own(net: nn.Module, agent: Rebuilt, x: torch.Tensor) -> None:
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for k in range(3):
        loss = net(x).sum()
        opt.zero_grad()
        agent.opt.zero_grad()
        loss.backward()
        opt.step()
        agent.opt.step()
        if k == 1:
            agent.build()


def test_an_optimizer_of_which_only_the_type_is_known_writes_what_networks_read() -> None:
    net = nn.Linear(2, 2)
    program = first_trip(of_its_own, net, Rebuilt(net), torch.randn(3, 2)).captured.program
    for text in ("opt.step()", "agent.opt.step()"):
        assert why(program, called(program, "loss = "), called(program, text)) is not None
    for text in ("opt.zero_grad()", "agent.opt.zero_grad()"):
        assert why(program, called(program, text), called(program, "loss.backward()")) is not None
