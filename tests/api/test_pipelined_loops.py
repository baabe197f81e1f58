"""Loops pipelined end to end: captured, proposed from a profile, run on lanes, equal to eager."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rose_compiler
from rose_compiler.base.decision import Decision, Pipelined

pytestmark = pytest.mark.usefixtures("one_thread")


class Robot:
    """A component of the user's: one state, moved by actions."""

    def __init__(self) -> None:
        self.x = torch.linspace(-1.0, 1.0, 64)

    @rose_compiler.component(reads=["self"], writes=["self"])
    def move(self, action: torch.Tensor) -> torch.Tensor:
        self.x = (0.9 * self.x + 0.1 * action).clamp(-2.0, 2.0)
        return self.x.clone()


class Watching:
    """A control loop that encodes and keeps what it sees: nothing of it trains."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.robot = Robot()
        self.policy = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
        self.encoder = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 64))
        self.seen = torch.zeros(64)

    def iteration(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        kept: list[torch.Tensor] = []
        with torch.no_grad():
            for _ in range(12):
                action = self.policy(x)
                x = self.robot.move(action)
                code = self.encoder(x)
                self.seen.mul_(0.9).add_(code)
                kept.append(torch.tanh(self.seen))
        return x, kept


def bits(watching: Watching, calls: int, fn: Any) -> list[torch.Tensor]:
    x = torch.ones(64)
    found = []
    for _ in range(calls):
        x, kept = fn(x)
        found += [x, *kept]
    return [*found, watching.seen, watching.robot.x]


def decision(fast: Any, lanes: int = 1, micros: int = 500) -> Decision:
    """The loop of a captured function pipelined, as if every operation took as long."""
    unit = fast._last.unit
    (loop,) = unit.program.loops()
    names = tuple((n.name, micros) for n in loop.graph.nodes if n.op == "call_function")
    return Decision(pipeline=(Pipelined(loop.node.name, lanes, names),))


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_chain_is_pipelined_and_keeps_its_bits(lanes: int, tmp_path: Path) -> None:
    eager = Watching()
    expected = bits(eager, 5, eager.iteration)
    first = Watching()
    probe = rose_compiler.compile(first.iteration, tune=False, numerics="bitwise")
    probe(torch.ones(64))
    path = tmp_path / "decision.json"
    decision(probe, lanes).save(path)
    watching = Watching()
    fast = rose_compiler.compile(watching.iteration, tune=path, numerics="bitwise")
    found = bits(watching, 5, fast)
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    text = fast.explain()
    assert "pipeline_loops [pipeline_loops]" in text
    assert f"on the coordinator and {lanes} more" in text
    fast.close()
    probe.close()
