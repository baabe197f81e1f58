"""Attributes that hand a value from trip to trip become values; what may see them, still does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from rose_compiler.base.remarks import RemarkLog
from rose_compiler.frontend.capture import capture
from rose_compiler.frontend.promote import HELD, SLOT, promote
from rose_compiler.ir import interp
from rose_compiler.ir.deps import Dependences, title_name
from rose_compiler.ir.ops import LOADS, STORES
from rose_compiler.ir.program import Program, is_call, op_of
from rose_compiler.ir.verify import verify
from rose_compiler.testing.capturing import difference, first_trip, values_of
from tests.loops.envs import Reach
from tests.loops.harness import SHARDED, Script, check


class Collector:
    """What a trainer keeps between its calls."""

    def __init__(self, envs: Any = None) -> None:
        self.envs = envs
        self.obs = torch.zeros(3)
        self.old = torch.zeros(3)
        self.seen: list[float] = []
        self.scale = 2.0

    def forget(self) -> None:
        self.obs = torch.zeros(3)

    def note(self) -> None:
        self.seen.append(float(self.obs.sum()))


def handed_on(c: Collector, x: torch.Tensor) -> torch.Tensor:
    for t in range(4):
        y = c.obs * c.scale + x
        c.note()
        c.obs = y + t
    return c.obs.clone()


def swapped(c: Collector, x: torch.Tensor) -> torch.Tensor:
    for t in range(5):
        c.obs, c.old = c.old + x, c.obs
        x = x + c.obs * t
    return x


def twice(c: Collector, x: torch.Tensor) -> torch.Tensor:
    out = x * 0
    for _ in range(3):
        out = out + c.obs
        c.obs = out + x
        out = out + c.obs
        c.obs = c.obs * 2
    return out


def changed_in_place(c: Collector, x: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        y = c.obs
        y.add_(x)
        z = c.obs.sum()
        c.obs = y * 2 + z
        y.mul_(3)
    return y


def in_an_inner_loop(c: Collector, x: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        for k in range(3):
            x = x + c.obs * k
        c.obs = x
    return x


PROMOTED = {handed_on: 1, swapped: 2, twice: 1, changed_in_place: 1, in_an_inner_loop: 1}


def set_on_some_trips(c: Collector, x: torch.Tensor) -> torch.Tensor:
    for t in range(4):
        x = x + c.obs
        c.obs = x
        if t % 2:
            c.forget()
    return x


def set_in_an_inner_loop(c: Collector, x: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        for _ in range(2):
            c.forget()
        x = x + c.obs
        c.obs = x + 1
    return x


def set_by_what_is_not_seen(c: Collector, x: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = x + c.obs
        c.obs = x
        setattr(c, "obs" if len(c.seen) >= 0 else "old", x * 2)
    return x


def changed_by_its_name(c: Collector, x: torch.Tensor) -> torch.Tensor:
    for t in range(3):
        x = x + c.obs
        c.obs[t] = 7.0
        c.obs = x * 2
    return x


def left_early(c: Collector, x: torch.Tensor) -> torch.Tensor:
    for t in range(6):
        y = c.obs + x
        if t == 3:
            continue
        c.obs = y
        if y.sum() > 40:
            break
    return y


KEPT = [set_on_some_trips, set_by_what_is_not_seen, changed_by_its_name, left_early]


def promoted(fn: Any) -> tuple[Program, int, Any]:
    """The program with attributes promoted, how many were, and the result of the first trip."""
    trip = first_trip(fn, Collector(), torch.arange(3.0))
    program = trip.captured.program
    count = promote(program, trip.record, RemarkLog())
    verify(program)
    return program, count, trip.result


def assert_same(fn: Any, program: Program) -> None:
    eager, other = Collector(), Collector()
    args = (other, torch.arange(3.0))
    expected = fn(eager, torch.arange(3.0))
    found = capture(fn, args, {})
    result = interp.run(program, values_of(found, args, {}), found.program.objects)
    assert difference(expected, result) is None
    assert difference(vars(eager), vars(other)) is None


@pytest.mark.parametrize("fn", PROMOTED, ids=lambda f: f.__name__)
def test_what_trips_hand_on_becomes_a_value(fn: Any) -> None:
    program, count, _ = promoted(fn)
    assert count == PROMOTED[fn]
    inside = [n for loop in program.loops() for n in loop.graph.nodes if is_call(n)]
    assert not [n for n in inside if LOADS in op_of(n).attributes]
    assert_same(fn, program)


@pytest.mark.parametrize("fn", KEPT, ids=lambda f: f.__name__)
def test_what_others_may_assign_stays(fn: Any) -> None:
    program, count, _ = promoted(fn)
    assert count == 0
    assert_same(fn, program)


def test_only_the_loop_that_assigns_it_hands_it_on() -> None:
    program, count, _ = promoted(set_in_an_inner_loop)
    assert count == 1  # the inner one
    assert_same(set_in_an_inner_loop, program)


def _stores(node: Any) -> bool:
    return is_call(node) and STORES in op_of(node).attributes


def test_assigning_is_no_write_of_what_was_there() -> None:
    program, _, _ = promoted(handed_on)
    (loop,) = program.loops()
    deps = Dependences(program)
    assert title_name(next(n for n in loop.graph.nodes if _stores(n))) == "c.obs = obs_2"
    written = {e.state for n in loop.graph.nodes for e in deps.effects(n) if e.write}
    assert f"c.obs.{SLOT}" in written
    assert "c.obs" not in written
    assert f"c.obs.{HELD}" in deps.scope.aliases(loop.carried[-1])


class Trainer:
    """Collects by attributes, and raises where its action gets too large."""

    def __init__(self, envs: Any) -> None:
        self.envs = envs
        self.policy = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 2))
        self.obs = torch.as_tensor(envs.reset(seed=0)[0])
        self.rewards = torch.zeros(5, 8)
        self.limit = torch.tensor(100.0)

    @torch.no_grad()
    def act(self) -> torch.Tensor:
        return self.policy(self.obs)

    def collect(self) -> torch.Tensor:
        for t in range(5):
            action = self.act()
            self.obs, reward, *_ = self.envs.step(action.numpy())
            self.obs = torch.as_tensor(self.obs)
            self.rewards[t] = torch.as_tensor(reward)
            if self.rewards[t].sum() < -self.limit:
                raise ArithmeticError("the limit is reached")
        return self.rewards.sum()


def run(compile: Any, vectorize: Any) -> Any:
    trainer = Trainer(vectorize([Reach] * 8))
    collect = compile(trainer.collect)
    return trainer, [collect() for _ in range(4)]


def test_an_observation_kept_by_a_trainer_is_tiled() -> None:
    check(Script("attributes", run, sharded=True, applied=("tile_batch", "late")), SHARDED)


def run_to_an_error(compile: Any, vectorize: Any) -> Any:
    trainer = Trainer(vectorize([Reach] * 8))
    collect = compile(trainer.collect)
    results = [collect() for _ in range(3)]
    trainer.limit.fill_(7.0)
    with pytest.raises(ArithmeticError):
        collect()
    return results, trainer.obs, trainer.rewards


def test_an_error_leaves_an_observation_there() -> None:
    check(Script("an error", run_to_an_error, sharded=True), None)
