"""Every pass, and the pipeline, on generated programs: what can be seen afterwards stays the same.

Programs run before by the reference executor; after by it too and, where there are slots, by the
slots, with steps on lanes ending at random moments.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose_compiler.base.decision import Decision
from rose_compiler.ir import interp
from rose_compiler.passes.base import Pass, PassContext
from rose_compiler.passes.canonicalize import Canonicalize
from rose_compiler.passes.defer import Defer
from rose_compiler.passes.hoist import HoistInvariant
from rose_compiler.passes.late import LateWork
from rose_compiler.passes.manager import History, PassManager, check_round_trip
from rose_compiler.passes.pipeline import PIPELINE
from rose_compiler.passes.place import Place
from rose_compiler.passes.split import Split
from rose_compiler.passes.tile_batch import TileBatch
from rose_compiler.testing import slots
from rose_compiler.testing.programs import Generated, programs
from rose_compiler.testing.rollouts import Rollout, rollouts

# a minute of work on an idle core, many on a busy machine
pytestmark = pytest.mark.timeout(900)

CONTEXT = PassContext(
    options=Decision(groups=2, late="shadow", defer=True), asynchronous=frozenset({"sim"})
)
# no exits, no unknown effects: loops that can be overlapped at all
STEPPING = frozenset({"exit", "gradient", "opaque", "strange", "unbound", "while"})
DECISIONS = st.builds(
    Decision,
    groups=st.integers(0, 4),
    late=st.sampled_from(["shadow", "shadow", "inline"]),
    defer=st.booleans(),
    lanes=st.sampled_from(["native", "native", "thread", "inline"]),
)


def same_after(
    generated: Generated, passes: tuple[Pass, ...], seed: int, verify: int = 2
) -> History:
    before = generated.run_and_snapshot()
    program = generated.clone()
    history = PassManager(passes, verify=verify).run(program, CONTEXT)
    assert generated.run_and_snapshot(program) == before
    if not before.raised:
        by_slots = generated.observe(
            lambda objects: slots.run(program, generated.args, objects, seed=seed)
        )
        assert by_slots == before
    return history


@pytest.mark.parametrize(
    "one",
    [Canonicalize(), HoistInvariant(), Split(), TileBatch(), Defer(), LateWork(), Place()],
    ids=lambda p: p.name,
)
@given(generated=programs(), seed=st.integers(0, 99))
@settings(max_examples=15)
def test_a_pass_alone(generated: Generated, one: Pass, seed: int) -> None:
    same_after(generated, (one,), seed)


@given(generated=programs(), seed=st.integers(0, 99))
@settings(max_examples=40)
def test_the_pipeline(generated: Generated, seed: int) -> None:
    same_after(generated, PIPELINE, seed, verify=1)


def test_loops_that_overlap() -> None:
    applied: Counter[str] = Counter()

    @given(generated=programs(without=STEPPING, size=40), seed=st.integers(0, 99))
    @settings(max_examples=100)
    def check(generated: Generated, seed: int) -> None:
        history = same_after(generated, PIPELINE, seed, verify=1)
        applied.update(name for name, n in history.rewrites.items() if n)

    check()
    # the test would be empty if nothing were ever rewritten
    assert applied["late"] + applied["place"] >= 2, applied
    assert applied["hoist"] >= 4, applied
    assert applied["canonicalize"] >= 4, applied


def test_rollouts() -> None:
    applied: Counter[str] = Counter()

    @given(rollout=rollouts(), decision=DECISIONS, seed=st.integers(0, 99))
    @settings(max_examples=120)
    def check(rollout: Rollout, decision: Decision, seed: int) -> None:
        context = PassContext(
            options=decision,
            asynchronous=frozenset({"envs"}),
            shards={"envs": rollout.shards},
        )
        program = rollout.program()
        before = rollout.run(interp.run, program)
        history = PassManager(PIPELINE).run(program, context)
        check_round_trip(program)
        applied.update(name for name, n in history.rewrites.items() if n)
        assert rollout.run(interp.run, program) == before

        def by_slots(p: Any, values: Any, objects: Any) -> Any:
            return slots.run(p, values, objects, seed=seed)

        assert rollout.run(by_slots, program) == before

    check()
    assert applied["late"] >= 20, applied
    assert applied["tile_batch"] >= 10, applied
    assert applied["defer"] >= 3, applied
