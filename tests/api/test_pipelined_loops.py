"""Loops pipelined end to end: captured, proposed from a profile, run on lanes, equal to eager."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rose_compiler
from rose_compiler.api import pipelining, profiling
from rose_compiler.api.cache import Entry
from rose_compiler.api.unit import Unit
from rose_compiler.base.decision import Decision, Pipelined
from rose_compiler.base.errors import ConfigError, shown_path
from rose_compiler.base.machine import Machine
from rose_compiler.base.remarks import RemarkLog
from rose_compiler.ir.program import LoopView

pytestmark = pytest.mark.usefixtures("one_thread")


class Robot:
    """A component of the user's: one state, moved by actions."""

    def __init__(self) -> None:
        self.x = torch.linspace(-1.0, 1.0, 16)
        self.moves = 0
        self.fails_at = -1

    @rose_compiler.component(reads=["self"], writes=["self"])
    def move(self, action: torch.Tensor) -> torch.Tensor:
        self.moves += 1
        if self.moves == self.fails_at:
            raise ValueError("the arm is stuck")
        self.x = (0.9 * self.x + 0.1 * action).clamp(-2.0, 2.0)
        return self.x.clone()


class Watching:
    """A control loop that encodes and keeps what it sees: nothing of it trains."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.robot = Robot()
        self.policy = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
        self.encoder = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
        self.seen = torch.zeros(16)

    def iteration(self, x: torch.Tensor, trips: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        kept: list[torch.Tensor] = []
        with torch.no_grad():
            for _ in range(trips):
                action = self.policy(x)
                x = self.robot.move(action)
                code = self.encoder(x)
                self.seen.mul_(0.9).add_(code)
                kept.append(torch.tanh(self.seen))
        return x, kept

    def over(self, x: torch.Tensor, trips: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        kept: list[torch.Tensor] = []
        with torch.no_grad():
            for push in [0.5 * k for k in range(trips)]:
                action = self.policy(x)
                x = self.robot.move(action + push)
                code = self.encoder(x)
                self.seen.mul_(0.9).add_(code)
                kept.append(torch.tanh(self.seen))
        return x, kept


def bits(watching: Watching, calls: int, fn: Any, trips: int = 12) -> list[torch.Tensor]:
    x = torch.ones(16)
    found = []
    for _ in range(calls):
        x, kept = fn(x, trips)
        found += [x, *kept]
    return [*found, watching.seen, watching.robot.x]


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def half_a_millisecond(loop: LoopView) -> Iterator[tuple[str, int]]:
    """As if every operation of a loop took as long."""
    return ((n.name, 500) for n in loop.graph.nodes if n.op == "call_function")


def decision(name: str, trips: int, lanes: int = 1) -> Decision:
    """The loop of a method pipelined."""
    probe = rose_compiler.compile(getattr(Watching(), name), tune=False, numerics="bitwise")
    probe(torch.ones(16), trips)
    (loop,) = probe._last.unit.program.loops()  # type: ignore[union-attr]
    probe.close()
    return Decision(pipeline=(Pipelined(loop.node.name, lanes, tuple(half_a_millisecond(loop))),))


@pytest.mark.parametrize(
    ("name", "lanes", "trips"),
    [("iteration", 1, 12), ("iteration", 2, 12), ("iteration", 2, 2), ("over", 1, 7)],
)
def test_a_chain_is_pipelined_and_keeps_its_bits(
    name: str, lanes: int, trips: int, tmp_path: Path
) -> None:
    eager = Watching()
    expected = bits(eager, 4, getattr(eager, name), trips)
    path = tmp_path / "decision.json"
    decision(name, trips, lanes).save(path)
    watching = Watching()
    fast = rose_compiler.compile(getattr(watching, name), tune=path, numerics="bitwise")
    assert same(bits(watching, 4, fast, trips), expected)
    assert f"on the coordinator and {lanes} more" in " ".join(fast.explain().split())
    lanes_seen = {s.lane for s in fast.profile.timeline.spans}  # type: ignore[union-attr]
    assert lanes_seen == {"", *(f"thread:pipe{k + 1}" for k in range(lanes))}
    assert "started >= 2" in fast.source  # what belongs to later stages waits in the prologue
    fast.close()


def test_an_exception_is_the_user_s_and_the_next_call_works(tmp_path: Path) -> None:
    path = tmp_path / "decision.json"
    decision("iteration", 12).save(path)
    watching = Watching()
    fast = rose_compiler.compile(watching.iteration, tune=path, numerics="bitwise")
    bits(watching, 2, fast)
    watching.robot.fails_at = watching.robot.moves + 5
    with pytest.raises(ValueError, match="the arm is stuck"):
        fast(torch.ones(16), 12)
    watching.robot.fails_at = -1
    fast(torch.ones(16), 12)
    fast.close()


def test_a_decision_with_pipelined_loops_is_saved_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "decision.json"
    made = Decision(groups=2, pipeline=(Pipelined("outer/inner", 2, (("act", 30), ("env", 0))),))
    made.save(path)
    assert Decision.load(path) == made
    assert str(made) == "groups=2 pipeline=outer.inner:2"
    entry = Entry(tmp_path / "cache", "f", {}, RemarkLog())
    entry.store(made, "it won")
    space = [None, Decision(groups=2)]  # a later run knows it before it has proposed it
    assert entry.load(space) == 2
    assert space[2] == made
    for wrong in (
        [{"loop": "a", "lanes": 0}],
        [{"loop": "", "lanes": 1}],
        [{"loop": "a", "lanes": 1, "micros": [["x", -1]]}],
        [{"loop": "a", "lanes": 1}, {"loop": "a", "lanes": 2}],
        [{"loops": "a"}],
        3,
    ):
        with pytest.raises(ConfigError, match="'pipeline' of a decision"):
            Decision.from_dict({"pipeline": wrong})


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Two cores, operations of half a millisecond, and iterations of these seconds."""
    seconds = {"plain": 1.0, "pipelined": 0.5}
    monkeypatch.setattr(profiling, "detect_cpu", lambda: Machine("two cores", 2))
    monkeypatch.setattr(
        pipelining.Times, "micros", lambda self, key, loop: half_a_millisecond(loop)
    )
    of = pipelining.Times.of
    monkeypatch.setattr(
        pipelining.Times,
        "of",
        lambda *given: replace(of(*given), loops={"for__": 12 * 5 * 500e-6}),
    )
    monkeypatch.setattr(
        Unit, "forecast", lambda self, d: seconds["pipelined" if d.pipeline else "plain"]
    )
    return seconds


def proposed() -> tuple[list[Decision], rose_compiler.Compiled]:
    watching = Watching()
    with rose_compiler.knobs(cache=False):
        fast = rose_compiler.compile(watching.iteration, numerics="bitwise")
        bits(watching, 2, fast)
    candidates = fast._last.unit.tuning()._chooser.candidates  # type: ignore[union-attr]
    fast.close()
    return [one for one in candidates if one is not None and one.pipeline], fast


def test_a_candidate_is_made_from_the_profile(measured: dict[str, float]) -> None:
    (found,), fast = proposed()
    (loop,) = found.pipeline
    assert loop.lanes == 1
    assert {length for _, length in loop.micros} == {500}
    (note,) = [r for r in fast._log if r.code == "interval"]
    first = Watching.iteration.__code__.co_firstlineno
    path = shown_path(__file__)
    kept = f"`kept.append(torch.tanh(self.seen))` ({path}:{first + 8})"
    assert "RecMII 1000 µs" in note.why
    assert f" -> {kept} -> again 1 trip later" in note.why
    assert "ResMII 1250 µs (all work over all lanes)" in note.why


def test_nothing_is_tried_that_is_predicted_to_gain_nothing(measured: dict[str, float]) -> None:
    measured["pipelined"] = 0.99
    found, fast = proposed()
    assert found == []
    (missed,) = fast._log.missed().for_pass("pipeline_loops")
    assert missed.code == "predicted-slower"
    assert "predicted 990 ms an iteration, 1e+03 ms without" in missed.why


def test_loops_stay_where_the_pass_is_left_out(measured: dict[str, float]) -> None:
    with rose_compiler.knobs(passes=("-pipeline_loops",)):
        found, fast = proposed()
    assert found == []
    assert not [r for r in fast._log if r.pass_name == "pipeline_loops"]


def test_no_schedule_is_built_where_trips_follow_each_other_as_fast(
    measured: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    of = pipelining.Times.of
    monkeypatch.setattr(
        pipelining.Times, "of", lambda *given: replace(of(*given), loops={"for__": 12 * 1500e-6})
    )
    found, fast = proposed()
    assert found == []
    (missed,) = fast._log.missed().for_pass("pipeline_loops")
    assert missed.code == "predicted-slower"
    assert "predicted to follow each other in 1500 µs" in missed.why


class Scorer:
    """A component in a host, with a state of its own."""

    def __init__(self) -> None:
        self.total = torch.zeros(16)

    def score(self, x: torch.Tensor) -> torch.Tensor:
        self.total = 0.5 * self.total + x
        return self.total.clone()


def test_a_component_in_a_host_keeps_its_lane(tmp_path: Path) -> None:
    def scored(tune: Any) -> tuple[list[torch.Tensor], rose_compiler.Compiled | None]:
        torch.manual_seed(4)
        policy, encoder = nn.Linear(16, 16), nn.Linear(16, 16)
        with rose_compiler.hosted(Scorer, host="thread") as scorer:

            def iteration(x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
                kept = []
                with torch.no_grad():
                    for _ in range(9):
                        x = torch.tanh(policy(x))
                        total = scorer.score(x)
                        kept.append(encoder(total))
                return x, kept

            fast = None
            if tune is not None:
                fast = rose_compiler.compile(iteration, tune=tune, numerics="bitwise")
            x, found = torch.ones(16), []
            for _ in range(3):
                x, kept = (fast or iteration)(x)
                found += [x, *kept]
            if fast is not None:
                fast.close()
            return found, fast

    _, probe = scored(tune=False)
    (loop,) = probe._last.unit.program.loops()  # type: ignore[union-attr]
    wanted = Pipelined(loop.node.name, 1, tuple(half_a_millisecond(loop)))
    path = tmp_path / "decision.json"
    Decision(hosted=True, pipeline=(wanted,)).save(path)
    found, fast = scored(path)
    assert same(found, scored(None)[0])
    assert fast is not None
    assert 'rt.lane("thread:pipe1")' in fast.source
    assert "host_scorer.submit(" in fast.source
    assert "started >= 2" in fast.source
