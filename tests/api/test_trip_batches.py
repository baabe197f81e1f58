"""Trips of a whole training that are run several at once: watched, cut short and handed over as
single ones are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gymnasium
import pytest
import torch

import rose_compiler
from rose_compiler.api import trips
from rose_compiler.api import unit as units
from rose_compiler.api.process_quotas import ProcessQuotas
from rose_compiler.runtime.hosts.hosted import Hosted
from tests.api.test_whole_loops import Env, Physics, online, parts


def counting(fn, monkeypatch):
    """The trips of a compiled function that are run one by one, and those in batches."""
    single, batched = [], []
    run, more = units.Unit.run, trips.Batch.run

    def count(values):
        """Several trips may be one run, where they can overlap."""
        return values["end"] - values["first"] if "first" in values else 1

    def one(self, values, *args):
        single.extend([1] * count(values))
        return run(self, values, *args)

    def another(self, values):
        names = self._unit.program.value_params
        batched.extend([1] * count(dict(zip(names, values, strict=True))))
        return more(self, values)

    monkeypatch.setattr(units.Unit, "run", one)
    monkeypatch.setattr(trips.Batch, "run", another)
    return rose_compiler.compile(fn, numerics="bitwise", tune=False), single, batched


def test_short_trips_run_in_batches_and_train_the_same_bits(monkeypatch):
    compiled, single, batched = counting(online, monkeypatch)
    found = []
    for fn in (online, compiled):
        net, optimizer = parts()
        env = gymnasium.vector.SyncVectorEnv([Env])
        log = []
        env.reset(seed=0)
        obs = fn(net, optimizer, env, torch.zeros(1, 2), 300, log)
        found.append(
            (net.weight.clone(), torch.as_tensor(obs), torch.tensor([float(r[0]) for r in log]))
        )
    assert all(a.equal(b) for a, b in zip(*found, strict=True))
    assert len(single) + len(batched) == 300
    assert len(batched) > 150
    compiled.close()


def changing(net, optimizer, sim, obs, iterations, log):
    for it in range(iterations):
        total = torch.zeros(3)
        for _ in range(2):
            obs, _, _ = sim.step(net(torch.stack([obs, obs], -1)).sum(-1).detach())
            total = total + net(torch.stack([obs, obs], -1)).sum(-1)
        optimizer.zero_grad()
        total.pow(2).sum().backward()
        optimizer.step()
        log.append(float(total.detach().sum()))
        if it == 40:
            obs = obs.double().float().numpy()
            obs = torch.nn.Parameter(torch.as_tensor(obs), requires_grad=False)
    return obs


def test_a_trip_of_another_type_in_the_midst_of_a_batch_is_watched(monkeypatch):
    compiled, _, batched = counting(changing, monkeypatch)
    found = []
    for fn in (changing, compiled):
        net, optimizer = parts()
        log = []
        obs = fn(net, optimizer, Physics(), torch.zeros(3), 60, log)
        found.append((net.weight.clone(), obs.clone(), torch.as_tensor(log)))
    assert all(a.equal(b) for a, b in zip(*found, strict=True))
    assert compiled._last.unit.watch._looks == 2, "the first trip, and the other type"
    assert batched
    compiled.close()


def test_an_exception_in_a_batch_leaves_everything_as_eager_does(monkeypatch):
    compiled, _, batched = counting(online, monkeypatch)

    class Breaks(Env):
        left = 150

        def step(self, action):
            self.left -= 1
            if self.left == 0:
                raise LookupError("broken")
            return super().step(action)

    found = []
    for fn in (online, compiled):
        net, optimizer = parts()
        env = gymnasium.vector.SyncVectorEnv([Breaks])
        env.reset(seed=0)
        with pytest.raises(LookupError, match="broken"):
            fn(net, optimizer, env, torch.zeros(1, 2), 200, [])
        assert not optimizer._optimizer_step_pre_hooks
        found.append(net.weight.clone())
    assert batched
    assert found[0].equal(found[1])
    compiled.close()


class Judge:
    """A component with a state to hand over."""

    def __init__(self):
        self.n = 0.0

    def score(self, x):
        self.n += 1.0
        return x * 0 + self.n

    def get_state(self):
        return self.n

    def set_state(self, n):
        self.n = n


def judged(net, optimizer, judge, x, count):
    for _ in range(count):
        loss = (net(x) * judge.score(x)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_batches_see_to_what_lives_elsewhere_as_iterations_do(monkeypatch):
    """A component that dies in a batch goes on from a state of its beginning."""
    seen = []
    _noting(monkeypatch, Hosted, "rose_boundary", lambda *args: seen.append("boundary"))
    _noting(monkeypatch, ProcessQuotas, "boundary", lambda *args: seen.append(args[-2]))
    _noting(monkeypatch, units.Unit, "run", lambda *args: seen.append("single"))
    _noting(monkeypatch, trips.Batch, "__init__", lambda *args: seen.append("batch"))
    net, optimizer = parts()
    with rose_compiler.hosted(Judge, recover=True) as judge:
        fast = rose_compiler.compile(judged, tune=False)
        fast(net, optimizer, judge, torch.ones(2, 2), 60)
        fast.close()
    begun = seen.index("batch")
    assert seen.count("boundary") == seen.count("single") + seen.count("batch")
    assert seen[begun - 2 : begun] == ["boundary", True]


def _noting(monkeypatch, kind, name, note):
    """Have calls of a method noted before they run."""
    method = getattr(kind, name)

    def noted(self, *args, **kwargs):
        note(*args)
        return method(self, *args, **kwargs)

    monkeypatch.setattr(kind, name, noted)


def test_a_generator_that_the_loop_leaves_is_closed() -> None:
    def sampled(log: list[str]) -> Iterator[torch.Tensor]:
        try:
            for k in range(9):
                yield torch.ones(2) * k
        finally:
            log.append("closed")

    def run(net: Any, optimizer: Any, log: list[str]) -> Any:
        for x in sampled(log):
            loss = net(x).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if float(x[0]) > 4:
                break
        return loss.detach()

    net, log = torch.nn.Linear(2, 1), list[str]()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    fast = rose_compiler.compile(run, tune=False)
    for k in (1, 2):
        fast(net, optimizer, log)
        assert len(log) == k, "nobody holds what a run has gone through"
