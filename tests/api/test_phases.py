"""Phases that a component names are in profile, windows and trace, wherever it lives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import rose_compiler
from rose_compiler.base import phases
from rose_compiler.base.profile import Span, Timeline
from rose_compiler.sim import ShardedEnv
from rose_compiler.tune.windows import find_windows
from tests.api.points import Seen


class Robot:
    """A simulator whose step has two phases, one of them in another."""

    def __init__(self) -> None:
        self.seen = torch.zeros(4, 3)

    def step(self, action: torch.Tensor) -> torch.Tensor:
        """Observations after an action."""
        import time  # of its own process

        import rose_compiler as rose

        with rose.phase("physics"):
            self.seen = torch.tanh(self.seen + action)
            time.sleep(0.004)
            with rose.phase("contacts"):
                time.sleep(0.004)
        with rose.phase("render"):
            time.sleep(0.004)
        return self.seen


def iteration(policy: Any, sim: Any, steps: int) -> torch.Tensor:
    with torch.no_grad():
        obs = torch.zeros(4, 3)
        for _ in range(steps):
            obs = sim.step(policy(obs))
    return obs


NAMES = {"physics", "physics/contacts", "render"}


@pytest.mark.parametrize("host", ["process", "thread", "inline"])
def test_phases_of_a_component_are_seen(host: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    policy = torch.nn.Linear(3, 3)
    with (
        rose_compiler.hosted(Robot, host=host) as sim,
        rose_compiler.hosted(Robot, host="inline") as other,
    ):
        step = rose_compiler.compile(iteration, tune=False)
        for _ in range(5):
            assert torch.equal(step(policy, sim, 2), iteration(policy, other, 2))
        timeline = step.profile.timeline
        assert timeline is not None
        assert {p.op for p in timeline.phases} == NAMES
        assert len(timeline.phases) == 2 * len(NAMES)
        by_lane = {s.lane: s for s in timeline.spans}
        for phase in timeline.phases:
            assert phase.lane in by_lane
            assert 0 <= phase.start_s < phase.end_s <= step.profile.iteration_s[-1]
            assert phase.label.endswith(f": {phase.op}")
        assert Timeline.from_dict(json.loads(json.dumps(timeline.to_dict()))) == timeline
        running = {name for w in step.windows() for name in w.running}
        assert any(name.endswith(": render") for name in running), running
        path = tmp_path / "trace.json"
        step.trace(path)
        step(policy, sim, 2)
        events = json.loads(path.read_text())["traceEvents"]
        named = [e["name"] for e in events if e.get("cat") == "phase"]
        assert sorted(named) == sorted(["physics", "contacts", "render"] * 2)
        step.close()


def rollout(policy: Any, envs: Any, obs: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        for _ in range(2):
            seen, _, _, _, _ = envs.step(policy(obs).numpy())
            obs = torch.as_tensor(seen, dtype=torch.float32)
    return obs


def test_phases_in_the_environments_of_shards_are_in_windows() -> None:
    policy = torch.nn.Linear(3, 3)
    envs = ShardedEnv.split([Seen] * 2, shards=2, hosts="process")
    obs = torch.as_tensor(envs.reset(seed=0)[0])
    step = rose_compiler.compile(rollout, tune=False)
    for _ in range(4):
        obs = step(policy, envs, obs)
    timeline = step.profile.timeline
    assert timeline is not None
    assert {p.op for p in timeline.phases} == {"physics", "render"}
    running = {name for window in step.windows() for name in window.running}
    for phase in ("physics", "render"):
        assert any(name.endswith(f": {phase}") for name in running), running
    step.close()
    envs.close()


def test_a_window_ends_where_a_phase_does() -> None:
    from rose_compiler.base.profile import Activity, Profile

    op = Span("step", "host:sim", 0.0, 0.1, label="sim.step")
    named = (
        Span("physics", "host:sim", 0.0, 0.06, label="sim.step: physics", kind=phases.KIND),
        Span("render", "host:sim", 0.06, 0.1, label="sim.step: render", kind=phases.KIND),
    )
    low = (Activity(0.0, 0.1, "cpu", 0.1),)
    timeline = Timeline((op,), activity=low, phases=named)
    found = list(find_windows(Profile("m", (0.1,), timeline=timeline)))
    assert [(w.start_s, w.end_s, w.running) for w in found] == [
        (0.0, 0.06, ("sim.step", "sim.step: physics")),
        (0.06, 0.1, ("sim.step", "sim.step: render")),
    ]


def test_nobody_who_asks_is_told_nothing() -> None:
    with rose_compiler.phase("alone"):
        assert not phases.wanted()
    spans: list[Span] = []
    with phases.recording(spans):
        with pytest.raises(ValueError, match="gone"), rose_compiler.phase("a"):
            raise ValueError("gone")
        with phases.collecting() as mine, rose_compiler.phase("b"):
            pass
        with phases.recording([]), rose_compiler.phase("c"):
            pass
    assert [s.op for s in spans] == ["a"]
    assert [name for name, _, _ in mine] == ["b"]
