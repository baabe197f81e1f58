"""Simulators that users bring: what their step is taken for, and what it may touch."""

from __future__ import annotations

import rose_compiler
from rose_compiler.ir.program import is_call, op_of
from rose_compiler.ir.verify import verify
from rose_compiler.testing.capturing import first_trip


class Sharded:
    """Counts; offers what a sharded simulator offers."""

    def __init__(self) -> None:
        self.count = 0

    def shards(self) -> list[Sharded]:
        return [self]

    def step(self, action: int) -> tuple[int, float]:
        self.count += action
        return self.count, 1.0


class Declared(Sharded):
    """Says that a step touches nothing but the simulator."""

    @rose_compiler.component(reads=["self"], writes=["self"])
    def step(self, action: int) -> tuple[int, float]:
        return super().step(action)


def loop(env, total):  # type: ignore[no-untyped-def]
    for _ in range(3):
        obs, reward = env.step(2)
        total.append(obs + reward)
    return total


def step_of(env):  # type: ignore[no-untyped-def]
    trip = first_trip(loop, env, [])
    assert trip.result == [3.0, 5.0, 7.0]
    (op,) = [
        op_of(n) for n in trip.captured.program.nodes() if is_call(n) and op_of(n).kind == "step"
    ]
    return op


def test_an_undeclared_step_may_draw_from_global_generators() -> None:
    assert "rng:torch" in step_of(Sharded()).signature.writes


def test_a_declared_step_is_a_step_and_touches_what_it_declares() -> None:
    op = step_of(Declared())
    env = op.attributes["step"]["env"]
    assert op.signature.writes == (env,)
    assert op.signature.reads == (env,)


class Policy:
    @rose_compiler.component(reads=[], writes=[], batch={"obs": 0, "scale": 0, "return.0": 0})
    def act(self, obs, scale=1):  # type: ignore[no-untyped-def]
        return obs * scale


def shadowed(policy, obs):  # type: ignore[no-untyped-def]
    """A loop that has a variable of the parameter's own name."""
    for _ in range(2):
        action = policy.act(obs * 2)
        obs = obs + action
    return obs


def test_batch_axes_follow_a_parameter_whose_name_is_taken() -> None:
    trip = first_trip(shadowed, Policy(), 1)
    assert trip.result == 9
    (op,) = [o for o in trip.captured.program.ops.by_name.values() if o.kind == "component"]
    assert op.signature.batch is not None
    names = {name for name, _ in op.signature.batch}
    assert names <= {*op.signature.params, "return.0"}
    assert len(names) == 2, "an argument that the call leaves out has no axis"
    verify(trip.captured.program)
