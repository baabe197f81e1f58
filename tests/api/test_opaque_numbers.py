"""Numbers that a call of which nothing is known may change while graphs that hold them run."""

from __future__ import annotations

import operator
from collections.abc import Callable

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
        with torch.no_grad():
            h = run.net(obs)
        obs = run.step(t, h)
        next(map(operator.methodcaller("as" + "ide"), [run.net]), None)


def late(run: Run) -> None:
    obs = run.obs
    for t in range(3):
        with torch.no_grad():
            h = run.net(obs)
        obs = run.step(t, h)
        operator.methodcaller("late")(run.net)


def in_front(run: Run) -> None:
    operator.methodcaller("anneal")(run.net)
    obs = run.obs
    for t in range(3):
        with torch.no_grad():
            h = run.net(obs)
        obs = run.step(t, h)


def as_text(run: Run) -> None:
    obs = run.obs
    for t in range(3):
        with torch.no_grad():
            h = run.net(obs)
        obs = run.step(t, h)
        shrink_item(run.net)


def shrink_item(net: Net) -> None:
    exec("net.cfg['scale'] *= 0.9", {"net": net})


def of_class(run: Run) -> None:
    obs = run.obs
    for t in range(3):
        with torch.no_grad():
            h = run.net(obs)
        obs = run.step(t, h)
        Net.of_class *= 0.9


def of_function(run: Run) -> None:
    obs = run.obs
    for t in range(3):
        with torch.no_grad():
            h = run.net(obs)
        obs = run.step(t, h)
        decay.scale *= decay()  # type: ignore[attr-defined]


def shrink(net: Net) -> None:
    net.noise *= 0.9


def counted(run: Run) -> None:
    obs = run.obs
    for _ in range(2):
        for t in range(run.net.rounds):
            with torch.no_grad():
                h = run.net(obs)
            obs = run.step(t, h)
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


@pytest.mark.parametrize(("fn", "kind"), [*CASES, (late, Steady), (late, Asking)])
def test_a_number_changed_within_a_call_is_read_anew(
    fn: Callable[[Run], None], kind: type[Net]
) -> None:
    results: list[list[Tensor]] = []
    for wrap in (lambda f: f, lambda f: rose_compiler.compile(f, tune=False)):
        run, step = Run(kind()), wrap(fn)
        results.append([])
        for _ in range(3):
            step(run)
            results[-1].append(run.actions.clone())
        run.sim.close()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
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
            with torch.no_grad():
                h = run.net(obs)
            obs = run.step(t, h)
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
    results: list[list[Tensor]] = []
    for step in (updated, rose_compiler.compile(updated, tune=False)):
        run = Run(Noisy())

        def hook(*given: object, net: Net = run.net) -> None:
            net.late()

        handle = hooked(run.net, hook)
        results.append([])
        try:
            for _ in range(3):
                step(run)
                results[-1].append(run.actions.clone())
        finally:
            handle.remove()
        run.sim.close()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


class Rounds:
    """How often something is done is an attribute of a class."""

    rounds = 1

    def __init__(self) -> None:
        self.total = torch.zeros(2)

    @classmethod
    def turn(cls) -> None:
        cls.rounds = 3 - cls.rounds

    def turned(self) -> None:
        type(self).rounds = 3 - self.rounds


def by_classmethod(run: Rounds) -> None:
    for _ in range(2):
        for _ in range(run.rounds):
            run.total = run.total * 1.5 + 1
        run.turn()


def by_type(run: Rounds) -> None:
    for _ in range(2):
        for _ in range(run.rounds):
            run.total = run.total * 1.5 + 1
        run.turned()


def by_statement(run: Rounds) -> None:
    for _ in range(2):
        for _ in range(run.rounds):
            run.total = run.total * 1.5 + 1
        Rounds.rounds = 3 - Rounds.rounds


def of_the_class(run: Rounds) -> None:
    for _ in range(2):
        for _ in range(Rounds.rounds):
            run.total = run.total * 1.5 + 1
        run.turn()


@pytest.mark.parametrize("fn", [by_classmethod, by_type, by_statement, of_the_class])
def test_what_is_set_for_a_class_is_set_for_its_objects(fn: Callable[[Rounds], None]) -> None:
    results: list[list[Tensor]] = []
    for step in (fn, rose_compiler.compile(fn, tune=False)):
        Rounds.rounds, run = 1, Rounds()
        results.append([])
        for _ in range(3):
            step(run)
            results[-1].append(run.total)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
