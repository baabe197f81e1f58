"""Which quotas are measured: enough of each lane, never more than there are."""

from __future__ import annotations

import pytest

from rose_compiler.tune.levels import LEAST, MOST, to_measure, too_few


def test_each_lane_is_seen_with_three_quotas_or_with_all_it_can_have() -> None:
    for count in range(2, 7):
        lanes = [f"l{number}" for number in range(count)]
        for chunks in range(count, 18):
            plans = to_measure(lanes, chunks)
            assert len(plans) <= MOST
            assert all(sum(p.values()) == chunks and min(p.values()) > 0 for p in plans)
            seen = {lane: len({plan[lane] for plan in plans}) for lane in lanes}
            can = min(LEAST, chunks - count + 1)
            assert min(seen.values()) >= can or len(plans) == MOST
            assert (min(seen.values()) >= LEAST) is (too_few(plans, chunks) == "")
            if count < 4:
                assert min(seen.values()) >= can
            if count == 2 and can == LEAST:
                assert len(plans) == LEAST


def test_what_is_known_is_not_measured_again() -> None:
    known = [{"a": 8, "b": 8}, {"a": 3, "b": 13}]
    (plan,) = to_measure(["a", "b"], 16, known)
    assert plan not in known
    assert to_measure(["a", "b"], 16, [*known, plan]) == []
    assert to_measure(["a", "b"], 16, [{"a": 8}, {"a": 8}] * 2, most=5) != []
    assert to_measure(["a", "b"], 16, [{"a": 8}] * 5) == []


@pytest.mark.parametrize(
    ("measured", "chunks", "why"),
    [
        ([{"a": 1}, {"a": 2}], 2, "responses of a from 2 different quotas: there are 2"),
        ([{"a": 1, "b": 1}], 9, "responses of a from 1, b from 1 different quotas: "),
        ([{"a": k, "b": 4 - k} for k in (1, 2, 3)], 4, ""),
    ],
)
def test_a_response_from_fewer_is_told(
    measured: list[dict[str, int]], chunks: int, why: str
) -> None:
    assert too_few(measured, chunks).startswith(why)
    assert bool(too_few(measured, chunks)) is bool(why)
