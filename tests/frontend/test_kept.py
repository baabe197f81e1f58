"""Containers hold references: who changes an item changes what its maker made, on any later trip.

Programs in which the first trips do not show it, put into random orders that the dependences allow.
"""

from __future__ import annotations

import random

import pytest
import torch

from rose_compiler.frontend.capture import capture
from rose_compiler.ir import interp
from rose_compiler.ir.deps import Dependences, why
from rose_compiler.ir.program import is_call, op_of
from rose_compiler.testing.capturing import difference, first_trip, shuffle, values_of

ORDERS = 12


class Box:
    """A list below a root."""

    def __init__(self):
        self.items = []


def taken_out_late(x, box):
    kept = []
    out = x * 0
    for i in range(80):
        y = x + i
        kept.append(y)
    for j in range(3):
        z = kept[j + 70]
        z.mul_(2)
        out = out + torch.stack(kept).sum()
        s = y + 1
        kept[79].mul_(2)
        out = out + s
    return out


def held_by_an_attribute(x, box):
    out = x * 0
    for i in range(80):
        y = x + i
        box.items.append(y)
    for j in range(3):
        z = box.items[j + 70]
        box.items[j + 70].mul_(2)
        s = y + z
        box.items[-1].mul_(3)
        out = out + s + torch.stack(box.items).sum()
    return out


def held_by_a_set(x, box):
    y = x + 2
    kept = set()
    kept.add(y)
    y.mul_(2)
    for each in kept:
        s = each + 1
    y.mul_(3)
    return s


def the_same_on_some_trips(x, box):
    out = x * 0
    for i in range(6):
        y = x + i
        z = y if i > 3 else y + 1
        z.mul_(2)
        s = y + 1
        z.mul_(3)
        out = out + s
    return out


def a_state_put_into_a_list(x, box):
    kept = []
    for i in range(80):
        kept.append(x + i if i < 79 else x)
    other = torch.zeros(3)
    x.mul_(2)
    y = kept[79] + 1
    x.add_(1)
    return y, kept[79] + 2, other


def iterated(x, box):
    kept = []
    out = x * 0
    for i in range(80):
        y = x + i
        kept.append((i, y))
    for _, each in kept[70:]:
        w = each + 1
        kept[-1][1].mul_(2)
        out = out + w + y
    return out


def counted(x, box):
    kept = []
    out = x * 0
    for i in range(6):
        y = x + i
        kept.append(y)
        n = len(kept)
        out = out + y * n
        if i == 4:
            kept.clear()
    kept.append(out)
    return torch.stack(kept)


def under_two_names(x, box):
    kept = []
    out = x * 0
    for i in range(6):
        some = kept if i > 3 else [x]
        some.append(x + i)
        out = out + len(kept)
    return out, kept


def a_list_in_a_tuple(x, box):
    kept = []
    both = (x, kept)
    out = x * 0
    for i in range(6):
        kept.append(x + i)
        out = out + len(both[1])
        both[1].append(out)
    return torch.stack(kept)


def put_in_and_changed(x, box):
    out = x * 0
    for i in range(6):
        y = x + i
        box.items.append(y)
        y.mul_(2)
        out = out + box.items[-1]
        y.mul_(3)
        out = out + torch.stack(box.items).sum()
        x = x + 1
    return out


def a_list_below_a_root_under_two_names(x, box):
    out = x * 0
    for i in range(6):
        items = box.items
        items.append(x + i)
        out = out + len(box.items)
        box.items.append(out)
        out = out + items[-1]
        x = x + 1
    return out


PROGRAMS = [
    counted,
    under_two_names,
    a_list_in_a_tuple,
    put_in_and_changed,
    a_list_below_a_root_under_two_names,
    taken_out_late,
    held_by_an_attribute,
    held_by_a_set,
    the_same_on_some_trips,
    a_state_put_into_a_list,
    iterated,
]


@pytest.mark.parametrize("fn", PROGRAMS, ids=lambda f: f.__name__)
def test_legal_orders_give_the_same_bits(fn):
    eager = fn(torch.arange(3.0), Box())
    args = (torch.arange(3.0), Box())
    trip = first_trip(fn, *args)
    assert difference(eager, trip.result) is None
    program = trip.captured.program
    moved = 0
    for number in range(ORDERS):
        moved += shuffle(program, random.Random(number))
        args = (torch.arange(3.0), Box())
        found = capture(fn, args, {})
        result = interp.run(program, values_of(found, args, {}), found.program.objects)
        assert difference(eager, result) is None, f"order {number}"
    assert moved  # another order was possible at all


def test_a_container_says_what_it_keeps():
    program = first_trip(taken_out_late, torch.arange(3.0), Box()).captured.program
    operations = program.ops.by_name.values()
    keeps = [op.attributes["keeps"] for op in operations if op.attributes.get("keeps")]
    assert keeps == [(("kept", "y"),)]


def gathered(x, box):
    kept = []
    out = x * 0
    for i in range(4):
        y = x + i
        kept.append(y)
        box.items.append(y)
        out = out + y
    return out, torch.stack(kept)


def test_an_append_changes_no_item():
    program = first_trip(gathered, torch.arange(3.0), Box()).captured.program
    deps = Dependences(program)
    calls = {op_of(n).source[0]: n for n in program.nodes() if is_call(n) and op_of(n).source}
    summed, stacked = calls["out = out + y"], next(c for s, c in calls.items() if "stack" in s)
    for append in (calls["kept.append(y)"], calls["box.items.append(y)"]):
        assert why(deps, append, summed) is None
        assert why(deps, append, append, distance=1) is not None
    assert why(deps, calls["kept.append(y)"], stacked) is not None
