"""Rows that are views, and tensors that others see: a scan computes what the loop does, or stays
one."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import rose_compiler
from rose_compiler.base.decision import Decision
from rose_compiler.kernels import native, scan_arrays, scan_native
from rose_compiler.kernels.scan_memory import plain

T = 12


def picked_before(buf: Any, k: Any, value: Tensor) -> Any:
    """``old`` is a view of the row that is stored to before it is used."""
    total = value
    for t in range(T):
        old = buf.out[t]
        buf.out[t] = old * k.g + buf.r[t]
        total = total * k.g + old
    return total


def picked_as_float(buf: Any, k: Any, value: Tensor) -> Any:
    """``float`` of single precision is the tensor itself."""
    total = value
    for t in range(T):
        old = buf.out[t].float()
        buf.out[t] = old * k.g + buf.r[t]
        total = total * k.g + old
    return total


def changed_as_float(buf: Any, k: Any, value: Tensor) -> Any:
    total = value.clone()
    for t in range(T):
        before = total.float()
        total += buf.r[t]
        buf.out[t] = before * k.g
    return total


def used_before(buf: Any, k: Any, value: Tensor) -> Any:
    """Nothing asks for the row once it is stored to."""
    total = value
    for t in range(T):
        old = buf.out[t]
        total = total * k.g + old
        buf.out[t] = total - old
    return total


def picked_after(buf: Any, k: Any, value: Tensor) -> Any:
    """A row that is picked after a store is not the tensor that was stored."""
    total = value.clone()
    for t in range(T):
        total += buf.r[t]
        buf.out[t] = total
        total = buf.out[t]
        total *= k.g
    return total


def stored_row(buf: Any, k: Any, value: Tensor) -> Any:
    """What is handed on is a row of the buffer, in the end too."""
    last = value
    for t in range(T):
        buf.out[t] = last * k.g + buf.r[t]
        last = buf.out[t]
    return last


def row_before(buf: Any, k: Any, value: Tensor) -> Any:
    """What is handed on is the row that the trip before has stored."""
    last = value
    for t in range(1, T):
        last = buf.out[t - 1]
        buf.out[t] = last * k.g + buf.r[t]
    return last


def float_row(buf: Any, k: Any, value: Tensor) -> Any:
    total = value
    last = value
    for t in range(T):
        total = total * k.g + last
        buf.out[t] = total
        last = buf.r[t].float()
    return total, last


def two_names(buf: Any, k: Any, value: Tensor) -> Any:
    total, same = value, value
    for t in range(T):
        total = total * k.g + buf.r[t]
        same = total
        buf.out[t] = total
    total += 1
    return total, same


def products(buf: Any, k: Any, value: Tensor) -> Any:
    """Each product with a tensor of ones is rounded to single precision."""
    total = value
    for t in range(T):
        total = buf.r[t] + torch.ones_like(value) * k.g * k.l * total
        buf.out[t] = total
    return total


def over_zero(buf: Any, k: Any, value: Tensor) -> Any:
    total = value
    for t in range(T):
        total = torch.where(buf.m[t], 1.0 / torch.zeros_like(total), total * k.g + buf.r[t])
        buf.out[t] = total
    return total


def over_small(buf: Any, k: Any, value: Tensor) -> Any:
    """Zero over a number below the least normal one is zero; its reciprocal is infinite."""
    total = value
    for t in range(T):
        total = total * k.g + torch.zeros_like(buf.r[t]) / (buf.r[t] * 1e-40)
        buf.out[t] = total
    return total


def filled_in_place(buf: Any, k: Any, value: Tensor) -> Any:
    total = value
    for t in range(T):
        zeros = torch.zeros_like(total)
        same = zeros
        zeros += buf.r[t]
        total = total * k.g + same
        buf.out[t] = total
    return total


def wider(buf: Any, k: Any, value: Tensor) -> Any:
    """Zeros of more axes make a result of more axes."""
    total = value
    for t in range(T):
        row = total * k.g + torch.zeros_like(k.wide)
        buf.out[t] = row[0]
        total = buf.r[t] * total
    return total


def filled(buf: Any, k: Any, value: Tensor) -> Any:
    """Beside what they are like, tensors of zeros and ones are as good as numbers."""
    total = value
    for t in range(T):
        total = total * k.g + buf.r[t] * torch.ones_like(buf.r[t])
        total = torch.where(buf.m[t], torch.zeros_like(total), total / torch.ones_like(total))
        buf.out[t] = total
    return total


def world(seed: int, n: int = 5) -> tuple[Any, ...]:
    g = torch.Generator().manual_seed(seed)
    buf = SimpleNamespace(**{name: torch.randn(T, n, generator=g) for name in ("r", "v", "out")})
    buf.m = torch.randn(T, n, generator=g) > 0.5
    return buf, SimpleNamespace(g=0.9, l=0.95, wide=torch.ones(3, n)), torch.randn(n, generator=g)


@pytest.fixture
def run(tmp_path) -> Any:
    """Compiles a function."""
    Decision().save(tmp_path / "decision.json")
    made: list[Any] = []

    def compiled(fn: Any) -> Any:
        made.append(rose_compiler.compile(fn, numerics="bitwise", tune=tmp_path / "decision.json"))
        return made[-1]

    yield compiled
    for one in made:
        one.close()


def bits(found: Any) -> Any:
    array = found.detach().numpy() if isinstance(found, Tensor) else np.asarray(found)
    return array.tobytes()


def check(fn: Any, fast: Any, world: Any = world) -> None:
    """Results, buffers and the value have the bits of the loop's, also once a buffer has changed
    that results may lie in."""
    for seed in range(3):
        given, again = world(seed), world(seed)
        pairs = []
        for call, args in ((fn, given), (fast, again)):
            results = call(*args)
            seen = results if isinstance(results, tuple) else (results,)
            first = [bits(x) for x in (*seen, args[0].out, args[0].r, args[2])]
            args[0].out += 1
            args[0].r += 1
            pairs.append((first, [bits(x) for x in seen]))
        assert pairs[0] == pairs[1]


@pytest.mark.parametrize(
    ("fn", "scanned"),
    [
        (picked_before, False),
        (picked_as_float, False),
        (changed_as_float, False),
        (used_before, True),
        (picked_after, False),
        (stored_row, False),
        (row_before, False),
        (float_row, False),
        (two_names, False),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_rows_that_are_views(fn: Any, scanned: bool, run: Any) -> None:
    fast = run(fn)
    check(fn, fast)
    assert ("scan [scan]" in fast.explain()) is scanned, fast.explain()


@pytest.mark.parametrize(
    ("fn", "scanned"),
    [
        (products, False),
        (over_zero, False),
        (over_small, False),
        (filled_in_place, False),
        (wider, False),
        (filled, True),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_tensors_of_zeros_and_ones(fn: Any, scanned: bool, run: Any) -> None:
    fast = run(fn)
    check(fn, fast)
    assert ("scan [scan]" in fast.explain()) is scanned, fast.explain()


# -- modes and memory


def running(buf: Any, k: Any, value: Tensor) -> Any:
    total = torch.zeros_like(value)
    for t in range(T):
        total = total * k.g + buf.r[t]
        buf.out[t] = total
    return total


def in_place(buf: Any, k: Any, value: Tensor) -> Any:
    for t in range(T):
        value += buf.r[t]
        buf.out[t] = value
    return value


def backward(buf: Any, k: Any, value: Tensor) -> Any:
    total = value
    following = value
    for t in range(T - 1, -1, -1):
        total = total * k.g + following
        buf.out[t] = total + buf.r[t]
        following = buf.v[t]
    return total, following


@pytest.fixture(params=["numpy", "c"])
def form(request: Any, monkeypatch: Any) -> str:
    """Recurrences run in numpy, or in C from the second time that they run."""
    if request.param == "c":
        if native.compiler() is None:
            pytest.skip("no C compiler")
        monkeypatch.setattr(scan_native, "AFTER_S", -1.0)
        poll = native.Build.poll
        monkeypatch.setattr(native.Build, "poll", lambda self, wait=0.0: poll(self, 60.0))
    found: str = request.param
    return found


def warm(fn: Any, fast: Any, made: Any = world) -> None:
    """Calls until whatever is compiled is used."""
    for seed in range(5):
        fast(*made(seed))
    assert "scan [scan]" in fast.explain(), fast.explain()


def test_a_row_that_is_handed_on_can_be_changed(form: str, run: Any) -> None:
    """It is a view that was made with gradients, as the loop's."""
    fast = run(backward)
    weight = torch.ones(5, requires_grad=True)
    for seed in range(5):
        grads = []
        for call in (backward, fast):
            _, row = call(*world(seed))
            row.mul_(weight)
            assert row.requires_grad
            grads.append(torch.autograd.grad(row.sum(), weight)[0])
        assert torch.equal(*grads)
    assert "scan [scan]" in fast.explain()


@pytest.mark.parametrize("fn", [running, in_place], ids=lambda f: f.__name__)
def test_inference_tensors_are_changed_in_that_mode_alone(fn: Any, form: str, run: Any) -> None:
    fast = run(fn)
    warm(fn, fast)

    def given() -> Any:
        args = world(1)
        with torch.inference_mode():
            args[0].out = args[0].out.clone()
            return args[0], args[1], args[2].clone()

    for _ in range(3):
        with pytest.raises(RuntimeError, match=r"[Ii]nplace update to inference tensor"):
            fast(*given())
        a, b = given(), given()
        with torch.inference_mode():
            found, expected = fast(*a), fn(*b)
        assert found.is_inference() is expected.is_inference() is True
        assert torch.equal(found, expected)
        assert torch.equal(a[0].out, b[0].out)


def test_rows_that_share_elements_are_stored_in_order(form: str, run: Any) -> None:
    fast = run(backward)
    warm(backward, fast)
    for seed in range(3):
        pairs = []
        for call in (backward, fast):
            args = world(seed)
            memory = torch.zeros(T + 5)
            args[0].out = memory.as_strided((T, 5), (1, 1))
            call(*args)
            pairs.append(memory)
        assert torch.equal(*pairs)


@pytest.mark.parametrize(
    ("shape", "stride", "own"),
    [
        ((4, 3), (3, 1), True),
        ((4, 3), (1, 4), True),
        ((4, 3), (6, 2), True),
        ((4, 1), (1, 1), True),
        ((4, 3), (1, 1), False),
        ((4, 3), (2, 1), False),
        ((4, 3), (0, 1), False),
        ((4, 3), (1, 2), False),
    ],
)
def test_elements_with_places_of_their_own(shape: Any, stride: Any, own: bool) -> None:
    assert plain(torch.zeros(24).as_strided(shape, stride)) is own


# -- arrays of numpy


def arrays(seed: int) -> tuple[Any, ...]:
    buf, k, value = world(seed)
    buf.r, buf.out = buf.r.numpy(), buf.out.numpy()
    return buf, k, value.numpy()


def in_numpy(buf: Any, k: Any, value: Any) -> Any:
    total = value
    for t in range(T):
        total = total * k.g + buf.r[t]
        buf.out[t] = total
    return total


def from_buffers(buf: Any, k: Any, value: Any) -> Any:
    total: Any = 0.0
    for t in range(T):
        total = total * k.g + buf.r[t]
        buf.out[t] = total
    return total


@pytest.mark.skipif(not scan_arrays.SUPPORTED, reason="needs numpy 2")
def test_tensors_instead_of_arrays_make_tensors(form: str, run: Any) -> None:
    """A buffer that is replaced below the object of before is not seen by guards."""
    fast = run(from_buffers)
    args, again = arrays(7), arrays(7)
    for made in (*[arrays] * 5, world, arrays, world):
        for (buf, *_), new in ((args, made(7)[0]), (again, made(7)[0])):
            vars(buf).update(vars(new))
        found, expected = fast(*again), from_buffers(*args)
        assert type(found) is type(expected)
        assert bits(found) == bits(expected)
        assert bits(again[0].out) == bits(args[0].out)
    assert "scan [scan]" in fast.explain()


@pytest.mark.skipif(not scan_arrays.SUPPORTED, reason="needs numpy 2")
def test_warnings_that_are_errors_are_raised(form: str, run: Any) -> None:
    fast = run(in_numpy)
    warm(in_numpy, fast, arrays)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            buf, k, value = arrays(1)
            buf.r[:] = 3e38
            with pytest.raises(RuntimeWarning, match="overflow"):
                fast(buf, k, value)
