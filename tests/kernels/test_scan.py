"""Recurrences computed at once: the bits of one trip after the other, or refused untouched."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from rose_compiler.base.recurrence import Input, Item, NotScan, Recurrence, Store, arrange
from rose_compiler.kernels import scan, scan_cpu, scan_cuda, scan_scalar, scan_triton
from rose_compiler.kernels.functions import FUNCTIONS

TRIPS = 23


class Made:
    """A recurrence in the making: ``carried``, rows and calls as items."""

    def __init__(self) -> None:
        self.items: list[Item] = []

    def add(self, one: Item) -> int:
        self.items.append(one)
        return len(self.items) - 1

    def row(self, source: int, offset: int = 0) -> int:
        return self.add(Item("row", source=source, offset=offset))

    def input(self, source: int) -> int:
        return self.add(Item("input", source=source))

    def number(self, value: float) -> int:
        return self.add(Item("number", number=value))

    def carried(self, position: int = 0) -> int:
        return self.add(Item("carried", source=position))

    def call(self, function: str, *args: int) -> int:
        return self.add(Item("call", function=function, args=args))


def gae(forward: bool = False) -> Recurrence:
    """``last = r[t] + g * v[t + 1] * (1 - d[t + 1]) - v[t] + g * l * (1 - d[t + 1]) * last``;
    inputs: rewards, values, dones, advantages, gamma, lambda, behind one carried value."""
    m = Made()
    gamma, alive = m.input(4), m.call("sub", m.number(1.0), m.row(2, 1))
    bootstrap = m.call("mul", m.call("mul", gamma, m.row(1, 1)), alive)
    delta = m.call("sub", m.call("add", m.row(0), bootstrap), m.row(1))
    factor = m.call("mul", m.call("mul", gamma, m.input(5)), alive)
    last = m.call("add", delta, m.call("mul", factor, m.carried()))
    bounds = (0, TRIPS - 1, 1) if forward else (TRIPS - 2, -1, -1)
    inputs = tuple(Input(1 + k) for k in range(6))
    return Recurrence(*bounds, inputs, tuple(m.items), (last,), (Store(3, 0, last),))


def arguments(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Any]:
    """The carried value, rewards, values, dones, advantages, gamma, lambda."""
    g = torch.Generator().manual_seed(len(shape) + sum(shape))

    def draw() -> torch.Tensor:
        return torch.randn(TRIPS, *shape, generator=g).to(dtype)

    dones = (torch.rand(TRIPS, *shape, generator=g) < 0.3).to(dtype)
    return [draw()[0], draw(), draw(), dones, torch.zeros(TRIPS, *shape, dtype=dtype), 0.99, 0.95]


def one_by_one(of: Recurrence, args: list[Any]) -> tuple[Any, ...]:
    """The trips one after the other, by torch."""
    inputs = [scan.resolve(i, args) for i in of.inputs]
    carried = [*args[: of.handed], *(inputs[k][of.start + at] for k, at in of.seeds)]
    for t in of.trips:
        values: list[Any] = []
        for item in of.items:
            if item.kind == "row":
                values.append(inputs[item.source][t + item.offset])
            elif item.kind == "input":
                values.append(inputs[item.source])
            elif item.kind == "number":
                values.append(item.number)
            elif item.kind == "carried":
                values.append(carried[item.source])
            else:
                values.append(FUNCTIONS[item.function](*(values[a] for a in item.args)))
        for store in of.stores:
            inputs[store.source][t + store.offset] = values[store.value]
        carried = [values[k] for k in of.following]
    return tuple(carried[: of.handed])


def check(of: Recurrence, args: list[Any]) -> None:
    """Both ways give the same bits, in results and in buffers."""
    again = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    expected = one_by_one(of, again)
    found = scan.run(of, args)
    assert found is not None
    for a, b in zip((*expected, *again), (*found, *args), strict=True):
        if isinstance(a, torch.Tensor):
            assert a.dtype == b.dtype
            assert a.shape == b.shape
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)) if a.ndim else a == b


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (4,), (2, 40)])
@pytest.mark.parametrize("forward", [False, True])
def test_bits_of_the_loop(dtype, shape, forward) -> None:
    check(gae(forward), arguments(shape, dtype))


@pytest.mark.parametrize("shape", [(), (2,), (40,)])
def test_several_stretches(monkeypatch, shape) -> None:
    monkeypatch.setattr(scan_cpu, "STRETCH", 1)
    for forward in (False, True):
        check(gae(forward), arguments(shape))


@pytest.mark.parametrize("links", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 9])
def test_chains_of_every_operation(links, size) -> None:
    """All positions of a carried value, one after the other, in chains of one to three links."""
    forms = ["add0", "add1", "mul0", "mul1", "sub0", "sub1", "truediv0", "neg0", "where1", "where2"]
    for start in range(len(forms)):
        m = Made()
        at, rows = m.carried(), [m.row(0), m.row(1)]
        mask = m.call("gt", m.row(2), m.number(0.5))
        for k in range(links):
            form = forms[(start + 3 * k) % len(forms)]
            function, position = form[:-1], int(form[-1])
            other = rows[k % 2]
            if function == "where":
                at = m.call("where", mask, *((at, other) if position == 1 else (other, at)))
            elif function == "neg":
                at = m.call("neg", at)
            else:
                at = m.call(function, *((at, other) if position == 0 else (other, at)))
        of = Recurrence(
            *(0, TRIPS, 1), tuple(Input(1 + k) for k in range(4)), tuple(m.items), (at,), ()
        )
        check(replace(of, stores=(Store(3, 0, at),)), arguments((size,)))


def test_a_number_over_a_tensor_is_a_product_with_the_reciprocal() -> None:
    m = Made()
    last = m.call("add", m.call("truediv", m.number(0.3), m.row(0)), m.carried())
    of = Recurrence(0, TRIPS, 1, (Input(1),), tuple(m.items), (last,), ())
    check(of, arguments((50,)))


def test_values_that_are_hard_to_round() -> None:
    """Subnormal, huge, infinite and missing numbers, on Python numbers as in single precision."""
    hard = torch.tensor([1e-45, 1e-40, 3e38, -3e38, float("inf"), float("nan"), 1 + 2**-23, 0.0])
    g = torch.Generator().manual_seed(5)
    args = arguments((1,))
    for k in (0, 1, 2, 3):
        picks = torch.randint(0, len(hard), args[k].shape, generator=g)
        args[k] = torch.where(torch.rand(args[k].shape, generator=g) < 0.4, hard[picks], args[k])
    of = gae()
    again = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    one_by_one(of, again)
    assert scan.run(of, args) is not None
    assert torch.equal(again[4].isnan(), args[4].isnan())
    assert torch.equal(again[4].nan_to_num(), args[4].nan_to_num())


def test_rows_of_few_elements_are_computed_on_numbers(monkeypatch) -> None:
    seen: list[int] = []
    original = scan_scalar.chain

    def watched(*args: Any) -> None:
        seen.append(args[4].size)
        original(*args)

    monkeypatch.setattr(scan_scalar, "chain", watched)
    check(gae(), arguments((1,)))
    check(gae(), arguments((scan_scalar.FEW + 1,)))
    assert seen == [TRIPS - 1]


def test_flushing_to_zero_is_obeyed() -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor can't flush subnormal numbers")
    try:
        args = arguments((1,))
        args[1][:] = 1e-41
        check(gae(), args)
    finally:
        torch.set_flush_denormal(False)


def test_what_a_trip_hands_on_may_be_a_row() -> None:
    """A shifted series: the result is the row itself, as in the loop."""
    m = Made()
    before = m.carried(1)
    last = m.call("add", m.call("mul", m.carried(0), m.row(0)), before)
    row = m.row(1)
    inputs = tuple(Input(2 + k) for k in range(4))
    of = Recurrence(TRIPS - 1, -1, -1, inputs, tuple(m.items), (last, row), (Store(3, 0, last),))
    args = arguments((6,))
    args.insert(1, torch.randn(6))
    check(of, args)
    found = scan.run(of, args)
    assert found is not None
    assert found[1].data_ptr() == args[3][0].data_ptr()


def test_a_carried_tensor_keeps_its_memory() -> None:
    m = Made()
    total = m.call("add", m.carried(), m.row(0))
    inputs = tuple(Input(1 + k) for k in range(4))
    of = Recurrence(
        *(0, TRIPS, 1), inputs, tuple(m.items), (total,), (Store(3, 0, total),), inplace=(0,)
    )
    args = arguments((5,))
    expected = args[0] + 0
    for t in range(TRIPS):
        expected += args[1][t]
    found = scan.run(of, args)
    assert found is not None
    assert found[0] is args[0]
    assert torch.equal(args[0], expected)


def test_autograd_sees_that_tensors_have_changed() -> None:
    args = arguments((5,))
    weight = torch.ones(5, requires_grad=True)
    kept = weight * args[4]  # keeps what is stored to
    with torch.no_grad():
        assert scan.run(gae(), args) is not None
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.sum().backward()


def test_memory_for_series_is_used_again() -> None:
    check(gae(), arguments((7,)))
    count = sum(map(len, scan_cpu._spare.values()))
    check(gae(), arguments((7,)))
    assert sum(map(len, scan_cpu._spare.values())) == count


def test_memory_for_series_is_kept_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    spare = scan_cpu._Spare()
    monkeypatch.setattr(scan_cpu, "_spare", spare)
    monkeypatch.setattr(scan_cpu, "KEPT_IN_ALL", 20_000)
    for size in (*range(1, 60), 7):
        check(gae(), arguments((size,)))
        assert spare.bytes == sum(a.nbytes for arrays in spare.values() for a in arrays)
        assert spare.bytes <= 20_000
    assert any(key[0][-1] == 7 for key, arrays in spare.items() if arrays), "used last"
    assert not any(key[0][-1] == 1 for key in spare)


class Below:
    """An object with a buffer."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values


def overlap(args: list[Any]) -> None:
    """Rewards and advantages become neighbouring rows of one tensor."""
    whole = torch.zeros(TRIPS + 1, 6)
    args[1], args[4] = whole[:-1], whole[1:]


MISFITS = {
    "another dtype": lambda a: a.__setitem__(1, a[1].double()),
    "another length": lambda a: a.__setitem__(2, a[2][:-1]),
    "another shape": lambda a: a.__setitem__(3, a[3][:, :1]),
    "a number handed in": lambda a: a.__setitem__(0, 0.0),
    "a truth value": lambda a: a.__setitem__(5, True),
    "an array": lambda a: a.__setitem__(1, a[1].numpy()),
    "whole numbers": lambda a: a.__setitem__(1, a[1].long()),
    "half precision": lambda a: [a.__setitem__(k, a[k].half()) for k in range(5)],
    "a gradient": lambda a: a[2].requires_grad_(),
    "shared memory": lambda a: a.__setitem__(4, a[1]),
    "overlapping memory": lambda a: overlap(a),
    "a target of one row": lambda a: a.__setitem__(4, torch.zeros(1, 6).expand(TRIPS, 6)),
    "a parameter of more axes": lambda a: a.__setitem__(5, torch.ones(1, 6)),
    "a subclass": lambda a: a.__setitem__(1, a[1].as_subclass(type("T", (torch.Tensor,), {}))),
}


@pytest.mark.parametrize("why", MISFITS)
def test_what_does_not_fit_is_left_untouched(why) -> None:
    args = arguments((6,))
    MISFITS[why](args)
    before = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    assert scan.run(gae(), args) is None
    for a, b in zip(args, before, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a is b


def test_integers_that_were_taken_for_granted() -> None:
    of = replace(gae(), inputs=(*gae().inputs, Input(7)), assumed=((6, 3),))
    assert scan.run(of, [*arguments((6,)), 3]) is not None
    for other in (4, 3.0, torch.tensor([3, 3])):
        assert scan.run(of, [*arguments((6,)), other]) is None


def test_a_first_value_that_the_loop_stores_to_is_left_to_the_loop() -> None:
    """A row of a buffer that another statement of the trip stores to, in front of its use."""
    m = Made()
    twice = m.call("mul", m.row(0), m.number(2.0))
    last = m.call("add", m.call("mul", m.carried(), m.row(1)), m.row(0))
    of = Recurrence(
        *(0, TRIPS, 1),
        tuple(Input(1 + k) for k in range(4)),
        tuple(m.items),
        (last,),
        (Store(2, 0, twice), Store(3, 0, last)),
    )
    args = arguments((6,))
    args[0] = args[3][0]
    before = [a.clone() for a in args[:5]]
    assert scan.run(of, args) is None
    assert all(map(torch.equal, before, args))
    args[0] = args[3][0].clone()
    check(of, args)


@pytest.mark.parametrize("forward", [False, True])
def test_the_form_for_devices_agrees(monkeypatch, forward) -> None:
    """Its series and folded chains, with the loop over rows in the place of the kernel."""
    monkeypatch.setattr(scan_triton, "available", lambda: False)
    for of in (gae(forward), masked(forward)):
        args = arguments((6,))
        again = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
        expected = one_by_one(of, again)
        given = scan.fit(of, args)
        assert given is not None
        found = scan_cuda.run(given)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(args[4], again[4])


def masked(forward: bool) -> Recurrence:
    """A sum that masks start anew, an infinity in front of one included, and its old value."""
    m = Made()
    mask = m.call("gt", m.row(2), m.number(0.5))
    scaled = m.call("truediv", m.call("sub", m.row(0), m.call("neg", m.carried())), m.number(2.0))
    last = m.call("where", mask, m.row(1), scaled)
    stored = m.call("add", last, m.carried())
    bounds = (0, TRIPS, 1) if forward else (TRIPS - 1, -1, -1)
    inputs = tuple(Input(1 + k) for k in range(4))
    return Recurrence(*bounds, inputs, tuple(m.items), (last,), (Store(3, 0, stored),))


def test_masks_keep_infinities_out() -> None:
    args = arguments((6,))
    args[0][:] = float("inf")
    args[3][0] = 1.0
    check(masked(True), args)


@pytest.mark.parametrize("function", ["mul", "maximum", "where"])
def test_what_is_no_scan(function) -> None:
    m = Made()
    x = m.carried()
    if function == "mul":
        last = m.call("mul", m.call("add", x, m.row(0)), x)
    elif function == "maximum":
        last = m.call("maximum", x, m.row(0))
    else:
        last = m.call("where", m.call("gt", x, m.row(0)), x, m.row(0))
    of = Recurrence(0, TRIPS, 1, (Input(1),), tuple(m.items), (last,), ())
    with pytest.raises(NotScan) as stop:
        arrange(of)
    assert stop.value.code == "not-affine"


def test_two_that_hang_on_each_other_are_no_scan() -> None:
    m = Made()
    x, y = m.carried(0), m.carried(1)
    a, b = m.call("add", x, y), m.call("mul", y, x)
    of = Recurrence(0, TRIPS, 1, (), tuple(m.items), (a, b), ())
    with pytest.raises(NotScan, match="hang on each other"):
        arrange(of)
