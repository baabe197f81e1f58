"""Loops of published code: compiled, they leave eager's values behind, computed at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import rose_compiler
from rose_compiler.base.decision import Decision
from rose_compiler.ir.trips import Trips
from rose_compiler.kernels import native, scan, scan_cpu, scan_native
from rose_compiler.passes.manager import PassManager
from rose_compiler.passes.scan import Scan
from rose_compiler.testing.capturing import first_trip
from rose_compiler.tune.memory import added
from tests.passes import scan_loops
from tests.passes.scan_loops import LOOPS, T

NAMES = ("rewards", "values", "dones", "logratio", "out", "more")


def world(size: int, seed: int) -> tuple[Any, ...]:
    g = torch.Generator().manual_seed(seed)
    buf = SimpleNamespace(**{n: torch.randn(T, size, generator=g) for n in NAMES})
    buf.dones = (buf.dones > 0.7).float()
    buf.mask = buf.dones > 0.5
    done = torch.zeros(size)
    return buf, SimpleNamespace(gamma=0.99, lam=0.95), torch.randn(size, generator=g), done


def seen(result: Any, given: tuple[Any, ...]) -> list[torch.Tensor]:
    found = list(result) if isinstance(result, tuple) else [result]
    return [*found, *(getattr(given[0], n) for n in NAMES), *given[2:]]


def compiled(fn: Any, tmp_path: Any, **options: Any) -> Any:
    path = tmp_path / "decision.json"
    Decision().save(path)
    return rose_compiler.compile(fn, tune=path, **options)


@pytest.fixture
def runs(monkeypatch) -> list[bool]:
    """Whether each recurrence that ran was computed at once."""
    found: list[bool] = []
    original = scan.run

    def watched(*args: Any) -> Any:
        made = original(*args)
        found.append(made is not None)
        return made

    monkeypatch.setattr(scan, "run", watched)
    return found


@pytest.mark.parametrize("numerics", ["bitwise", "close"])
@pytest.mark.parametrize("fn", LOOPS, ids=lambda f: f.__name__)
def test_values_of_the_loop(fn, numerics, tmp_path, runs) -> None:
    exact = fn is not scan_loops.vtrace
    run = compiled(fn, tmp_path, numerics=numerics)
    for call in range(3):
        given, again = world(5, call), world(5, call)
        expected, found = seen(fn(*given), given), seen(run(*again), again)
        for a, b in zip(expected, found, strict=True):
            assert a.shape == b.shape
            assert torch.equal(a, b) if exact or numerics == "bitwise" else True
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    # the first call is watched as it stands; so are functions whose last bits may differ
    assert runs == ([True] * 2 if exact or numerics == "close" else []), run.explain()


def test_other_types_than_at_capture_run_trip_by_trip(tmp_path, runs) -> None:
    """A buffer that is replaced below an object is not seen by guards."""
    run = compiled(scan_loops.returns, tmp_path)
    run(*world(5, 0))
    buf, k, value, done = world(5, 1)
    run(buf, k, value, done)
    expected, found = (world(5, 2) for _ in range(2))
    run(*found)
    scan_loops.returns(*expected)
    assert torch.equal(expected[0].out, found[0].out)
    for given in (expected, found):
        given[0].rewards = given[0].rewards.double()
    run(*found)
    scan_loops.returns(*expected)
    assert torch.equal(expected[0].out, found[0].out)
    assert runs[:2] == [True, True]


def test_gradients_flow_as_in_the_loop(tmp_path, runs) -> None:
    """A gradient that was not there at capture: trips run one by one and build eager's graph."""
    run = compiled(scan_loops.returns, tmp_path)
    for _ in range(2):
        run(*world(5, 0))
    grads = []
    for fn in (scan_loops.returns, run):
        buf, k, value, done = world(5, 1)
        buf.values.requires_grad_()
        k.gamma = buf.values[0]
        fn(buf, k, value, done).sum().backward()
        grads.append(buf.values.grad)
    assert torch.equal(*grads)


def test_a_global_that_changes(tmp_path, runs, monkeypatch) -> None:
    run = compiled(scan_loops.returns, tmp_path)
    for call, scale in enumerate((0.5, 0.5, 2.0)):
        monkeypatch.setattr(scan_loops, "SCALE", scale)
        given, again = world(5, call), world(5, call)
        expected, found = seen(scan_loops.returns(*given), given), seen(run(*again), again)
        assert all(map(torch.equal, expected, found))
    assert runs[0] is True


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda buf: buf.rewards.half(), "computes with"),
        (lambda buf: buf.rewards[:, None], "rows of several shapes"),
    ],
)
def test_what_is_known_not_to_fit_stays_a_loop(change, why) -> None:
    given = world(1, 0)
    given[0].rewards = change(given[0])
    program = first_trip(scan_loops.shifted, *given).captured.program
    history = PassManager([Scan()]).run(program)
    (missed,) = history.remarks.missed()
    assert missed.code == "unsupported-shape"
    assert why in missed.why


@pytest.mark.parametrize("fn", [scan_loops.any_length, scan_loops.both_ends])
def test_another_number_of_trips(fn, tmp_path, runs) -> None:
    """The buffers are replaced below an object, so no guard sees it."""
    run = compiled(fn, tmp_path)
    given = world(5, 0)
    for cut in (T, T, T - 3, 1, T):
        expected, found = world(5, 1), given
        for buf in (expected[0], found[0]):
            for name, whole in vars(world(5, 1)[0]).items():
                setattr(buf, name, whole[:cut].clone())
        other = (found[0], *world(5, 1)[1:])
        assert all(map(torch.equal, seen(fn(*expected), expected), seen(run(*other), other)))
    assert runs == [True, True]


@pytest.mark.skipif(native.compiler() is None, reason="no C compiler")
@pytest.mark.parametrize(
    "fn",
    [
        *(scan_loops.shifted, scan_loops.cleanrl, scan_loops.any_length, scan_loops.both_ends),
        scan_loops.through_a_buffer,
    ],
)
def test_compiled_to_c_on_the_way(fn, tmp_path, monkeypatch) -> None:
    """Numpy, both, then C alone: the same bits all along, and a remark of how long it took."""
    poll = native.Build.poll
    monkeypatch.setattr(scan_native, "AFTER_S", -1.0)
    monkeypatch.setattr(native.Build, "poll", lambda self, wait=0.0: poll(self, 60.0))
    on_numpy: list[Any] = []
    original = scan_cpu.run

    def watched(given: Any) -> Any:
        on_numpy.append(given.of)
        return original(given)

    monkeypatch.setattr(scan_cpu, "run", watched)
    run = compiled(fn, tmp_path)
    for call in range(6):
        given, again = world(5, call), world(5, call)
        expected, found = seen(fn(*given), given), seen(run(*again), again)
        assert all(map(torch.equal, expected, found))
        assert [a.shape for a in expected] == [b.shape for b in found]
    assert len(on_numpy) == 3  # the first call is watched
    assert "compiled to C in" in run.explain()
    # trips at the ends included, nothing runs as it stands any more
    monkeypatch.setattr(Trips, "over", lambda *args: pytest.fail("a trip ran as it stands"))
    run(*world(5, 7))


def test_a_setting_that_changes(tmp_path, runs) -> None:
    run = compiled(scan_loops.shifted, tmp_path)
    for call, gamma in enumerate((0.99, 0.99, 0.5, 0.25)):
        given, again = world(5, call), world(5, call)
        given[1].gamma = again[1].gamma = gamma
        expected, found = seen(scan_loops.shifted(*given), given), seen(run(*again), again)
        assert all(map(torch.equal, expected, found))
    assert all(runs)


@pytest.mark.skipif(native.compiler() is None, reason="no C compiler")
def test_what_is_computed_both_ways_is_in_the_memory_plan(tmp_path, monkeypatch) -> None:
    poll = native.Build.poll
    monkeypatch.setattr(scan_native, "AFTER_S", -1.0)
    monkeypatch.setattr(native.Build, "poll", lambda self, wait=0.0: poll(self, 60.0))
    copied: list[int] = []
    original = scan_native._tried

    def watched(parts: Any, kernel: Any, into: Any, size: int) -> Any:
        copied.append(sum(t.nbytes for t in into.values()))
        return original(parts, kernel, into, size)

    monkeypatch.setattr(scan_native, "_tried", watched)
    run = compiled(scan_loops.shifted, tmp_path)
    for call in range(5):
        run(*world(300, call))
    unit = run._last.unit
    pieces = added(unit.program, unit.build(Decision()).program)
    (piece,) = (p for p in pieces if "both ways" in p.what)
    assert piece.passing
    assert copied == [piece.bytes]
    assert piece.bytes < 4 * T * 128
