"""Recurrences over numpy's arrays: numpy's own bits and types, computed at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import rose_compiler
from rose_compiler.base.decision import Decision
from rose_compiler.ir.trips import Trips
from rose_compiler.kernels import native, scan_arrays, scan_cpu, scan_native
from tests.passes.scan_loops import T, divided, in_numpy, summed

pytestmark = pytest.mark.skipif(not scan_arrays.SUPPORTED, reason="needs numpy 2")
NAMES = ("rewards", "values", "dones", "out", "more")


def world(shape: tuple[int, ...], seed: int, dtype: Any = np.float32) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    buf = SimpleNamespace(**{n: rng.standard_normal((T, *shape)).astype(dtype) for n in NAMES})
    buf.dones = (buf.dones > 0.7).astype(dtype)
    buf.mask = buf.dones > 0.5
    value = rng.standard_normal(shape).astype(dtype) if shape else dtype(rng.standard_normal())
    return buf, SimpleNamespace(gamma=0.99, lam=0.95), value, value * 0


def check(fn: Any, run: Any, shape: tuple[int, ...], seed: int, dtype: Any = np.float32) -> None:
    """Results and buffers have the bits, the types and the shapes of the loop's."""
    given, again = world(shape, seed, dtype), world(shape, seed, dtype)
    expected, found = fn(*given), run(*again)
    many = isinstance(expected, tuple)
    for a, b in zip(
        [*(expected if many else (expected,)), *(getattr(given[0], n) for n in NAMES)],
        [*(found if many else (found,)), *(getattr(again[0], n) for n in NAMES)],
        strict=True,
    ):
        assert type(a) is type(b)
        assert a.dtype == b.dtype
        assert np.array_equal(a, b)
        assert np.shape(a) == np.shape(b)


@pytest.fixture
def run(tmp_path, monkeypatch) -> Any:
    """Compiles a function; recurrences are compiled to C when they first run."""
    monkeypatch.setattr(scan_native, "AFTER_S", -1.0)
    poll = native.Build.poll
    monkeypatch.setattr(native.Build, "poll", lambda self, wait=0.0: poll(self, 60.0))
    Decision().save(tmp_path / "decision.json")
    made: list[Any] = []

    def compiled(fn: Any, numerics: str = "bitwise") -> Any:
        found = rose_compiler.compile(fn, numerics=numerics, tune=tmp_path / "decision.json")
        made.append(found)
        return found

    yield compiled
    for one in made:
        one.close()


@pytest.mark.skipif(native.compiler() is None, reason="no C compiler")
@pytest.mark.parametrize(
    ("fn", "shape", "dtype"),
    [
        (in_numpy, (), np.float32),
        (in_numpy, (5,), np.float64),
        (in_numpy, (2, 3), np.float32),
        (divided, (5,), np.float32),
        (summed, (70,), np.float64),
    ],
)
def test_bits_of_numpy(fn: Any, shape: Any, dtype: Any, run: Any, monkeypatch) -> None:
    fast = run(fn)
    for seed in range(5):
        check(fn, fast, shape, seed, dtype)
    assert "scan [scan]" in fast.explain(), fast.explain()
    assert "compiled to C in" in fast.explain()
    monkeypatch.setattr(Trips, "over", lambda *args: pytest.fail("a trip ran as it stands"))
    monkeypatch.setattr(scan_cpu, "run", lambda given: pytest.fail("numpy was asked"))
    check(fn, fast, shape, 7, dtype)


@pytest.mark.parametrize("fn", [in_numpy, divided])
def test_arrays_that_do_not_fit_run_trip_by_trip(fn: Any, run: Any) -> None:
    fast = run(fn)
    for seed in range(2):
        check(fn, fast, (4,), seed)
    given, again = world((4,), 3), world((4,), 3)
    for buf in (given[0], again[0]):
        buf.rewards = buf.rewards[::-1]  # strides below zero
        buf.more = buf.more.astype(np.float64)[:, ::2].repeat(2, 1)
    assert np.array_equal(fn(*given)[0], fast(*again)[0])
    assert np.array_equal(given[0].out, again[0].out)


def test_errors_that_numpy_is_to_raise_are_raised(run: Any) -> None:
    fast = run(in_numpy)
    for seed in range(2):
        check(in_numpy, fast, (4,), seed)
    given = world((4,), 1)
    given[0].rewards[:] = 3e38
    with np.errstate(over="raise"), pytest.raises(FloatingPointError):
        fast(*given)


def test_types_that_meet_are_left_to_numpy(run: Any) -> None:
    """Booleans minus numbers make double precision, and functions of other bits are numpy's."""

    def mixed(buf: Any, gamma: float, value: Any) -> Any:
        for t in range(T):
            value = gamma * value * (1.0 - buf.mask[t])
            buf.out[t] = value
        return value

    def rounded(buf: Any, gamma: float, value: Any) -> Any:
        for t in range(T):
            value = gamma * value + np.maximum(buf.rewards[t], 0.0)
            buf.out[t] = value
        return value

    for fn in (mixed, rounded):
        fast = run(fn, "close")
        for seed in range(3):
            (a, _, value, _), (b, _, again, _) = world((4,), seed), world((4,), seed)
            expected, found = fn(a, 0.9, value), fast(b, 0.9, again)
            assert expected.dtype == found.dtype
            assert np.array_equal(expected, found)
            assert np.array_equal(a.out, b.out)
        assert "scan [scan]" not in fast.explain()
