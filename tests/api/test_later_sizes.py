"""Sizes that differ for the first time after a graph was made: it holds those of its trace."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rose_compiler
from rose_compiler.base.decision import Decision
from rose_compiler.sim import ShardedEnv
from rose_compiler.testing.losses import as_traced
from tests.api.loops import Drift

CALLS = 4


class Fewer:
    """Hands out fewer rows, or columns, from its ninth call on."""

    def __init__(self, axis: int) -> None:
        self.axis, self.calls = axis, 0

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x.narrow(self.axis, 0, x.shape[self.axis] - (self.calls > 8))


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(3, 3), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] == 3 and len(x) > 3:
            h = self.wide(x) + torch.zeros(x.shape[0], 3)
        else:
            h = self.narrow(x[:, :2]) * 2
        return h * h.sum() / x.shape[0]


class Columns(Fewer):
    """Hands out the same column by column from its ninth call on."""

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x if self.calls <= 8 else x.t().contiguous().t()


class InOrder(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.contiguous().view(-1, 3) * (2.0 if x.is_contiguous() else 3.0)


class Drawing(Policy):
    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        return torch.distributions.Normal(h, 0.5).sample()


def rollout(envs: Any, policy: Any, fewer: Any, obs: Any) -> Any:
    seen = []
    for _ in range(4):
        with torch.no_grad():
            part = fewer(obs)
            h = policy(part)
            action = torch.tanh(obs) * 0.1 + h.mean()
        obs, _, _, _, _ = envs.step(action.numpy())
        obs = torch.as_tensor(obs, dtype=torch.float32)
        seen.append(h.sum())
    return obs, torch.stack(seen)


@pytest.mark.parametrize("axis", [0, 1, None], ids=["rows", "columns", "layout"])
def test_a_graph_of_a_rollout_is_right_for_sizes_that_come_later(axis: int | None) -> None:
    results, fast = [], rose_compiler.compile(rollout, numerics="bitwise", tune=False)
    for fn in (rollout, fast):
        torch.manual_seed(0)
        envs = ShardedEnv.split([Drift] * 4, shards=2, hosts="inline")
        policy = (Policy() if axis is not None else InOrder()).eval()
        fewer = Columns(0) if axis is None else Fewer(axis)
        obs, found = torch.as_tensor(envs.reset(seed=0)[0], dtype=torch.float32), []
        for call in range(CALLS):
            obs, told = fn(envs, policy, fewer, obs)
            found.append(told)
            if fn is fast and call == 1:
                assert 'kind="graph"' in fast.history[-1][1]
        results.append(found)
        envs.close()
    assert [torch.equal(a, b) for a, b in zip(*results, strict=True)] == [True] * CALLS
    said = [r.why for r in fast._log if r.code == "re-captured"]
    assert len(said) == 1
    assert "other sizes" in said[0]
    fast.close()


def in_halves(envs: Any, policy: Any, fewer: Any, obs: Any) -> Any:
    seen = []
    for _ in range(4):
        with torch.no_grad():
            part = fewer(obs)
            h, told = policy(part)
            action = torch.tanh(obs) * 0.1 + h.mean()
        obs, _, _, _, _ = envs.step(action.numpy())
        obs = torch.as_tensor(obs, dtype=torch.float32)
        seen.append(told)
    return obs, torch.cat(seen)


class Told(Policy):
    """A drawn action, and what goes on from the middle of the graph that makes it."""

    def forward(self, x: Tensor) -> Any:
        mean = super().forward(x)
        drawn = torch.distributions.Normal(mean, 0.5)
        action = drawn.sample()
        return action, drawn.log_prob(action).sum(-1) + torch.tanh(mean).sum(-1)


@pytest.mark.parametrize(
    ("axis", "begin", "how"),
    [
        (0, 0, Decision()),
        (1, 2, Decision()),
        (1, 0, Decision(late="shadow", defer=True)),
        (0, 0, Decision(groups=2)),
        (0, 2, Decision(compile=True)),
    ],
    ids=["rows", "columns", "deferred", "not cut", "drawn in front"],
)
def test_halves_of_a_graph_and_its_draws_are_right_for_sizes_that_come_later(
    axis: int, begin: int, how: Decision, tmp_path: Path
) -> None:
    how.save(tmp_path / "d.json")
    numerics: Any = "close" if how.compile else "bitwise"
    fast = rose_compiler.compile(in_halves, numerics=numerics, tune=tmp_path / "d.json")
    results: list[list[Tensor]] = []
    for fn in (in_halves, fast):
        torch.manual_seed(0)
        envs = ShardedEnv.split([Drift] * 4, shards=2, hosts="inline")
        policy, fewer = Told().eval(), Fewer(axis)
        fewer.calls = -begin
        obs, found = torch.as_tensor(envs.reset(seed=0)[0], dtype=torch.float32), []
        with as_traced() if how.compile else nullcontext():
            for call in range(CALLS):
                obs, told = fn(envs, policy, fewer, obs)
                found += [obs, told, torch.get_rng_state()]
                if fn is fast and call == 1:
                    assert (
                        "_late(" if how.groups < 2 and not how.compile else "rt.drawn("
                    ) in fast.source
        results.append(found)
        envs.close()
    if how.compile:
        assert all(torch.allclose(a.double(), b.double()) for a, b in zip(*results, strict=True))
    else:
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert len([r for r in fast._log if r.code == "re-captured"]) == 1
    fast.close()


def halves(envs: Any, policy: Any, critic: Any, fewer: Any, obs: Any) -> Any:
    seen = torch.zeros(4, 4, 3)
    for t in range(4):
        with torch.no_grad():
            part = fewer(obs)
            action = torch.tanh(obs) * 0.1
            value = critic(part)
            seen[t] = value
        obs, _, _, _, _ = envs.step(action.numpy())
        obs = torch.as_tensor(obs, dtype=torch.float32)
    return obs, seen


class Critic(Policy):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.wide(x) if x.shape[-1] == 3 else self.narrow(x))


@pytest.mark.parametrize(("begin", "defer"), [(0, False), (2, False), (0, True), (2, True)])
def test_a_late_part_runs_its_own_statements_for_sizes_that_come_later(
    begin: int, defer: bool, tmp_path: Path
) -> None:
    Decision(defer=defer).save(tmp_path / "d.json")
    # so few rows are rounded otherwise than those of all trips
    numerics: Any = "close" if defer else "bitwise"
    fast = rose_compiler.compile(halves, numerics=numerics, tune=tmp_path / "d.json")
    results: list[list[Tensor]] = []
    for fn in (halves, fast):
        torch.manual_seed(0)
        envs = ShardedEnv.split([Drift] * 4, shards=2, hosts="inline")
        critic, fewer = Critic().eval(), Fewer(1)
        fewer.calls = -begin  # they come in the middle of an iteration
        obs, found = torch.as_tensor(envs.reset(seed=0)[0], dtype=torch.float32), []
        for call in range(CALLS):
            obs, told = fn(envs, None, critic, fewer, obs)
            found.append(told)
            if fn is fast and call == 1:
                assert ("_as_proven)" if defer else "def graph_late(") in fast.source
        results.append(found)
        envs.close()
    assert all(torch.allclose(a, b, 1e-6 * defer, 0) for a, b in zip(*results, strict=True))
    assert len([r for r in fast._log if r.code == "re-captured"]) == 1
    fast.close()


def per_row(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (net(x) - y).pow(2).sum() / x.shape[0]


def by_branch(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = (net(x) - y).pow(2).mean()
    return loss * 0.5 if len(x) < 2 else loss


def drawing(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    h = net(x)
    return (h + 0.1 * torch.randn_like(h) - y).pow(2).sum() / x.shape[0]


class Data:
    """Minibatches of four rows; of one row at the end, from the third call on."""

    def __init__(self) -> None:
        self.x, self.y, self.alive = torch.randn(8, 3), torch.randn(8, 1), torch.ones(8)

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        order = self.alive.nonzero()[:, 0]
        return [(self.x[rows], self.y[rows]) for rows in order.split(4)]


@pytest.mark.parametrize("whole", [False, True], ids=["columns", "tuple"])
@pytest.mark.parametrize("term", [per_row, by_branch, drawing], ids=lambda f: f.__name__)
def test_a_loss_of_a_shorter_last_minibatch(
    term: Callable[..., Tensor], whole: bool, tmp_path: Path
) -> None:
    def by_columns(net: Any, opt: Any, data: Any) -> float:
        total = 0.0
        for x, y in data.batches():
            h = term(net, x, y)
            opt.zero_grad()
            h.backward()
            opt.step()
            total = total + h.item()
        return total

    def by_tuple(net: Any, opt: Any, data: Any) -> float:
        total = 0.0
        for batch in data.batches():
            h = term(net, batch[0], batch[1])
            opt.zero_grad()
            h.backward()
            opt.step()
            total = total + h.item()
        return total

    train = by_tuple if whole else by_columns
    Decision(compile=True).save(tmp_path / "d.json")
    fast = rose_compiler.compile(train, numerics="close", tune=tmp_path / "d.json")
    results = []
    for fn in (train, fast):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        data, opt, found = Data(), torch.optim.SGD(net.parameters(), lr=0.05), []
        with as_traced():
            for call in range(5):
                data.alive[5:] = call < 2
                found.append(fn(net, opt, data))
                if fn is fast and term is drawing and 0 < call < 3:
                    assert "h_and_gradients_as_written(" in fast.source
        results.append([*found, torch.get_rng_state().sum().item()])
    expected, got = results
    assert got == pytest.approx(expected, rel=1e-5)
    assert term is not drawing or any(r.code == "re-captured" for r in fast._log)
    fast.close()
