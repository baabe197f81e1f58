"""Training loops with components in hosts of their own, for tests."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn

import rose_compiler

#: Opened when training goes on.
GATE = threading.Event()


class Evaluator:
    """Scores a policy on inputs of its own. If ``waits``, once training goes on."""

    def __init__(self, waits: bool = False) -> None:
        self.net = nn.Linear(3, 2)
        self.inputs = torch.linspace(-1, 1, 12).reshape(4, 3)
        self.waits = waits
        self.beside = 0

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.net.load_state_dict(state)

    def evaluate(self, scale: float) -> float:
        if self.waits:
            self.beside += GATE.wait(5)
            GATE.clear()
        with torch.no_grad():
            return float(self.net(self.inputs).sum()) * scale

    def both(self, scale: float) -> tuple[float, torch.Tensor]:
        return self.evaluate(scale), self.net(self.inputs)

    def overlapped(self) -> int:
        return self.beside

    def boom(self) -> float:
        raise ValueError("no score")


def make_evaluator() -> Evaluator:
    return Evaluator()


class Signal:
    """Tells a waiting evaluator that training goes on."""

    @rose_compiler.component(reads=["self"], writes=["self"])
    def go_on(self) -> None:
        GATE.set()


class Setup:
    """Everything that the loops take, made from one seed."""

    def __init__(self, evaluator: Any) -> None:
        evaluator.ready()  # in a thread, it draws from this process's generator as it is built
        torch.manual_seed(3)
        self.policy = nn.Sequential(nn.Linear(3, 2))
        self.signal = Signal()
        self.opt = torch.optim.SGD(self.policy.parameters(), lr=0.05)
        self.data = torch.randn(6, 8, 3)
        self.evaluator = evaluator
        self.log: list[Any] = []

    def args(self) -> tuple[Any, ...]:
        return (self.policy[0], self.signal, self.opt, self.data, self.evaluator, self.log)


def evaluated(policy: Any, signal: Any, opt: Any, data: Any, evaluator: Any, log: Any) -> float:
    """One iteration that evaluates the policy it begins with."""
    evaluator.publish(policy)
    score = evaluator.evaluate(2.0)
    signal.go_on()
    for i in range(6):
        loss = (policy(data[i]) ** 2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    log.append(score)
    return loss.item()


def unpacked(policy: Any, signal: Any, opt: Any, data: Any, evaluator: Any, log: Any) -> float:
    """The same with two results."""
    evaluator.publish(policy)
    score, out = evaluator.both(scale=2.0)
    signal.go_on()
    for i in range(6):
        loss = (policy(data[i]) ** 2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    log.append((score, out.sum().item()))
    return loss.item()


def failing(policy: Any, signal: Any, opt: Any, data: Any, evaluator: Any, log: Any) -> float:
    """The component raises."""
    evaluator.publish(policy)
    score = evaluator.boom()
    signal.go_on()
    for i in range(6):
        loss = (policy(data[i]) ** 2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    log.append(score)
    return loss.item()


def sometimes(
    it: int, policy: Any, signal: Any, opt: Any, data: Any, evaluator: Any, log: Any
) -> float:
    """Evaluates on every second iteration."""
    if it % 2 == 0:
        evaluator.publish(policy)
        score = evaluator.evaluate(2.0)
        log.append((it, score))
    signal.go_on()
    for i in range(6):
        loss = (policy(data[i]) ** 2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    return loss.item()


def whole(
    it: int, policy: Any, signal: Any, opt: Any, data: Any, evaluator: Any, log: Any
) -> tuple[float, Any]:
    """The same, its result used late."""
    score = None
    if it % 2 == 0:
        evaluator.publish(policy)
        score = evaluator.evaluate(2.0)
    signal.go_on()
    for i in range(6):
        loss = (policy(data[i]) ** 2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    if score is not None:
        log.append((it, score))
    return loss.item(), score


def failing_sometimes(
    it: int, policy: Any, signal: Any, opt: Any, data: Any, evaluator: Any, log: Any
) -> float:
    """The component raises, on every second iteration."""
    if it % 2 == 0:
        score = evaluator.boom()
        log.append((it, score))
    for i in range(6):
        loss = (policy(data[i]) ** 2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    return loss.item()


def train(n: int, policy: Any, opt: Any, data: Any, evaluator: Any, log: Any) -> None:
    """A whole training that evaluates on every third iteration."""
    for it in range(n):
        if it % 3 == 0:
            evaluator.publish(policy)
            log.append((it, evaluator.evaluate(2.0)))
        for i in range(6):
            loss = (policy(data[i]) ** 2).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
