"""Every pass, and the pipeline, on generated programs: what can be seen afterwards stays the same.

Programs run before by the reference executor; after by it too and, where there are slots, by the
slots, with steps on lanes ending at random moments.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose_compiler.base.decision import Decision
from rose_compiler.passes.base import Pass, PassContext
from rose_compiler.passes.canonicalize import Canonicalize
from rose_compiler.passes.defer import Defer
from rose_compiler.passes.hoist import HoistInvariant
from rose_compiler.passes.late import LateWork
from rose_compiler.passes.manager import History, PassManager
from rose_compiler.passes.pipeline import PIPELINE
from rose_compiler.passes.place import Place
from rose_compiler.passes.split import Split
from rose_compiler.passes.tile_batch import TileBatch
from rose_compiler.testing import slots
from rose_compiler.testing.programs import Generated, programs

CONTEXT = PassContext(
    options=Decision(groups=2, late="shadow", defer=True), asynchronous=frozenset({"sim"})
)


def same_after(generated: Generated, passes: tuple[Pass, ...], seed: int) -> History:
    before = generated.run_and_snapshot()
    program = generated.clone()
    history = PassManager(passes, verify=2).run(program, CONTEXT)
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
@settings(max_examples=40)
def test_a_pass_alone(generated: Generated, one: Pass, seed: int) -> None:
    same_after(generated, (one,), seed)


@given(generated=programs(), seed=st.integers(0, 99))
@settings(max_examples=100)
def test_the_pipeline(generated: Generated, seed: int) -> None:
    same_after(generated, PIPELINE, seed)


# no exits, no unknown effects: loops that can be overlapped at all
STEPPING = frozenset({"exit", "opaque", "unbound", "while"})


@given(generated=programs(without=STEPPING, size=40), seed=st.integers(0, 99))
@settings(max_examples=150)
def test_loops_that_overlap(generated: Generated, seed: int) -> None:
    same_after(generated, PIPELINE, seed)


def test_generated_loops_do_overlap() -> None:
    """The tests above would be empty if nothing in them were ever rewritten."""
    seen: dict[str, int] = {}

    @given(generated=programs(without=STEPPING, size=40))
    @settings(max_examples=150)
    def count(generated: Any) -> None:
        history = PassManager(PIPELINE).run(generated.clone(), CONTEXT)
        for name, n in history.rewrites.items():
            seen[name] = seen.get(name, 0) + (n > 0)

    count()
    assert seen["late"] + seen["place"] >= 5, seen
    assert seen["hoist"] >= 5, seen
    assert seen["canonicalize"] >= 5, seen
