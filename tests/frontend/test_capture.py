"""Captured functions do what the functions do: values, states, exceptions, generators."""

from __future__ import annotations

import functools

import pytest

from rose_compiler.frontend.capture import capture
from rose_compiler.ir import interp
from rose_compiler.ir.ops import BRANCH
from rose_compiler.ir.program import is_call, op_of
from rose_compiler.testing.capturing import assert_same, first_trip
from tests.samples import frontend_calls, frontend_loops, frontend_objects, frontend_statements
from tests.samples.frontend_objects import Child, Counter, closure_over, config, rebound_closure

CASES = {
    **frontend_statements.CASES,
    **frontend_loops.CASES,
    **frontend_calls.CASES,
    **frontend_objects.CASES,
}


@pytest.mark.parametrize("name", CASES)
def test_equals_eager(name):
    fn, make = CASES[name]
    assert_same(fn, make)


def run_method(obj, n):
    return obj.run(n)


@pytest.mark.parametrize("kind", [Counter, Child])
def test_methods(kind):
    assert_same(run_method, lambda: (kind(), 4))


@pytest.mark.parametrize("kind", [Counter, Child])
def test_bound_method(kind):
    eager, other = kind(), kind()
    expected = eager.run(4)
    found = capture(other.run, (4,), {})
    assert interp.run(found.program, {"n": 4}) == expected
    assert vars(eager) == vars(other)


def calls_lambdas(rows, low):
    """Each is called while its statement runs; some write what they read or are handed."""
    every, most = [], []
    for k in range(3):
        best = max(rows, key=lambda r: r[0] * k + low)
        list(map(lambda r: every.append((k, r[0])), rows))  # noqa: C417 (as users write it)
        most.append((best[0], len(every), sorted(rows, key=lambda r: -r.pop())[0][0]))
        rows.sort(key=lambda r: -r[-1])
        total = functools.reduce(lambda a, b: a + b[0] * k, rows, 0)
        count = len(every)
        most.append((total, count))
    return every, most, rows, (lambda x: x + 1)(low)


def test_lambdas_called_at_once():
    assert_same(calls_lambdas, lambda: ([[3, 1, 4, 1, 5], [2, 7, 1, 8, 2], [9, 2, 6, 5, 3]], 2))


def test_closure():
    eager, other = closure_over(1), closure_over(1)
    expected = [eager(2), eager(3)]
    program = capture(other, (2,), {}).program
    assert [interp.run(program, {"x": x}) for x in (2, 3)] == expected


def test_closure_rebound_by_a_sibling():
    eager, other = rebound_closure(), rebound_closure()
    expected = eager(3)
    assert interp.run(capture(other, (3,), {}).program, {"k": 3}) == expected


def test_keyword_and_default_arguments():
    pair = frontend_statements.pair
    assert_same(pair, lambda: (1,), lambda: {"z": 5})
    assert_same(pair, lambda: (1, [2]))


def test_static_tests_leave_no_branch():
    program = first_trip(frontend_objects.static_configuration, config(), 1).captured.program
    assert not any(is_call(n, BRANCH) for n in program.nodes())
    text = "\n".join(line for n in program.nodes() if is_call(n) for line in op_of(n).source)
    assert "x - 1" not in text
    assert "x + cfg.deep.k" in text
