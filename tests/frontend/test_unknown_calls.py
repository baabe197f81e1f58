"""What a call of which nothing is known is handed, and what it makes, any such call may change.

Programs whose first trips don't show it, put into random orders that the dependences allow.
"""

from __future__ import annotations

import io
import operator
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import rose_compiler
from rose_compiler.frontend.capture import capture
from rose_compiler.ir import interp
from rose_compiler.testing.capturing import difference, first_trip, shuffle, values_of

ORDERS = 8
Calls = dict[str, Callable[..., Any]]


def a_tensor(x: Tensor, calls: Calls) -> Any:
    t = x + 1
    out = x * 0
    for i in range(6):
        if i > 3:
            calls["double"](t)
        s = t + 1
        out = out + s
        w = x * 2
    return out, w


def a_tensor_behind_the_loop(x: Tensor, calls: Calls) -> Any:
    t = x + 1
    for i in range(6):
        if i > 3:
            calls["double"](t)
    s = t + 1
    return s, x * 2


def a_dict(x: Tensor, calls: Calls) -> Any:
    d = {"k": 0}
    out = x * 0
    for i in range(6):
        if i > 3:
            calls["count"](d)
        k = d["k"]
        out = out + k
        w = x * 2
    return out, w, d


def a_list(x: Tensor, calls: Calls) -> Any:
    xs: list[Tensor] = []
    for i in range(4):
        operator.methodcaller("append", x + i)(xs)
        n = len(xs)
        y = x * n
        s = sum(xs) + y
    return s, n


def an_array(x: Tensor, calls: Calls) -> Any:
    a = np.zeros(3)
    out = np.zeros(3)
    for i in range(6):
        if i > 3:
            calls["double"](a)
        s = a + 1
        out = out + s
        calls["more"](a)
    return out


def a_star(x: Tensor, calls: Calls) -> Any:
    t = x + 1
    out = x * 0
    for i in range(6):
        if i > 3:
            calls["each"](*[[t]])
        s = t + 1
        out = out + s
    return out


def none_at_first(x: Tensor, calls: Calls) -> Any:
    h = None
    out = x * 0
    for i in range(6):
        if h is not None and i > 3:
            calls["double"](h)
        s = 0 if h is None else h + 1
        out = out + s
        if h is None:
            h = x + 1
    return out


def kept_and_changed_later(x: Tensor, calls: Calls) -> Any:
    t = x + 1
    calls["keep"](t)
    out = x * 0
    for i in range(6):
        if i > 3:
            calls["change"]()
        s = t + 1
        out = out + s
    return out


def made_and_changed_later(x: Tensor, calls: Calls) -> Any:
    t = calls["keep"](x * 3)
    out = x * 0
    for i in range(6):
        if i > 3:
            calls["change"]()
        s = t + 1
        out = out + s
    return out


def saved_to_memory(x: Tensor, calls: Calls) -> Any:
    kept = []
    for i in range(3):
        b = io.BytesIO()
        torch.save(x + i, b)
        kept.append(b.getvalue())
        y = x * 2
    return kept, y


def saved_by_name(x: Tensor, calls: Calls) -> Any:
    kept = []
    for i in range(3):
        b, c = io.BytesIO(), io.BytesIO()
        torch.save(obj=x + i, f=b)
        np.save(c, x.numpy())
        kept.append((len(b.getvalue()), c.getvalue()))
    return kept


def loaded_in_turn(x: Tensor, calls: Calls) -> Any:
    b = io.BytesIO()
    np.save(b, x.numpy())
    np.save(b, x.numpy() + 1)
    b.seek(0)
    first = np.load(b)
    second = np.load(b)
    at = b.tell()
    return first, second, at


def printed(x: Tensor, calls: Calls) -> Any:
    kept = []
    for i in range(3):
        text = io.StringIO()
        print(i, file=text)
        kept.append(text.getvalue())
    return kept


def unbound_at_first(saved: dict[int, bytes], x: Tensor, number: int) -> Tensor:
    if number % 2 == 0:
        b = io.BytesIO()
    y = x * 2
    if number % 2 == 0:
        torch.save(x, b)
    z = x * 3
    if number % 2 == 0:
        saved[number] = b.getvalue()
    return y + z


def none_on_the_first_call(saved: dict[int, bytes], x: Tensor, number: int) -> Tensor:
    b = None
    if number % 2 == 0:
        b = io.BytesIO()
    y = x * 2
    if b is not None:
        torch.save(x, b)
    if b is not None:
        saved[number] = b.getvalue()
    return y


class Keeper:
    """Changes what it was handed once."""

    def keep(self, value: Tensor) -> Tensor:
        self.kept = value
        return value

    def change(self) -> None:
        self.kept.mul_(2)


def double(value: Any) -> None:
    value *= 2


def more(value: Any) -> None:
    value += 1


def count(value: dict[str, int]) -> None:
    value["k"] += 1


def each(values: list[Tensor]) -> None:
    for value in values:
        value.mul_(2)


def make() -> tuple[Tensor, Calls]:
    keeper = Keeper()
    calls = {"double": double, "more": more, "count": count, "each": each}
    return torch.arange(3.0), {**calls, "keep": keeper.keep, "change": keeper.change}


@pytest.mark.parametrize(
    "fn",
    [
        *(a_tensor, a_tensor_behind_the_loop, a_dict, a_list, an_array, a_star, none_at_first),
        *(kept_and_changed_later, made_and_changed_later),
        *(saved_to_memory, saved_by_name, loaded_in_turn, printed),
    ],
    ids=lambda fn: fn.__name__,
)
def test_legal_orders_give_the_same(fn: Callable[..., Any]) -> None:
    args = make()
    eager = fn(*args), args
    program = first_trip(fn, *make()).captured.program
    for number in range(ORDERS):
        shuffle(program, random.Random(number))
        args = make()
        found = capture(fn, args, {})
        result = interp.run(program, values_of(found, args, {}), found.program.objects)
        assert difference(eager, (result, args)) is None, f"order {number}"


@pytest.mark.parametrize("fn", [unbound_at_first, none_on_the_first_call])
def test_what_was_nothing_when_it_was_seen_may_be_anything_later(fn: Callable[..., Any]) -> None:
    eager: dict[int, bytes] = {}
    expected = [fn(eager, torch.arange(3.0), number) for number in range(1, 5)]
    program = first_trip(fn, {}, torch.arange(3.0), 1).captured.program
    for order in range(ORDERS):
        shuffle(program, random.Random(order))
        saved: dict[int, bytes] = {}
        made = []
        for number in range(1, 5):
            args = (saved, torch.arange(3.0), number)
            found = capture(fn, args, {})
            values = values_of(found, args, {})
            made.append(interp.run(program, values, found.program.objects))
        assert difference((expected, eager), (made, saved)) is None, f"order {order}"


def test_what_may_be_changed_is_computed_on_every_trip() -> None:
    fast = rose_compiler.compile(a_tensor, tune=False, numerics="bitwise")
    for _ in range(3):
        assert difference(a_tensor(*make()), fast(*make())) is None
    assert fast._last.unit.last is not None, "a schedule ran"
    fast.close()
