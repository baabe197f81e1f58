"""Checking mode and the comparison on eager's inputs, on generated rollouts: no false alarm, and a
wrong operation is found."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose_compiler.api.checking import Checker
from rose_compiler.base.decision import Decision
from rose_compiler.base.errors import VerifyError
from rose_compiler.ir import interp
from rose_compiler.ir.bodies import copy_program
from rose_compiler.ir.program import Program, is_call, op_of
from rose_compiler.passes.base import PassContext
from rose_compiler.passes.manager import PassManager
from rose_compiler.passes.pipeline import PIPELINE
from rose_compiler.testing.rollouts import Rollout, rollouts

DECISIONS = st.builds(
    Decision,
    groups=st.integers(2, 4),
    late=st.sampled_from(["shadow", "inline"]),
    defer=st.booleans(),
)


def rewritten(rollout: Rollout, captured: Program, decision: Decision) -> Program:
    program = copy_program(captured)
    context = PassContext(
        options=decision, asynchronous=frozenset({"envs"}), shards={"envs": rollout.shards}
    )
    PassManager(PIPELINE).run(program, context)
    return program


def test_no_false_alarm() -> None:
    counted: Counter[str] = Counter()

    @given(rollout=rollouts(), decision=DECISIONS)
    @settings(max_examples=30)
    def check(rollout: Rollout, decision: Decision) -> None:
        captured = rollout.program()
        before = rollout.run(interp.run, captured)
        program = rewritten(rollout, captured, decision)

        def checked(_: Program, values: Any, objects: Any) -> Any:
            checker = Checker(captured, program, objects, "bitwise")
            result = checker.run(values)
            counted["checked"] += checker.checked
            counted["unchecked"] += len(checker.unchecked)
            return result

        assert rollout.run(checked, program) == before

    check()
    assert counted["checked"] >= 30, counted


def test_a_wrong_operation_is_found() -> None:
    found: Counter[str] = Counter()

    @given(rollout=rollouts(), decision=DECISIONS)
    @settings(max_examples=25)
    def check(rollout: Rollout, decision: Decision) -> None:
        captured = rollout.program()
        program = rewritten(rollout, captured, decision)
        rows = sum(rollout.shards)
        tiled = [
            op_of(n)
            for n in program.nodes()
            if is_call(n) and op_of(n).name in ("act", "perturb", "to_obs") and "_0" in n.name
        ]
        if not tiled:
            return
        part = tiled[0]
        right = part.impl
        assert right is not None
        with pytest.MonkeyPatch.context() as patch:

            def wrong(*args: Any) -> Any:
                """Rows are coupled: some alone give other values than within the whole."""
                made = right(*args)
                if len(args[0]) == rows:
                    return made
                return (made[0] + 1, *made[1:]) if isinstance(made, tuple) else made + 1

            patch.setattr(part, "impl", wrong)

            def checked(_: Program, values: Any, objects: Any) -> Any:
                checker = Checker(captured, program, objects, "close")
                try:
                    checker.run(values)
                except VerifyError as error:
                    found["told" if error.code == "check-values-differ" else error.code] += 1
                else:
                    found["missed"] += 1

            rollout.run(checked, program)

    check()
    assert found["told"] >= 3, found
    assert set(found) == {"told"}, found
