"""Numbers that a call of which nothing is known may change while graphs that hold them run."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gymnasium.vector import SyncVectorEnv
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

import rose_compiler
from tests.api.loops import Drift


class Net(nn.Module):
    """Scales by numbers of its own, of its class and of a dict."""

    of_class = 1.0

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 3)
        self.noise, self.calls, self.steady, self.rounds = 1.0, 0, 1.0, 1
        self.cfg = {"scale": 1.0}

    def anneal(self) -> None:
        self.noise *= 0.9

    def more(self) -> None:
        self.rounds, self.noise = 3 - self.rounds, self.noise * 0.9

    def aside(self) -> None:
        shrink(self)

    def late(self) -> None:
        self.calls += 1
        if self.calls == 5:
            self.noise = 0.3


class Noisy(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.noise


class Scaled(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.cfg["scale"]


class Shared(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * Net.of_class


def decay() -> float:
    return 0.9


class Attributed(Net):
    def forward(self, x: Tensor) -> Tensor:
        scale: float = decay.scale  # type: ignore[attr-defined]
        return self.layer(x) * scale


class Steady(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.steady


class Asking(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * getattr(self, "temperature", 1.0)


class Run:
    """What a training holds."""

    def __init__(self, net: Net) -> None:
        Net.of_class = vars(decay)["scale"] = 1.0
        self.net, self.sim = net, SyncVectorEnv([Drift, Drift])
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        self.obs = torch.as_tensor(self.sim.reset(seed=1)[0])
        self.actions = torch.zeros(3, 2, 3)

    def step(self, t: int, h: Tensor) -> Tensor:
        self.actions[t] = h
        return torch.as_tensor(self.sim.step(torch.tanh(h).numpy())[0])

    def act(self, t: int, obs: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.net(obs)
        return self.step(t, h)


def by_name(run: Run) -> None:
    obs = run.obs
    for t in range(3):
        with torch.no_grad():
            h = run.net(obs)
        obs = run.step(t, h)
        operator.methodcaller("anneal")(run.net)


def aside(run: Run) -> None:
    obs = run.obs
    for t in range(3):
        obs = run.act(t, obs)
        next(map(operator.methodcaller("as" + "ide"), [run.net]), None)


def late(run: Run) -> None:
    obs = run.obs
    for t in range(3):
        obs = run.act(t, obs)
        operator.methodcaller("late")(run.net)


def in_front(run: Run) -> None:
    operator.methodcaller("anneal")(run.net)
    obs = run.obs
    for t in range(3):
        obs = run.act(t, obs)


def as_text(run: Run) -> None:
    obs = run.obs
    for t in range(3):
        obs = run.act(t, obs)
        shrink_item(run.net)


def shrink_item(net: Net) -> None:
    exec("net.cfg['scale'] *= 0.9", {"net": net})


def of_class(run: Run) -> None:
    obs = run.obs
    for t in range(3):
        obs = run.act(t, obs)
        Net.of_class *= 0.9


def of_function(run: Run) -> None:
    obs = run.obs
    for t in range(3):
        obs = run.act(t, obs)
        decay.scale *= decay()  # type: ignore[attr-defined]


def shrink(net: Net) -> None:
    net.noise *= 0.9


def counted(run: Run) -> None:
    obs = run.obs
    for _ in range(2):
        for t in range(run.net.rounds):
            obs = run.act(t, obs)
        operator.methodcaller("more")(run.net)


CASES = [
    (by_name, Noisy),
    (aside, Noisy),
    (counted, Noisy),
    (late, Noisy),
    (in_front, Noisy),
    (as_text, Scaled),
    (of_class, Shared),
    (of_function, Attributed),
]


def three_calls(step: Callable[[Any], None], run: Any, of: Callable[[Any], Tensor]) -> list[Tensor]:
    """What is seen of a run after each of them."""
    found = []
    for _ in range(3):
        step(run)
        found.append(of(run).clone())
    return found


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(("fn", "kind"), [*CASES, (late, Steady), (late, Asking)])
def test_a_number_changed_within_a_call_is_read_anew(
    fn: Callable[[Run], None], kind: type[Net]
) -> None:
    step = rose_compiler.compile(fn, tune=False)
    results = []
    for each in (fn, step):
        run = Run(kind())
        results.append(three_calls(each, run, lambda run: run.actions))
        run.sim.close()
    assert same(*results)
    # no code within reach stores anything under this name
    assert ('kind="graph"' in step.history[-1][1]) == (kind in (Steady, Asking))
    assert not [r.why for r in step._log if r.code == "re-captured"]
    if kind not in (Steady, Asking):
        assert "may touch anything" in step.explain()
    step.close()


def updated(run: Run) -> None:
    for _ in range(2):
        obs = run.obs
        for t in range(3):
            obs = run.act(t, obs)
        run.optimizer.zero_grad()
        run.net.layer(obs).pow(2).sum().backward()
        run.optimizer.step()


def of_all_optimizers(net: Net, hook: Callable[..., None]) -> RemovableHandle:
    return register_optimizer_step_post_hook(hook)


def of_a_parameter(net: Net, hook: Callable[..., None]) -> RemovableHandle:
    return net.layer.weight.register_hook(hook)


def of_a_gradient(net: Net, hook: Callable[..., None]) -> RemovableHandle:
    return net.layer.weight.register_post_accumulate_grad_hook(hook)


@pytest.mark.parametrize("hooked", [of_all_optimizers, of_a_parameter, of_a_gradient])
def test_a_number_that_a_hook_changes_is_read_anew(hooked: Callable[..., RemovableHandle]) -> None:
    results = []
    for step in (updated, rose_compiler.compile(updated, tune=False)):
        run = Run(Noisy())

        def hook(*given: object, net: Net = run.net) -> None:
            net.late()

        handle = hooked(run.net, hook)
        try:
            results.append(three_calls(step, run, lambda run: run.actions))
        finally:
            handle.remove()
        run.sim.close()
    assert same(*results)


class Rounds:
    """How often something is done is an attribute of a class."""

    rounds = 1

    def __init__(self) -> None:
        self.total = torch.zeros(2)

    def add(self) -> None:
        self.total = self.total * 1.5 + 1

    @classmethod
    def turn(cls) -> None:
        cls.rounds = 3 - cls.rounds

    def turned(self) -> None:
        type(self).rounds = 3 - self.rounds


def by_classmethod(run: Rounds) -> None:
    for _ in range(2):
        for _ in range(run.rounds):
            run.add()
        run.turn()


def by_type(run: Rounds) -> None:
    for _ in range(2):
        for _ in range(run.rounds):
            run.add()
        run.turned()


def by_statement(run: Rounds) -> None:
    for _ in range(2):
        for _ in range(run.rounds):
            run.add()
        Rounds.rounds = 3 - Rounds.rounds


def of_the_class(run: Rounds) -> None:
    for _ in range(2):
        for _ in range(Rounds.rounds):
            run.add()
        run.turn()


@pytest.mark.parametrize("fn", [by_classmethod, by_type, by_statement, of_the_class])
def test_what_is_set_for_a_class_is_set_for_its_objects(fn: Callable[[Rounds], None]) -> None:
    results = []
    for step in (fn, rose_compiler.compile(fn, tune=False)):
        Rounds.rounds = 1
        results.append(three_calls(step, Rounds(), lambda run: run.total))
    assert same(*results)
