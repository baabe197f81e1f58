"""Types that differ for the first time after a graph was made: it holds those of its trace."""

from __future__ import annotations

from collections.abc import Callable
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


class Later:
    """Hands out something else from its ninth call on."""

    def __init__(self, other: Callable[[Tensor], Any]) -> None:
        self.other, self.calls = other, 0

    def __call__(self, x: Tensor) -> Any:
        self.calls += 1
        return x.clone() if self.calls <= 8 else self.other(x)


class Converting(nn.Module):
    def forward(self, x: Any) -> Tensor:
        h = x.float()
        return h / 3 + h.sum() / 7


class Asking(nn.Module):
    def forward(self, x: Any) -> Tensor:
        return x / 3 if x.is_floating_point() else x.float() * 0.5


class Optional(nn.Module):
    def forward(self, x: Any) -> Tensor:
        if x is None:
            x = torch.ones(4, 3)
        return nn.functional.linear(torch.full((4, 3), 0.1), torch.ones(3, 3), None) + x


def rollout(envs: Any, policy: Any, later: Any, obs: Any) -> Any:
    seen = []
    for _ in range(4):
        with torch.no_grad():
            part = later(obs)
            h = policy(part)
            action = torch.tanh(obs) * 0.1 + h.mean()
        obs, _, _, _, _ = envs.step(action.float().numpy())
        obs = torch.as_tensor(obs, dtype=torch.float32)
        seen.append(h.sum())
    return obs, seen


CASES: dict[str, tuple[type[nn.Module], Callable[[Tensor], Any]]] = {
    "converted": (Converting, Tensor.double),
    "asked": (Asking, lambda x: (x * 9).int()),
    "none": (Optional, lambda x: None),
}


@pytest.mark.parametrize("case", CASES)
def test_a_graph_of_a_rollout_is_right_for_types_that_come_later(case: str) -> None:
    kind, other = CASES[case]
    results, fast = [], rose_compiler.compile(rollout, numerics="bitwise", tune=False)
    for fn in (rollout, fast):
        envs = ShardedEnv.split([Drift] * 4, shards=2, hosts="inline")
        policy, later = kind().eval(), Later(other)
        obs, found = torch.as_tensor(envs.reset(seed=0)[0], dtype=torch.float32), []
        for call in range(CALLS):
            obs, told = fn(envs, policy, later, obs)
            found += told
            if fn is fast and call == 1:
                assert 'kind="graph"' in fast.history[-1][1]
        results.append(found)
        envs.close()
    assert [a.dtype for a in results[0]] == [b.dtype for b in results[1]]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    said = [r.why for r in fast._log if r.code == "re-captured"]
    assert len(said) == 1
    assert "types" in said[0]
    fast.close()


class Parts:
    """Hands out two parts a step, and more of them from the third call on."""

    def __init__(self) -> None:
        self.parts: tuple[Tensor, ...] = (torch.ones(4, 3), torch.full((4, 3), 0.5))

    def steps(self) -> list[tuple[Tensor, ...]]:
        return [self.parts, self.parts]


def train(net: Any, opt: Any, data: Any) -> float:
    total = 0.0
    for parts in data.steps():
        h = sum(net(part).pow(2).mean() for part in parts)
        opt.zero_grad()
        h.backward()
        opt.step()
        total = total + h.item()
    return total


def test_a_loss_is_handed_as_many_parts_as_it_was_traced_with(tmp_path: Path) -> None:
    Decision(compile=True).save(tmp_path / "d.json")
    fast = rose_compiler.compile(train, numerics="close", tune=tmp_path / "d.json")
    results = []
    for fn in (train, fast):
        torch.manual_seed(0)
        net, data, found = nn.Linear(3, 1), Parts(), []
        opt = torch.optim.SGD(net.parameters(), lr=0.05)
        with as_traced():
            for call in range(4):
                if call == 2:
                    data.parts += (torch.full((4, 3), 9.0),)
                    if fn is fast:
                        assert "graph for Inductor" in fast.explain()
                found.append(fn(net, opt, data))
        results.append(found)
    assert results[1] == pytest.approx(results[0], rel=1e-5)
    assert len([r for r in fast._log if r.code == "re-captured"]) == 1
    fast.close()
