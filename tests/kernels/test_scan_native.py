"""Recurrences in C: the bits of one trip after the other, or numpy goes on."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rose_compiler.base import knobs
from rose_compiler.base.recurrence import Input, Recurrence, Store
from rose_compiler.kernels import native, scan, scan_native
from rose_compiler.kernels.scan_native import Built
from tests.kernels.test_scan import TRIPS, Made, arguments, gae, masked, one_by_one

pytestmark = pytest.mark.skipif(native.compiler() is None, reason="no C compiler")


def copies(args: list[Any]) -> list[Any]:
    return [a.clone() if isinstance(a, torch.Tensor) else a for a in args]


def alike(a: Any, b: Any) -> bool:
    """The same bits, any missing value being as good as another."""
    if not isinstance(a, torch.Tensor):
        return a == b
    if a.dtype == torch.bool or not a.is_floating_point():
        return torch.equal(a, b)
    return a.shape == b.shape and a.dtype == b.dtype and scan_native._same(a, b)


def check(of: Recurrence, args: list[Any], seen: list[Recurrence]) -> None:
    """In the fourth run, by C alone, results and buffers have the bits of the loop.

    The first looks on disk, the second lets it be compiled, the third computes both ways."""
    for _ in range(3):
        scan.run(of, copies(args))
    seen.clear()
    again = copies(args)
    expected = one_by_one(of, again)
    found = scan.run(of, args)
    assert found is not None
    assert not seen
    for a, b in zip((*expected, *again), (*found, *args), strict=True):
        assert alike(a, b)


HARD = (0.0, -0.0, 1.0, -1.0, 1e-45, -1e-40, 3e38, -3e38, float("inf"), float("-inf"))


def hard(args: list[Any], seed: int, missing: bool = True) -> list[Any]:
    """Some numbers of all buffers are zeros of both signs, subnormal, huge, infinite or missing."""
    g = torch.Generator().manual_seed(seed)
    values = torch.tensor([*HARD, *((float("nan"),) if missing else ())], dtype=torch.float64)
    for k, a in enumerate(args):
        if isinstance(a, torch.Tensor) and a.is_floating_point():
            picks = values[torch.randint(0, len(values), a.shape, generator=g)].to(a.dtype)
            args[k] = torch.where(torch.rand(a.shape, generator=g) < 0.4, picks, a)
    return args


FORMS = (gae(), gae(True), masked(False), masked(True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("form", range(len(FORMS)))
def test_bits_of_the_loop(form, dtype, no_numpy) -> None:
    for shape in ((), (1,), (3,), (17,), (2, 40), (2050,)):
        check(FORMS[form], arguments(shape, dtype), no_numpy)
        check(FORMS[form], hard(arguments(shape, dtype), 1), no_numpy)


def everything(dtype: torch.dtype) -> Recurrence:
    """A trip with every function that has a form in C, on masks of booleans and of numbers."""
    m = Made()
    a, b, mask, flag = m.row(0), m.row(1), m.row(4), m.row(2)
    x, y = m.carried(0), m.carried(1)
    number = m.number(0.3)
    least, most = m.call("clamp_min", a, number), m.call("clamp_max", b, m.number(-0.0))
    signs = [m.call(f, a, b) for f in ("lt", "le", "gt", "ge", "eq", "ne")]
    tests = signs[0]
    for k, sign in enumerate(signs[1:]):
        tests = m.call(("and_", "or_")[k % 2], tests, m.call("invert", sign))
    tests = m.call("or_", tests, m.call("and_", mask, m.call("gt", flag, m.number(0))))
    parts = [least, most, m.call("neg", a), m.call("clone", a)]
    parts += [m.call("truediv", number, b), m.call("truediv", a, number), m.call("truediv", a, b)]
    if dtype == torch.float32:
        parts.append(m.call("float", mask))
    total = parts[0]
    for k, part in enumerate(parts[1:]):
        total = m.call(("add", "sub", "mul")[k % 3], total, part)
    first = m.call("where", tests, a, m.call("sub", total, m.call("mul", x, m.input(5))))
    second = m.call("where", mask, m.call("add", y, first), m.number(2))
    inputs = tuple(Input(2 + k) for k in range(6))
    return Recurrence(
        *(TRIPS - 1, -1, -1), inputs, tuple(m.items), (first, second), (Store(3, 0, second),)
    )


FULL = {dtype: everything(dtype) for dtype in (torch.float32, torch.float64)}


@settings(max_examples=60)
@given(
    dtype=st.sampled_from([torch.float32, torch.float64]),
    size=st.integers(1, 70),
    seed=st.integers(0, 1 << 16),
)
def test_every_function(dtype, size, seed) -> None:
    """The text is compiled once a type; all values are new each time."""
    of = FULL[dtype]
    args = given_for(of, dtype, size, seed)
    fitted = scan.fit(of, args)
    assert fitted is not None
    kernel = kernel_of(fitted)
    again = copies(args)
    expected = one_by_one(of, again)
    kernel.proven = True
    found = scan_native.together(of, (fitted,), lambda: pytest.fail("numpy was asked"))
    for a, b in zip((*expected, *again), (*found, *args), strict=True):
        assert alike(a, b)


def given_for(of: Recurrence, dtype: torch.dtype, size: int, seed: int) -> list[Any]:
    g = torch.Generator().manual_seed(seed)
    args = hard([torch.randn(size, generator=g, dtype=dtype) for _ in range(2)], seed + 1)
    args += hard([torch.randn(TRIPS, size, generator=g, dtype=dtype) for _ in range(4)], seed + 2)
    mask = torch.rand(TRIPS, size, generator=g) < 0.3
    shape = ((), (size,), (1,))[seed % 3]
    args += [mask, torch.randn(shape, generator=g, dtype=dtype)]
    return args


_built: dict[Any, scan_native._Kernel] = {}


def kernel_of(fitted: scan.Given) -> scan_native._Kernel:
    layout = scan_native._layout(fitted)
    assert layout is not None
    if (fitted.of, layout) not in _built:
        kernel = scan_native._kernel((fitted,))
        assert kernel is not None
        assert kernel.build is not None
        if kernel.function is None:
            kernel.looked = True
            kernel.build.start()
            while not kernel.ready(lambda seconds, why: pytest.fail(why)):
                kernel.build._process.wait()  # type: ignore[union-attr]
        _built[fitted.of, layout] = kernel
    return _built[fitted.of, layout]


def test_what_has_no_form_with_torchs_bits_stays_on_numpy(no_numpy) -> None:
    for function in ("maximum", "minimum", "clamp_min", "sqrt"):
        m = Made()
        given = (m.row(0),) if function == "sqrt" else (m.row(0), m.row(1))
        last = m.call("add", m.carried(), m.call(function, *given))
        inputs = tuple(Input(1 + k) for k in range(2))
        of = Recurrence(0, TRIPS, 1, inputs, tuple(m.items), (last,), ())
        for _ in range(3):
            assert scan.run(of, arguments((4,))[:3]) is not None
        assert len(no_numpy) == 3
        no_numpy.clear()


def test_rows_that_are_not_dense_stay_on_numpy(no_numpy) -> None:
    for _ in range(3):
        args = arguments((6,))
        args[1] = args[1].t().contiguous().t()
        assert scan.run(gae(), args) is not None
    assert len(no_numpy) == 3


def test_rows_far_apart(no_numpy) -> None:
    args = arguments((6,))
    args[4] = torch.zeros(TRIPS, 2, 6)[:, 1]
    check(gae(), args, no_numpy)


def test_a_carried_tensor_keeps_its_memory(no_numpy) -> None:
    m = Made()
    total = m.call("add", m.carried(), m.row(0))
    of = Recurrence(0, TRIPS, 1, (Input(1),), tuple(m.items), (total,), (), inplace=(0,))
    for _ in range(4):
        args = arguments((5,))[:2]
        expected = one_by_one(replace(of, inplace=()), copies(args))
        found = scan.run(of, args)
        assert found is not None
        assert found[0] is args[0]
        assert torch.equal(args[0], expected[0])
    assert len(no_numpy) == 3


def test_autograd_sees_that_tensors_have_changed(no_numpy) -> None:
    of = gae()
    check(of, arguments((5,)), no_numpy)
    args = arguments((5,))
    kept = torch.ones(5, requires_grad=True) * args[4]
    with torch.no_grad():
        assert scan.run(of, args) is not None
    assert not no_numpy
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.sum().backward()


def test_what_is_not_the_same_is_dropped(monkeypatch, no_numpy) -> None:
    """A compiler that contracts sums and products, say."""
    monkeypatch.setattr(scan_native, "_same", lambda a, b: False)
    told: list[Built] = []
    of = gae()
    for _ in range(4):
        args = arguments((5,))
        again = copies(args)
        one_by_one(of, again)
        scan.run(of, args, "scan_t", told.append)
        assert torch.equal(args[4], again[4])
    assert len(no_numpy) == 4
    (note,) = told
    assert "differs" in note.why


def test_without_a_compiler_numpy_goes_on(monkeypatch, no_numpy) -> None:
    monkeypatch.setattr(native, "compiler", lambda: None)
    told: list[Built] = []
    for _ in range(3):
        assert scan.run(gae(), arguments((5,)), "scan_t", told.append) is not None
    assert [t.why for t in told] == []  # a new recurrence each time
    of = gae()
    for _ in range(4):
        assert scan.run(of, arguments((5,)), "scan_t", told.append) is not None
    assert [t.why for t in told] == ["there is no C compiler"]


def test_a_compiler_that_fails(monkeypatch, no_numpy) -> None:
    monkeypatch.setattr(native, "FLAGS", (*native.FLAGS, "-Dlong=nothing"))
    told: list[Built] = []
    of = gae()
    for _ in range(4):
        assert scan.run(of, arguments((5,)), "scan_t", told.append) is not None
    (note,) = told
    assert "the compiler failed" in note.why


def test_little_work_is_not_compiled(monkeypatch) -> None:
    started: list[native.Build] = []
    monkeypatch.setattr(native.Build, "start", started.append)
    of = gae()
    for _ in range(3):
        scan.run(of, arguments((5,)))
    assert not started


# -- on disk


def files(folder: Path) -> list[Path]:
    return sorted((folder / "kernels").iterdir())


def built(folder: Path) -> list[Built]:
    """What is told by a run that knows nothing of earlier ones but by the folder."""
    told: list[Built] = []
    with knobs.knobs(cache=str(folder)):
        scan_native._kernels.clear()
        of = gae()
        for _ in range(4):
            args = arguments((5,))
            again = copies(args)
            one_by_one(of, again)
            scan.run(of, args, "scan_t", told.append)
            assert torch.equal(args[4], again[4])
    return told


def test_a_later_run_finds_it_on_disk(tmp_path, no_numpy) -> None:
    (first,) = built(tmp_path)
    assert first.seconds > 0
    (kept,) = files(tmp_path)  # and nothing half made
    assert not kept.parent.stat().st_mode & 0o077
    no_numpy.clear()
    (second,) = built(tmp_path)
    assert second == Built("scan_t", 0.0)
    assert len(no_numpy) == 1  # the first time both ways


@pytest.mark.parametrize("keep", [0, 1000])
def test_a_broken_file_is_made_anew(tmp_path, at_once, keep) -> None:
    built(tmp_path)
    (path,) = files(tmp_path)
    whole = path.read_bytes()
    path.unlink()  # a library that is loaded is not written to
    path.write_bytes(whole[:keep])
    (told,) = built(tmp_path)
    assert told.seconds > 0
    assert len(path.read_bytes()) > 1000


def test_what_others_may_have_written_is_not_loaded(tmp_path, at_once) -> None:
    built(tmp_path)
    (path,) = files(tmp_path)
    os.chmod(path, 0o666)
    (told,) = built(tmp_path)
    assert told.seconds > 0


def test_a_build_that_is_stopped_leaves_nothing() -> None:
    build = native.Build("int run;")
    build.start()
    scratch = Path(build._scratch)
    assert scratch.exists()
    build.stop()
    assert not scratch.exists()
    assert not build.running
