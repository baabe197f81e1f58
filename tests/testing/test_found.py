"""What the fuzzer has found: each program once more, as small as it was made."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch

import rose_compiler
from rose_compiler.base.decision import Decision
from rose_compiler.base.errors import VerifyError
from rose_compiler.ir import interp
from rose_compiler.ir.parse import parse
from rose_compiler.ir.verify import verify
from rose_compiler.runtime.slow import SlowRuntime
from rose_compiler.testing import aliasing
from rose_compiler.testing.functions import load
from rose_compiler.testing.lanes import execute
from rose_compiler.testing.program_ops import OPS

FIRST_ASSIGNED_BY_A_STEP = """
def main(w, ones):
    log = []
    obs = ones[0]
    for t in range(3):
        for k in range(3):
            obs, reward, _, _, _ = w.sim.step(obs * 0.5 + k)
            w.left[0] = k
        w.net(obs).sum().backward()
        w.optimizer.step()
        log.append((reward, float(obs.sum())))
    return log
"""


def test_a_variable_that_a_lent_value_is_assigned_to_first(tmp_path: Path) -> None:
    """`reward` is unbound in front of the loop; copying what may be lent raised there."""
    module = load(aliasing.HEADER + FIRST_ASSIGNED_BY_A_STEP, tmp_path / "first_assigned.py")
    chosen = tmp_path / "decision.json"
    Decision(late="shadow", lanes="thread").save(chosen)
    compiled = rose_compiler.compile(module.main, numerics="bitwise", tune=chosen)
    results = [compiled(module.World(), torch.ones(1, 2)) for _ in range(2)]
    assert results[0] == results[1] == module.main(module.World(), torch.ones(1, 2))
    assert "rt.snapshot(reward)" in compiled.source, "the test is about this copy"
    compiled.close()


#: A value that is made two trips late, in a loop that has one trip: no later trip waits for it.
LATE_IN_A_LOOP_OF_ONE_TRIP = """
@op(reads=[], writes=[], may_raise=False)
def mix(a, b): ...

@op(kind="component", reads=[], writes=[], may_raise=False)
def twist(a): ...

@program(stage="scheduled")
def generated(a, b):
    for t, c0, c1 in loop(0, 1, 1, c0=a, c1=b):
        early = mix(c0, c1) @ lane(order=4)
        total = mix(early, early) @ lane("thread:b", stage=1, order=10)
        twist = twist(total) @ lane("thread:a", stage=2)
        yield twist, c0
    first = loop.c0
    second = loop.c1
    return first, second
"""


def test_a_loop_of_one_trip_hands_nothing_to_a_next_one() -> None:
    """Emitting it asked for the value in front of the next trip, and refused the schedule."""
    named = ("mix", "twist")
    program = parse(LATE_IN_A_LOOP_OF_ONE_TRIP, {name: OPS[name].impl for name in named})
    verify(program)
    args = {"a": 5, "b": 8}
    with contextlib.closing(SlowRuntime(3)) as runtime:
        assert execute(program, args, {}, runtime) == interp.run(program, args)


#: A value that is handed on over two trips, in a loop that has two: it is read by no trip, but
#: takes its place behind the loop by way of what the second trip reads.
HANDED_ON_BEYOND_THE_LAST_TRIP = """
@op(reads=[], writes=[], may_raise=False)
def mix(a, b): ...

@op(kind="component", reads=[], writes=[], may_raise=False)
def twist(a): ...

@program(stage="scheduled")
def generated(a, b):
    for t, c0, c1 in loop(0, TRIPS, 1, c0=a, c1=b):
        early = mix(c1, c1) @ lane(order=4)
        total = mix(early, early) @ lane("thread:b", stage=STAGE, order=10)
        twist = twist(total) @ lane(LANEstage=STAGE, order=20)
        yield twist, c0
    first = loop.c0
    second = loop.c1
    return first, second
"""


@pytest.mark.parametrize("lane", ["", '"thread:a", '])
@pytest.mark.parametrize("trips", [1, 2, 3])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_is_verified_can_be_emitted(stage: int, trips: int, lane: str) -> None:
    """Emission refused what the verifier had let pass, in loops of as many trips as it reaches."""
    text = HANDED_ON_BEYOND_THE_LAST_TRIP.replace("TRIPS", str(trips))
    text = text.replace("STAGE", str(stage)).replace("LANE", lane)
    program = parse(text, {name: OPS[name].impl for name in ("mix", "twist")})
    if trips > 1 and stage > 1:
        with pytest.raises(VerifyError, match="early has to wait for twist"):
            verify(program)
        return
    verify(program)
    args = {"a": 5, "b": 8}
    with contextlib.closing(SlowRuntime(3)) as runtime:
        assert execute(program, args, {}, runtime) == interp.run(program, args)
