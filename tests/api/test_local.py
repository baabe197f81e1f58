"""Operations timed by themselves: on the rows and threads of schedules, leaving nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import rose_compiler
from rose_compiler.api import local, searching
from rose_compiler.api.local import budget, measured
from rose_compiler.base.decision import Decision
from rose_compiler.base.errors import SourceLocation
from rose_compiler.base.profile import LoopTime, OpTime, Profile
from rose_compiler.ir import facts
from rose_compiler.ir.facts import Spec
from rose_compiler.ir.keys import nodes_by_key
from rose_compiler.ir.ops import Op
from rose_compiler.ir.parse import parse
from rose_compiler.ir.program import LoopView, Program, op_of
from rose_compiler.tune.local import Local
from rose_compiler.tune.transfer import uses
from tests.api.loops import Training

SIGNATURES = """
@op(kind="graph", reads=[], writes=[], batch={"x": 0, "return.0": 0})
def act(x):
    a = torch.tanh(x)
    return a
"""
PLAIN = """
def ppo(obs0):
    for t, obs in roll(0, 6, 1, obs=obs0):
        a = act(obs)
        yield a
    return roll.obs
"""
TILED = """
def ppo(obs0):
    for t, obs in roll(0, 6, 1, obs=obs0):
        a_0 = act(obs)
        a_1 = act(obs)
        yield a_0
    return roll.obs
"""
LATE = """
def ppo(obs0):
    for t, obs in roll(0, 6, 1, obs=obs0):
        yield obs
    a = act(roll.obs)
    return a
"""
WHERE = SourceLocation("user.py", 1, 0)
ACT = "act", str(WHERE)
PROFILE = Profile(
    "m",
    (0.1,),
    (OpTime("roll/a", 6, 3e-3, 3e-3, mean_s=3e-3, work_s=3e-3),),
    loops=(LoopTime("roll", 1.0, 6.0, 0.02),),
)
#: What a call of the fake module takes, and each row of it on one thread.
CALL_S, ROW_S = 2e-3, 4e-4


class Clock:
    """Time that passes only in calls of the fake module: it sleeps, and then computes rows."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls = 0

    def __call__(self) -> float:
        return self.now

    def timed(self, op: Op) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            rows = next((len(a) for a in args if isinstance(a, torch.Tensor) and a.ndim), 1)
            self.now += CALL_S + ROW_S * rows / torch.get_num_threads()
            self.calls += 1
            return op(*args)

        return run


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(local, "without_checks", made.timed)
    return made


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def program(text: str, rows: int, threads: int = 0, late: bool = False) -> Program:
    made = parse(SIGNATURES + text)
    for node in made.nodes():
        facts.put(node, spec=Spec("tensor", "Tensor", (rows, 3), "float32", "cpu"))
    for node in nodes_by_key(made).values():
        origin = facts.Origin(WHERE, passes=("defer",) if late else ())
        facts.put(node, origin=origin)
    loop = nodes_by_key(made)["roll"]
    facts.put(loop, loop=replace(LoopView(loop).facts, threads=threads))
    return made


def times(clock: Clock, *programs: Program, budget_s: float = 1.0) -> Local:
    plain = program(PLAIN, 8)
    return measured(PROFILE, plain, programs, {"obs": torch.ones(8, 3)}, budget_s, clock)


def test_parts_of_a_batch_are_timed_with_the_threads_that_they_get(clock: Clock) -> None:
    found = times(clock, program(TILED, 4, threads=1), program(TILED, 4))
    assert found.threads == 2
    assert found.sizes == {ACT: 8}
    assert found.seconds(ACT) == pytest.approx(CALL_S + 4 * ROW_S)
    assert found.seconds(ACT, 0.5) == pytest.approx(CALL_S + 2 * ROW_S)
    assert found.seconds(ACT, 0.5, 1) == pytest.approx(CALL_S + 4 * ROW_S)
    assert torch.get_num_threads() == 2


def test_one_call_on_the_rows_of_all_trips(clock: Clock) -> None:
    late = program(LATE, 48, late=True)
    found = times(clock, late)
    assert found.seconds(ACT, 6.0) == pytest.approx(CALL_S + 24 * ROW_S)
    # where there is no time for all rows, those that fit show what the rest takes
    found = times(clock, late, budget_s=0.1)
    (most,) = {p.rows for p in found.points[ACT]} - {1.0}
    assert 2.0 <= most < 6.0
    assert found.seconds(ACT, 6.0) == pytest.approx(CALL_S + 24 * ROW_S, rel=0.1)


def test_nothing_is_timed_that_there_is_no_time_or_no_need_for(clock: Clock) -> None:
    same = times(clock, program(PLAIN, 8))
    none = times(clock, program(TILED, 4), budget_s=0.01)
    assert not same.points
    assert not none.points
    assert clock.calls == 0
    assert budget(60.0, 0.3) == pytest.approx(0.6)
    assert budget(10.0, 10.0) == pytest.approx(0.5)
    assert budget(1000.0, 10.0) == 2.0


def test_what_raises_is_left_to_a_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(op: Op) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            raise IndexError("made-up values")

        return run

    monkeypatch.setattr(local, "without_checks", refuses)
    assert not times(Clock(), program(TILED, 4, threads=1)).points
    assert torch.get_num_threads() == 2


def update(agent: Any, optimizer: Any, envs: Any, buffer: Any, obs: Any) -> Any:
    """Four steps, then two updates."""
    for t in range(4):
        with torch.no_grad():
            action = torch.distributions.Normal(agent.actor(obs), 0.1).sample()
            buffer.values[t] = agent.critic(obs).squeeze(-1)
        obs, reward, _, _, _ = envs.step(action.numpy())
        buffer.rewards[t] = torch.as_tensor(reward, dtype=torch.float32)
        obs = torch.as_tensor(obs, dtype=torch.float32)
    for _ in range(2):
        loss = (agent.critic(obs).squeeze(-1) - buffer.rewards.mean(0)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return obs


def test_a_training_is_left_as_it_was_and_its_schedules_get_figures(
    training: Training, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "LEAST_SHARE", 0.0)
    before: list[dict[str, Any]] = []

    def watched(*args: Any) -> Local:
        before.append(state(training))
        made = measured(*args[:4], 10.0, clock)
        before.append(state(training))
        return made

    monkeypatch.setattr(searching, "measured", watched)
    with rose_compiler.knobs(cache=False):
        fast = rose_compiler.compile(update, numerics="close")
        training.run(fast, 2)
        unit = fast._last.unit
        assert clock.calls
        old, new = before
        assert all(torch.equal(old[k], new[k]) for k in old)
        found = unit.local
        assert found is not None
        base = unit.profiling.of[Decision()]
        own = {u.identity: u.node for u in uses(base.profile, base.program, base.program)}
        assert {p.threads for points in found.points.values() for p in points} == {1, 2}
        tiled = [i for i, points in found.points.items() if any(p.rows == 0.5 for p in points)]
        assert any("actor" in " ".join(op_of(own[i]).source) for i in tiled)
        assert "alone takes" in fast.explain()
        fast.close()


def state(training: Training) -> dict[str, torch.Tensor]:
    """What timing operations must not touch."""
    found = {"rng": torch.get_rng_state(), "threads": torch.tensor(torch.get_num_threads())}
    for name, value in training.agent.named_parameters():
        found[name] = value.detach().clone()
        found[f"{name}.version"] = torch.tensor(value._version)
        if value.grad is not None:
            found[f"{name}.grad"] = value.grad.clone()
    found["rewards"] = training.buffer.rewards.clone()
    found["values"] = training.buffer.values.clone()
    return found
