"""Losses fused with their backward: which ones, that training stays the same, and why not."""

from __future__ import annotations

import functools
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import rose_compiler
from rose_compiler.api import followups, tuning
from rose_compiler.base.decision import Decision
from rose_compiler.frontend import losses as traced_losses
from rose_compiler.ir import losses
from rose_compiler.passes import fuse_losses
from rose_compiler.runtime import gradients, graphs, inductor


@pytest.fixture(autouse=True)
def as_traced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What would be compiled runs as the graph that Inductor would be given; how many were."""
    built: list[int] = []

    def as_it_is(function: Callable[..., list[Tensor]], given: list[Tensor]) -> Any:
        with torch.no_grad():
            made = inductor.make_fx(function)(*given)
        built.append(len(made.graph.nodes))
        return made

    monkeypatch.setattr(gradients, "_built", as_it_is)
    monkeypatch.setattr(graphs, "built", as_it_is)
    monkeypatch.setattr(graphs, "PAYS", float("inf"))
    monkeypatch.setattr(gradients, "_known_losses", {})
    monkeypatch.setattr(graphs, "_known_graphs", {})
    return built


@pytest.fixture
def decision(tmp_path: Path) -> str:
    Decision(compile=True).save(tmp_path / "decision.json")
    return str(tmp_path / "decision.json")


class Net(nn.Module):
    """A policy with a critic."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.actor = nn.Linear(3, 2)
        self.critic = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self.logstd = nn.Parameter(torch.zeros(2))

    def evaluate(self, obs: Any, action: Any) -> Any:
        mean = self.actor(obs)
        dist = torch.distributions.Normal(mean, self.logstd.exp().expand_as(mean))
        return dist.log_prob(action).sum(-1), dist.entropy().sum(-1), self.critic(obs).squeeze(-1)


def ppo(net: Any, opt: Any, cfg: Any, obs: Any, action: Any, old: Any, log: Any) -> Any:
    for _ in range(2):
        order = torch.randperm(len(obs))
        for start in range(0, len(obs), 4):
            rows = order[start : start + 4]
            logp, entropy, value = net.evaluate(obs[rows], action[rows])
            ratio = (logp - old[rows]).exp()
            with torch.no_grad():
                kl = ((ratio - 1) - ratio.log()).mean()
            loss = torch.max(-ratio, -ratio.clamp(1 - cfg.clip, 1 + cfg.clip)).mean()
            loss = loss - cfg.entropy * entropy.mean() + value.pow(2).mean()
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            opt.step()
            log.append(loss.item())
    return kl.item()


def drawing(net: Any, opt: Any, cfg: Any, obs: Any, action: Any, old: Any, log: Any) -> Any:
    for _ in range(2):
        loss = (net.actor(obs) + torch.randn(len(obs), 2)).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()


def looking(net: Any, opt: Any, cfg: Any, obs: Any, action: Any, old: Any, log: Any) -> Any:
    for _ in range(2):
        loss = net.actor(obs).pow(2).mean()
        log.append(loss.item())
        opt.zero_grad()
        loss.backward()
        opt.step()


def keeping(net: Any, opt: Any, cfg: Any, obs: Any, action: Any, old: Any, log: Any) -> Any:
    for _ in range(2):
        loss = net.actor(obs).pow(2).mean()
        opt.zero_grad()
        loss.backward(retain_graph=True)
        opt.step()


def handing_out(net: Any, opt: Any, cfg: Any, obs: Any, action: Any, old: Any, log: Any) -> Any:
    for _ in range(2):
        loss = net.actor(obs).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    return loss


def going_on(net: Any, opt: Any, cfg: Any, obs: Any, action: Any, old: Any, log: Any) -> Any:
    for _ in range(2):
        h = net.actor(obs)
        loss = h.sum()
        opt.zero_grad()
        loss.backward()
        again = (h * 2).sum()
        again.backward()
        opt.step()


def adding_up(net: Any, opt: Any, cfg: Any, obs: Any, action: Any, old: Any, log: Any) -> Any:
    for _ in range(2):
        loss = net.actor(obs).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        twice = loss * 2
        log.append(twice.item())


def annealing(net: Any, opt: Any, cfg: Any, obs: Any, action: Any, old: Any, log: Any) -> Any:
    for _ in range(3):
        loss = (net.actor(obs) * cfg.clip).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        cfg.clip *= 0.5


def scaling(net: Any, opt: Any, cfg: Any, obs: Any, action: Any, old: Any, log: Any) -> Any:
    for _ in range(3):
        loss = (net.actor(obs) * cfg.table["clip"]).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()


def replacing(net: Any, opt: Any, cfg: Any, obs: Any, action: Any, old: Any, log: Any) -> Any:
    for _ in range(3):
        loss = (net.actor(obs) * net.logstd).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        net.logstd = nn.Parameter(net.logstd.detach() + 1)


def accumulating(net: Any, opt: Any, cfg: Any, obs: Any, action: Any, old: Any, log: Any) -> Any:
    opt.zero_grad()
    for k in range(3):
        rows = obs[k : k + 2]
        loss = net.critic(rows).pow(2).mean() / 3
        loss.backward()
    opt.step()
    return loss.item()


def drawing_between(net: Any, opt: Any, cfg: Any, obs: Any, action: Any, old: Any, log: Any) -> Any:
    for _ in range(2):
        loss = (net.actor(obs) + torch.randn(len(obs), 2)).pow(2).mean()
        log.append(float(torch.rand(())))
        opt.zero_grad()
        loss.backward()
        opt.step()


def branching(net: Any, opt: Any, cfg: Any, obs: Any, action: Any, old: Any, log: Any) -> Any:
    for _ in range(2):
        loss = net.actor(obs).pow(2).mean()
        if loss < 1e-3:
            log.append(net.critic(obs).mean().item())
            break
        opt.zero_grad()
        loss.backward()
        opt.step()


def aside(net: Any, opt: Any, cfg: Any, obs: Any, action: Any, old: Any, log: Any) -> Any:
    for _ in range(2):
        h = net.actor(obs)
        loss = h.sum()
        bonus = (h.detach() * net.logstd).sum()
        opt.zero_grad()
        loss.backward()
        bonus.backward()
        opt.step()


def summed(net: Any, opt: Any, cfg: Any, obs: Any, action: Any, old: Any, log: Any) -> Any:
    for _ in range(2):
        policy, value = net.actor(obs).pow(2).mean(), net.critic(obs).pow(2).mean()
        opt.zero_grad()
        (policy + cfg.entropy * value).backward()
        opt.step()
        log.append(policy.item())


def frozen(net: Any, opt: Any, cfg: Any, obs: Any, action: Any, old: Any, log: Any) -> Any:
    """What runs without grad has no part in the gradients, though it reads parameters."""
    for _ in range(2):
        with torch.no_grad():
            target = net.critic(obs + 1).squeeze(-1) * 0.9
        value = net.critic(obs).squeeze(-1)
        loss = (value - target).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        log.append(loss.item())


def polyak(net: Any, opt: Any, cfg: Any, obs: Any, action: Any, old: Any, log: Any) -> Any:
    """Parameters that are written into stay the parameters that they are."""
    for _ in range(2):
        loss = (net.actor(obs) * net.logstd).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        with torch.no_grad():
            for p in net.actor.parameters():
                p.data.mul_(0.5)
            net.logstd.add_(0.1)


def by_array(net: Any, opt: Any, cfg: Any, obs: Any, action: Any, old: Any, log: Any) -> Any:
    order = np.arange(len(obs))
    for start in range(0, len(obs), 4):
        rows = order[start : start + 4]
        loss = (net.critic(obs[rows]).squeeze(-1) - old[rows]).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        log.append(loss.item())


class Twin:
    """The same training twice: eager and compiled."""

    def __init__(self, fn: Callable[..., Any], decision: str, numerics: str = "close") -> None:
        self.fn = fn
        self.compiled = rose_compiler.compile(fn, tune=decision, numerics=numerics)  # type: ignore[arg-type]
        self.sides = [self._made(), self._made()]

    @staticmethod
    def _made() -> tuple[Any, ...]:
        net = Net()
        opt = torch.optim.Adam(net.parameters(), lr=1e-2)
        generator = torch.Generator().manual_seed(1)
        obs = torch.randn(8, 3, generator=generator)
        action = torch.randn(8, 2, generator=generator)
        cfg = types.SimpleNamespace(clip=0.2, entropy=0.01)
        return net, opt, cfg, obs, action, torch.full((8,), -2.0), []

    def run(self, times: int = 3) -> None:
        results = []
        for fn, side in zip((self.fn, self.compiled), self.sides, strict=True):
            torch.manual_seed(5)
            results.append([fn(*side) for _ in range(times)])
        torch.testing.assert_close(*results)

    def check(self) -> None:
        eager, ours = self.sides
        for a, b in zip(eager[0].parameters(), ours[0].parameters(), strict=True):
            torch.testing.assert_close(a, b)
            torch.testing.assert_close(a.grad, b.grad)
        torch.testing.assert_close(torch.tensor(eager[-1]), torch.tensor(ours[-1]))

    @property
    def fused(self) -> bool:
        return "rt.gradients(" in self.compiled.source

    def blockers(self) -> list[str]:
        remarks = self.compiled._schedule().history.remarks
        return [r.code for r in remarks if r.kind == "missed" and r.pass_name == "fuse"]


@pytest.mark.parametrize(
    "fn", [ppo, accumulating, drawing, looking, adding_up, summed, frozen, polyak, by_array]
)
def test_training_goes_on_the_same(fn: Any, decision: str, as_traced: list[int]) -> None:
    twin = Twin(fn, decision)
    twin.run(4)
    twin.check()
    assert twin.fused
    assert len(as_traced) == 1  # one make: neither the slice nor its number is part of it


def test_what_is_changed_between_calls_has_its_effect(decision: str) -> None:
    twin = Twin(ppo, decision)
    twin.run(2)
    for _, opt, cfg, *_ in twin.sides:
        cfg.clip, cfg.entropy = 0.05, 0.5
        opt.param_groups[0]["lr"] = 0.1
    twin.run(2)
    twin.check()
    assert twin.fused


@pytest.mark.parametrize(
    ("fn", "code"),
    [
        (drawing_between, "draw-order"),
        (branching, "early-exit"),
        (keeping, "unsupported-shape"),
        (handing_out, "may-alias"),
        (aside, "grad-graph"),
        (annealing, "reads-loop-state"),
        (replacing, "reads-loop-state"),
    ],
)
def test_refused(fn: Any, code: str, decision: str) -> None:
    twin = Twin(fn, decision)
    twin.run()
    twin.check()
    assert not twin.fused
    assert code in twin.blockers()


def nothing_against(*args: Any) -> None:
    """A question of legality that finds nothing, whatever it is asked."""


#: Planted faults: questions that find nothing, and the trainings that show it.
MUTANTS: dict[str, tuple[Any, str, Any]] = {
    "what is drawn between": (losses, "conflicts", drawing_between),
    "numbers that the loop changes": (traced_losses._Tracer, "_rebound", annealing),
    "who goes on recording": (fuse_losses, "graph_leaving", aside),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_fault_is_found(
    name: str, decision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, question, fn = MUTANTS[name]
    monkeypatch.setattr(owner, question, nothing_against)
    # numbers have a second guard, which is not what is looked at here
    monkeypatch.setattr(traced_losses, "hold_numbers", nothing_against)
    twin = Twin(fn, decision)

    def train() -> None:
        twin.run()
        twin.check()

    with pytest.raises((AssertionError, RuntimeError)):
        train()


def test_a_number_that_changes_between_calls_has_its_effect(
    decision: str, as_traced: list[int]
) -> None:
    twin = Twin(scaling, decision)
    for clip in (0.2, 0.5):
        for side in twin.sides:
            side[2].table = {"clip": clip}
        twin.run(3)
        twin.check()
        assert twin.fused
    assert len(as_traced) == 2


def test_an_error_of_the_loop_stays_one(decision: str) -> None:
    """Going back twice through one graph raises in eager."""
    twin = Twin(going_on, decision)
    net, opt, *rest = twin.sides[1]
    eager = pytest.raises(RuntimeError, match="second time")
    with eager:
        going_on(*twin.sides[0])
    with pytest.raises(RuntimeError, match="second time"):
        twin.compiled(net, opt, *rest)


def test_bits_are_kept_where_they_count(decision: str) -> None:
    twin = Twin(ppo, decision, numerics="bitwise")
    twin.run()
    twin.check()
    assert not twin.fused
    assert "probe-bits-differ" in twin.blockers()


def test_a_hook_of_the_users_sees_every_gradient(decision: str) -> None:
    twin = Twin(ppo, decision)
    twin.run(2)
    for side in twin.sides:
        side[0].logstd.register_hook(lambda g: g * 0.5)
    twin.run(2)
    twin.check()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials of a few iterations, and compiling after less than a second."""
    monkeypatch.setattr(followups, "COMPILE_S", 0.5)
    monkeypatch.setattr(tuning, "Chooser", functools.partial(tuning.Chooser, trial_s=0.01))


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("numerics", ["close", "bitwise"])
def test_tuning_tries_torchscript_first(numerics: str, as_traced: list[int]) -> None:
    compiled = rose_compiler.compile(ppo, numerics=numerics)
    side = Twin._made()
    for _ in range(400):
        compiled(*side)
        if "made one call of TorchScript in" in compiled.explain():
            break
    assert not as_traced
    assert "script=True" in compiled.explain()


@pytest.mark.usefixtures("impatient")
def test_tuning_asks_for_it_once_a_training_is_long_enough(as_traced: list[int]) -> None:
    compiled = rose_compiler.compile(ppo)
    side = Twin._made()
    for n in range(400):
        compiled(*side)
        if compiled.settled and as_traced:
            break
        if n == 3:
            assert not as_traced
    assert len(as_traced) == 1
    told = compiled.explain()
    assert "compiled by Inductor in" in told
    assert "compile=True" in told


@pytest.mark.usefixtures("impatient")
def test_a_loss_that_can_not_be_compiled_is_no_candidate() -> None:
    compiled = rose_compiler.compile(keeping)
    side = Twin._made()
    started = time.perf_counter()
    while not compiled.settled or time.perf_counter() - started < 1.0:
        compiled(*side)
        assert time.perf_counter() - started < 60
    assert "compile=True" not in compiled.explain()
