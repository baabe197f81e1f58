"""Keys that traced code looked for, and values that decide what a graph holds, may change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gymnasium.vector import SyncVectorEnv
from torch import Tensor, nn

import rose_compiler
from tests.api.loops import Drift


class Net(nn.Module):
    """A layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Run:
    """What a training holds: settings, some of them in dicts and lists."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net, self.sim = Net(), SyncVectorEnv([Drift, Drift])
        self.obs = torch.as_tensor(self.sim.reset(seed=1)[0])
        self.cfg: dict[str, Any] = {"on": True}
        self.parts = {"a": 1.0, "b": 2.0}
        self.actions = torch.zeros(3, 2, 3)

    def step(self, t: int, h: Tensor) -> None:
        self.actions[t] = h
        self.obs = torch.as_tensor(self.sim.step(torch.tanh(h).numpy())[0])


def decided(run: Run) -> None:
    for t in range(3):
        with torch.no_grad():
            h = run.net(run.obs)
            if run.cfg["on"]:
                h = h * run.cfg.get("more", 3.0)
        run.step(t, h)


def looped(run: Run) -> None:
    for t in range(3):
        with torch.no_grad():
            h = run.net(run.obs)
            for part in run.parts.values():
                h = h * part
        run.step(t, h)


def handed_in(run: Run) -> None:
    on = run.cfg["on"]
    for t in range(3):
        with torch.no_grad():
            h = run.net(run.obs)
            if on:
                h = h * 2
        run.step(t, h)


def put(of: Callable[[Run], Any], key: Any, value: Any) -> Callable[[Run], None]:
    def change(run: Run) -> None:
        of(run)[key] = value

    return change


CHANGES = [
    (decided, put(lambda r: r.cfg, "on", False)),
    (decided, put(lambda r: r.cfg, "more", 4.0)),
    (decided, put(lambda r: r.cfg, "unread", 4.0)),
    (looped, put(lambda r: r.parts, "c", 2.0)),
    (handed_in, put(lambda r: r.cfg, "on", False)),
]


@pytest.mark.parametrize(("fn", "change"), CHANGES)
def test_a_change_has_the_effect_that_it_has_in_eager(
    fn: Callable[[Run], None], change: Callable[[Run], None]
) -> None:
    results: list[list[Tensor]] = []
    for wrap in (lambda f: f, lambda f: rose_compiler.compile(f, tune=False)):
        run, step = Run(), wrap(fn)
        results.append([])
        for call in range(4):
            if call == 2:
                change(run)
            step(run)
            results[-1] += [run.actions.clone(), run.obs]
        run.sim.close()
    assert "trace [trace]" in step.explain()
    assert ("trace [not-traceable]" in step.explain()) == (fn is handed_in), step.explain()
    step.close()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
