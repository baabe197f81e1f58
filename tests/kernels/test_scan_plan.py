"""Later calls of recurrences in C: what is looked at, what is not, and on how many threads."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from rose_compiler.base.recurrence import Recurrence
from rose_compiler.kernels import native, scan, scan_native
from tests.kernels.test_scan import TRIPS, arguments, gae, one_by_one
from tests.kernels.test_scan_native import FORMS, alike, check, copies, hard

pytestmark = pytest.mark.skipif(native.compiler() is None, reason="no C compiler")


# -- calls once it is proven


def proven(seen: list[Recurrence]) -> Recurrence:
    """A recurrence that C computes, and how it was called is kept."""
    of = gae()
    for _ in range(2):
        check(of, arguments((5,)), seen)
    assert scan_native.plan_of(of, 1) is not None
    return of


def test_later_calls_do_not_look_at_everything_anew(monkeypatch, no_numpy) -> None:
    of = proven(no_numpy)
    monkeypatch.setattr(scan, "fit", lambda *args: pytest.fail("it was looked at anew"))
    for other in (0.5, 0.25, 0.25, 0.0, -0.0):  # numbers that differ from the last call's, or not
        args = arguments((5,))
        args[5] = other
        again = copies(args)
        (expected,), (found,) = one_by_one(of, again), scan.run(of, args) or ()
        assert alike(expected, found)
        assert alike(args[4], again[4])


def test_memory_that_meets_is_seen_in_every_call(no_numpy) -> None:
    of = proven(no_numpy)
    whole = torch.randn(2 * TRIPS, 5)
    args = arguments((5,))
    args[4], args[1] = whole[:TRIPS], whole[TRIPS - 1 : -1]  # stored to, and read from
    assert scan.run(of, args) is None
    args = arguments((5,))
    assert scan.run(of, args) is not None
    args[0] = args[4][3]  # what it begins with lies in what it stores to
    assert scan.run(of, args) is None
    args = arguments((5,))
    assert scan.run(of, args) is not None
    args[4].set_(args[1].untyped_storage(), 0, args[4].shape, args[4].stride())  # the same object
    assert scan.run(of, args) is None


def test_gradients_and_shapes_are_seen_in_every_call(no_numpy) -> None:
    of = proven(no_numpy)
    args = arguments((5,))
    args[1].requires_grad_()
    assert scan.run(of, args) is None
    for shape, dtype in (((7,), torch.float32), ((5,), torch.float64)):
        args = arguments(shape, dtype)
        again = copies(args)
        expected, found = one_by_one(of, again), scan.run(of, args)
        assert found is not None
        assert all(map(alike, (*expected, again[4]), (*found, args[4])))
    assert len(no_numpy) == 1  # of another type, which has no function yet


def test_nothing_that_was_handed_over_is_kept(no_numpy) -> None:
    of = proven(no_numpy)
    args = arguments((5,))
    scan.run(of, args)
    kept = [weakref.ref(a) for a in args if isinstance(a, torch.Tensor)]
    del args
    assert all(one() is None for one in kept)


# -- long rows


def shares(monkeypatch) -> list[int]:
    """Threads share short rows too; how many did, call by call."""
    found: list[int] = []
    original = scan_native._shared
    monkeypatch.setattr(scan_native, "SHARED", 1)
    monkeypatch.setattr(scan_native, "LEAST", 64)

    def watched(*args: Any) -> int:
        found.append(original(*args))
        return found[-1]

    monkeypatch.setattr(scan_native, "_shared", watched)
    return found


@pytest.mark.skipif(scan_native._fork() is None, reason="torch has no OpenMP here")
@pytest.mark.parametrize("size", [128, 1000, 2050])
def test_threads_share_long_rows(size, monkeypatch, no_numpy) -> None:
    seen, before = shares(monkeypatch), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        check(FORMS[0], arguments((size,)), no_numpy)
        check(FORMS[2], hard(arguments((size,)), 1), no_numpy)
    finally:
        torch.set_num_threads(before)
    assert max(seen) == 2


@pytest.mark.skipif(scan_native._fork() is None, reason="torch has no OpenMP here")
def test_threads_flush_to_zero_as_their_caller_does(monkeypatch, no_numpy) -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor can't flush subnormal numbers")
    seen, before = shares(monkeypatch), torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        args = arguments((1000,))
        args[1][:] = 1e-41
        check(FORMS[0], args, no_numpy)
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(before)
    assert max(seen) == 2


def test_threads_are_given_up_where_they_do_not_pay() -> None:
    sharing = scan_native._Sharing()
    took = {1: 1.0, 2: 3.0}
    ran = []
    for call in range(400):
        if call == 250:
            took[2] = 0.5
        ran.append(sharing.threads(2))
        sharing.took(ran[-1], took[ran[-1]])
    assert ran[:4] == [2, 1, 2, 1]
    assert ran[10:250].count(2) == 2  # tried again now and then
    assert sharing.shared[-1] == 0.5


def test_one_thread_is_obeyed(monkeypatch, no_numpy) -> None:
    seen, before = shares(monkeypatch), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        check(gae(), arguments((1000,)), no_numpy)
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {1}
