"""Loops in the styles of public training code: captured right, and free to run in any order that
their dependences allow."""

from __future__ import annotations

import contextlib
import io
import random
import warnings

import numpy as np
import pytest
import torch

from bench.capture import LOOPS, blocker, captured, operations
from rose_compiler.frontend.capture import capture
from rose_compiler.ir import interp
from rose_compiler.ir.deps import Dependences
from rose_compiler.testing.capturing import difference, shuffle, values_of

NAMES = {loop.name: loop for loop in LOOPS}


@pytest.fixture(autouse=True)
def _quiet():
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def without_clock(arguments):
    """Logs hold steps a second; nothing else may hang on the clock."""
    for argument in (*arguments, *(getattr(a, "writer", None) for a in arguments)):
        rows = getattr(argument, "rows", None)
        if rows is not None:
            argument.rows = [r for r in rows if "SPS" not in r[0] and "time" not in r[0]]
    return arguments


@pytest.mark.parametrize("name", NAMES)
def test_equals_eager(name):
    loop = NAMES[name]

    def run(*arguments):
        result = loop.fn(*arguments)
        without_clock(arguments)
        return result

    def eager():
        seed()
        arguments = loop.make()
        return loop.fn(*arguments), without_clock(arguments)

    def program():
        seed()
        arguments = loop.make()
        found = capture(loop.fn, arguments, {})
        result = interp.run(found.program, values_of(found, arguments, {}))
        return result, without_clock(arguments)

    assert difference(eager(), program()) is None


def seed():
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002 (the loops use it)
    random.seed(0)


@pytest.mark.parametrize("name", NAMES)
def test_any_legal_order_gives_the_same(name):
    """A dependence that capture did not see would show: the orders are far from the program's."""
    loop = NAMES[name]
    seed()
    arguments = loop.make()
    expected = loop.fn(*arguments), without_clock(arguments)
    trip = captured(loop)
    moved = 0
    for number in range(3):
        moved += shuffle(trip.captured.program, random.Random(number))
        seed()
        arguments = loop.make()
        fresh = capture(loop.fn, arguments, {})
        values = values_of(fresh, arguments, {})
        result = interp.run(trip.captured.program, values, fresh.program.objects)
        assert difference(expected, (result, without_clock(arguments))) is None
    assert moved > operations(trip.captured.program) / 3


@pytest.mark.parametrize("name", NAMES)
def test_nothing_reads_and_writes_everything(name):
    assert list(captured(NAMES[name]).log.missed()) == []


def test_most_overlaps_are_allowed():
    found = []
    for loop in LOOPS:
        deps = Dependences(captured(loop).captured.program)
        found += [blocker(deps, overlap) is None for overlap in loop.overlaps]
    assert sum(found) / len(found) >= 0.8


def test_what_really_depends_is_not_allowed():
    """The count is worth something only if a true dependence is seen."""
    deps = Dependences(captured(NAMES["SAC, a script"]).captured.program)
    overlap = type(LOOPS[0].overlaps[0])
    actor = overlap("", ("actor_optimizer.step()",), ("if global_step < args.learning_starts",), 1)
    assert blocker(deps, actor) is not None
    store = overlap("", ("rb.add(",), ("rb.sample(",))
    assert blocker(deps, store) is not None
    deps = Dependences(captured(NAMES["PPO, a script"]).captured.program)
    act = overlap("", ("envs.step(",), ("agent.get_action_and_value(next_obs)",), 1)
    assert blocker(deps, act) is not None
