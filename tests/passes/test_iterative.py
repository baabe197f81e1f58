"""Iterative modulo scheduling on random loop bodies: dependences, lanes and lower bounds hold."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose_compiler.passes.iterative import (
    Hand,
    Operation,
    Placement,
    Wait,
    least_interval,
    modulo_schedule,
)

NONE = Hand()


@st.composite
def bodies(draw: st.DrawFn) -> tuple[list[Operation], list[Wait], Hand]:
    """Operations on one to four lanes, with waits of distance 0 to 3, none of them circular."""
    lanes = ("", *(f"lane{k}" for k in range(draw(st.integers(0, 3)))))
    count = draw(st.integers(1, 12))
    choice = st.one_of(st.just(("",)), st.just(lanes), st.sampled_from(lanes).map(lambda x: (x,)))
    operations = [
        Operation(f"op{k}", draw(st.sampled_from([0, 1, 3, 10, 40])), draw(choice))
        for k in range(count)
    ]
    waits = []
    for _ in range(draw(st.integers(0, 2 * count))):
        a, b = draw(st.integers(0, count - 1)), draw(st.integers(0, count - 1))
        distance = draw(st.integers(0, 3)) if a < b else draw(st.integers(1, 3))
        waits.append(Wait(f"op{a}", f"op{b}", distance))
    hand = draw(st.sampled_from([NONE, Hand(1, 0), Hand(2, 6)]))
    return operations, waits, hand


def end_of(op: Operation, placed: Placement, hand: Hand) -> int:
    away = placed.lane[op.name] != ""
    return placed.start[op.name] + op.length + (hand.submit + hand.launch if away else 0)


def busy(operations: list[Operation], placed: Placement, hand: Hand) -> dict[str, list[int]]:
    """By lane: the ticks of the steady state in which something keeps it, once a holder."""
    found: dict[str, list[int]] = {}
    for op in operations:
        start, lane = placed.start[op.name], placed.lane[op.name]
        own = op.length if lane == "" else hand.submit
        found.setdefault("", []).extend((start + k) % placed.interval for k in range(own))
        if lane:
            end = end_of(op, placed, hand)
            far = range(end - op.length, end)
            found.setdefault(lane, []).extend(k % placed.interval for k in far)
    return found


@given(bodies())
@settings(max_examples=80, deadline=None)
def test_a_schedule_keeps_every_distance_every_lane_and_the_bounds(
    body: tuple[list[Operation], list[Wait], Hand],
) -> None:
    operations, waits, hand = body
    least = least_interval(operations, waits, hand)
    placed = modulo_schedule(operations, waits, hand)
    by_name = {op.name: op for op in operations}
    if placed is None:
        return  # the longest interval tried is no promise; that there is one is tested below
    assert placed.interval >= max(least.res_mii, least.rec_mii)
    for w in waits:
        ready = end_of(by_name[w.src], placed, hand)
        assert placed.start[w.dst] + w.distance * placed.interval >= ready, w
    for lane, ticks in busy(operations, placed, hand).items():
        assert len(ticks) == len(set(ticks)), f"two at once on {lane!r}"
    assert all(placed.lane[op.name] in op.lanes for op in operations)
    # stages and places say the same as ticks
    place = {name: k for k, name in enumerate(placed.order)}
    assert set(place) == set(by_name)
    for w in waits:
        if w.src != w.dst:
            before = placed.stage(w.src), place[w.src]
            assert before < (w.distance + placed.stage(w.dst), place[w.dst]), w
    assert min(map(placed.stage, by_name)) == 0


@given(bodies())
@settings(max_examples=30, deadline=None)
def test_one_after_the_other_is_always_found(
    body: tuple[list[Operation], list[Wait], Hand],
) -> None:
    operations, waits, _ = body
    alone = [Operation(op.name, op.length) for op in operations]
    placed = modulo_schedule(alone, waits)
    assert placed is not None
    assert placed.interval == max(1, sum(op.length for op in alone))


def test_a_chain_overlaps_over_lanes_until_its_longest_part() -> None:
    lanes = ("", "a", "b")
    operations = [Operation(name, 10, lanes) for name in ("load", "think", "write")]
    waits = [Wait("load", "think"), Wait("think", "write")]
    placed = modulo_schedule(operations, waits)
    assert placed is not None
    assert placed.interval == 10
    assert [placed.stage(n) for n in ("load", "think", "write")] == [0, 1, 2]
    assert placed.depth == 2
    assert len(set(placed.lane.values())) == 3


def test_a_recurrence_sets_the_interval() -> None:
    lanes = ("", "a")
    operations = [Operation("act", 30, lanes), Operation("env", 20), Operation("log", 25, lanes)]
    waits = [Wait("act", "env"), Wait("env", "act", 1), Wait("env", "log"), Wait("log", "log", 1)]
    least = least_interval(operations, waits)
    assert least.recurrence is not None
    assert set(least.recurrence.names) == {"act", "env"}
    assert (least.recurrence.length, least.recurrence.distance) == (50, 1)
    assert (least.res_mii, least.rec_mii) == (38, 50)
    placed = modulo_schedule(operations, waits)
    assert placed is not None
    assert placed.interval == 50
    far = [Wait("act", "env"), Wait("env", "act", 2), Wait("env", "log")]
    assert least_interval(operations, far).rec_mii == 25


def test_handing_over_takes_time_of_both_sides() -> None:
    hand = Hand(submit=2, launch=5)
    operations = [Operation("a", 10, ("x",)), Operation("b", 10)]
    assert least_interval(operations, [], hand).resources == {"": 12, "x": 10}
    placed = modulo_schedule(operations, [Wait("a", "b")], hand)
    assert placed is not None
    assert (placed.interval, placed.start["a"], placed.stage("b")) == (12, 0, 2)


def test_a_longest_interval_is_obeyed() -> None:
    operations = [Operation("a", 10), Operation("b", 10)]
    assert modulo_schedule(operations, [], most=19) is None
    assert modulo_schedule(operations, [], most=20) is not None


def test_operations_of_one_trip_that_wait_for_each_other_are_refused() -> None:
    operations = [Operation("a", 1), Operation("b", 1)]
    with pytest.raises(ValueError, match="wait for each other"):
        modulo_schedule(operations, [Wait("a", "b"), Wait("b", "a")])


def test_a_long_body_is_scheduled() -> None:
    lanes = ("", "a", "b")
    operations = [Operation(f"op{k}", k % 7, lanes) for k in range(300)]
    waits = [Wait(a.name, b.name) for a, b in itertools.pairwise(operations)]
    placed = modulo_schedule(operations, waits)
    assert placed is not None
    assert placed.interval <= 1.2 * least_interval(operations, waits).ticks
