"""Compiled loops run calls of components in hosts beside the rest, and train the same way."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch

import rose_compiler
from rose_compiler.base.errors import HostDied
from tests.api import hosted_loops
from tests.api.hosted_loops import GATE, Evaluator, Setup, make_evaluator


def compiled(fn: Callable[..., Any], **options: Any) -> Any:
    return rose_compiler.compile(fn, tune=False, **options)


def same(a: Setup, b: Setup) -> None:
    assert a.log == b.log
    for x, y in zip(a.policy.parameters(), b.policy.parameters(), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("numerics", ["close", "bitwise"])
@pytest.mark.parametrize("loop", [hosted_loops.evaluated, hosted_loops.unpacked])
def test_an_evaluator_in_a_thread_of_its_own(loop: Any, numerics: str) -> None:
    with (
        rose_compiler.hosted(make_evaluator, host="thread") as near,
        rose_compiler.hosted(lambda: Evaluator(waits=True), host="thread") as far,
    ):
        far.ready()  # what it draws as it is built comes before the seeds
        a, b = Setup(near), Setup(far)
        step = compiled(loop, numerics=numerics)
        for trip in range(4):
            wanted = loop(*a.args())
            GATE.set()  # nothing to wait for where the call is awaited at once
            if trip > 1:
                GATE.clear()  # it comes back only if training goes on meanwhile
            assert step(*b.args()) == wanted
        same(a, b)
        assert far.overlapped() == 4
        assert "on lane 'host:evaluator'" in step.explain()
        assert far.version == near.version == 4
        step.close()


@pytest.mark.parametrize("loop", [hosted_loops.sometimes, hosted_loops.whole])
def test_an_evaluation_on_every_second_iteration_runs_beside_training(loop: Any) -> None:
    with (
        rose_compiler.hosted(make_evaluator, host="thread") as near,
        rose_compiler.hosted(lambda: Evaluator(waits=True), host="thread") as far,
    ):
        far.ready()
        a, b = Setup(near), Setup(far)
        step = compiled(loop)
        for trip in range(8):
            wanted = loop(trip, *a.args())
            GATE.set()
            if trip > 3:
                GATE.clear()  # it comes back only if training goes on meanwhile
            assert step(trip, *b.args()) == wanted
        same(a, b)
        assert [it for it, _ in b.log] == [0, 2, 4, 6]
        assert far.overlapped() == 4
        assert "submit(" in step.source
        GATE.set()
        step.profile_next()
        assert step(8, *b.args()) == loop(8, *a.args())
        assert "predicted" in step.explain("cost")  # a begun branch has its place in the model
        with rose_compiler.knobs(serial=True):
            GATE.set()
            assert step(10, *b.args()) == loop(10, *a.args())
        same(a, b)
        step.close()


def test_a_whole_training_evaluates_beside_itself() -> None:
    with (
        rose_compiler.hosted(make_evaluator, host="thread") as near,
        rose_compiler.hosted(make_evaluator, host="thread") as far,
    ):
        far.ready()
        a, b = Setup(near), Setup(far)
        step = compiled(hosted_loops.train)
        for setup, run in ((a, hosted_loops.train), (b, step)):
            policy, _, opt, data, evaluator, log = setup.args()
            run(7, policy, opt, data, evaluator, log)
        same(a, b)
        assert [it for it, _ in b.log] == [0, 3, 6]
        assert "evaluate_task.wait()" in step.source
        step.close()


def test_an_evaluation_that_fails_in_a_branch() -> None:
    with rose_compiler.hosted(make_evaluator, host="thread") as far:
        b = Setup(far)
        step = compiled(hosted_loops.failing_sometimes)
        for _ in range(2):
            step(1, *b.args())
        for _ in range(2):
            with pytest.raises(ValueError, match="no score"):
                step(0, *b.args())
        assert isinstance(step(1, *b.args()), float)
        assert b.log == []
        step.close()


def test_checking_mode_agrees() -> None:
    with rose_compiler.hosted(make_evaluator, host="thread") as far:
        b = Setup(far)
        step = compiled(hosted_loops.sometimes, check=True)
        for trip in range(4):
            step(trip, *b.args())
        assert len(b.log) == 2
        step.close()


def test_an_evaluator_in_a_process_of_its_own() -> None:
    with (
        rose_compiler.hosted(make_evaluator, host="thread") as one,
        rose_compiler.hosted(make_evaluator) as other,
    ):
        a, b = Setup(one), Setup(other)
        step = compiled(hosted_loops.evaluated)
        for _ in range(3):
            assert step(*b.args()) == hosted_loops.evaluated(*a.args())
        same(a, b)
        assert "submit(" in step.source
        with rose_compiler.knobs(serial=True):
            assert step(*b.args()) == hosted_loops.evaluated(*a.args())
        same(a, b)
        os.kill(other.pid, signal.SIGKILL)
        with pytest.raises(HostDied):
            step(*b.args())
        step.close()


def test_an_exception_of_the_component_is_the_original() -> None:
    with rose_compiler.hosted(make_evaluator, host="thread") as far:
        b = Setup(far)
        step = compiled(hosted_loops.failing)
        for _ in range(2):
            with pytest.raises(ValueError, match="no score"):
                step(*b.args())
        step.close()


def test_a_whole_search_keeps_training_the_same() -> None:
    with (
        rose_compiler.hosted(make_evaluator, host="thread") as near,
        rose_compiler.hosted(make_evaluator, host="thread") as far,
    ):
        far.ready()  # what it draws as it is built comes before the seeds
        a, b = Setup(near), Setup(far)
        step = rose_compiler.compile(hosted_loops.evaluated, tune=True, numerics="bitwise")
        for _ in range(12):
            assert step(*b.args()) == hosted_loops.evaluated(*a.args())
        same(a, b)
        step.close()
