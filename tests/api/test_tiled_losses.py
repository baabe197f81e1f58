"""A training whose losses are computed in tiles of rows: the same up to rounding, and refused in
bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rose_compiler
from rose_compiler.base.decision import Decision
from rose_compiler.runtime import gradients, lane_tiles


def train(net: Any, opt: Any, obs: Any, target: Any, weights: Any, log: Any) -> Any:
    for _ in range(2):
        order = torch.randperm(len(obs))
        for start in range(0, len(obs), 17):
            rows = order[start : start + 17]
            weight = (weights[rows] - weights[rows].mean()) / (weights[rows].std() + 1e-8)
            made = net(obs[rows])
            loss = (weight * (made - target[rows]).pow(2).sum(-1)).mean()
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            opt.step()
            log.append(loss.item())
    return F.mse_loss(net(obs), target).item()


def side() -> tuple[Any, ...]:
    torch.manual_seed(4)
    net = nn.Sequential(nn.Linear(3, 17), nn.Tanh(), nn.Linear(17, 2))
    data = torch.randn(34, 3), torch.randn(34, 2), torch.randn(34)
    return net, torch.optim.Adam(net.parameters(), lr=0.01), *data, []


@pytest.mark.parametrize("numerics", ["close", "bitwise"])
def test_training_in_tiles(numerics: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (gradients, lane_tiles):
        monkeypatch.setattr(module, "PAYS", float("inf"))
    monkeypatch.setattr(gradients, "_known_losses", {})
    Decision(script=True, tiles=2).save(saved := tmp_path / "decision.json")
    compiled = rose_compiler.compile(train, numerics=numerics, tune=saved)
    ours, theirs = side(), side()
    for _ in range(2):
        torch.manual_seed(1)
        got = compiled(*ours)
        torch.manual_seed(1)
        assert got == pytest.approx(train(*theirs), rel=1e-4)
    assert ours[-1] == pytest.approx(theirs[-1], rel=1e-4)
    told = compiled.explain()
    compiled.close()
    assert ("computed in tiles of its rows in" in told) is (numerics == "close")
    assert ("sums of tiles round otherwise" in told) is (numerics == "bitwise")
    assert ours[-1] == theirs[-1] or numerics == "close"
