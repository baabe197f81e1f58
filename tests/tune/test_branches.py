from __future__ import annotations

import pytest

from rose_compiler.base.profile import OpTime, Profile, Span, Timeline
from rose_compiler.base.quota import COORDINATOR
from rose_compiler.tune.branches import alone_in, branches, divide, responses
from rose_compiler.tune.response import Response


def spans(*rows: tuple[str, str, float, float, float]) -> Timeline:
    return Timeline(tuple(Span(op, lane, a, b, activity=share) for op, lane, a, b, share in rows))


TIMELINE = spans(
    ("act", "", 0.0, 1.0, 0.9),
    ("step", "shard:0", 1.0, 5.0, 0.8),
    ("value", "", 1.0, 2.0, 0.9),
    ("update", "", 5.0, 6.0, 1.0),
)


def test_what_had_ended_elsewhere_was_waited_for() -> None:
    graph = branches(TIMELINE, 16)
    assert graph.lanes == (COORDINATOR, "shard:0")
    after = {task.name: task.after for task in graph.tasks}
    assert after == {
        "0 act": (),
        "1 value": (),
        "2 step": ("0 act",),
        "3 update": ("2 step",),
    }
    step = graph.curves["2 step"]
    assert step.seconds(16) == pytest.approx(4.0)
    assert step.seconds(6.4) == pytest.approx(8.0)  # it kept 12.8 of 16 chunks busy


def test_the_way_to_another_process_is_no_work_and_hidden_by_who_is_busy() -> None:
    """Two halves in turn: the simulator is woken for the first step only."""
    act = Response(0.0, 2.0, 1.0)
    timeline = Timeline(
        (
            Span("act", "", 0.0, 2.0),
            Span("step", "host:sim", 2.5, 4.5, issue_s=2.0),
            Span("look", "", 2.1, 2.4),  # while the first step is on its way
            Span("act 2", "", 2.4, 4.8),
            Span("step 2", "host:sim", 4.9, 6.9, issue_s=4.8),
            Span("last", "", 7.3, 9.0),
        ),
        waits=(
            Span("step", "host:sim", 4.8, 5.0),  # it is here behind the second one's start
            Span("step 2", "host:sim", 5.0, 7.2),
        ),
    )
    alone = dict.fromkeys(("act", "act 2", "last"), act) | dict.fromkeys(
        ("step", "step 2"), Response(1.0, 1.0)
    )
    alone["look"] = Response(0.1, 0.0)
    ways = {"step": (0.5, 0.4), "step 2": (0.5, 0.4)}
    graph = branches(timeline, 2, alone, ways)
    assert graph.lanes == (COORDINATOR, "host:sim")
    after = {task.name: task.after for task in graph.tasks}
    assert after["1 look"] == after["2 act 2"] == ()
    assert after["3 step, sent"] == ("0 act",)
    assert after["3 step"] == ("3 step, sent",)
    assert after["4 step 2, sent"] == ("2 act 2",)
    assert after["5 last"] == ("4 step 2, taken in",)
    found = divide(graph, 2)
    # act, look, act 2; half a second to step 2, two for it and 0.4 back, then the last one
    assert found.predicted_s == pytest.approx(2.0 + 0.1 + 2.0 + 0.5 + 2.0 + 0.4 + 2.0)


def test_clocks_of_other_processes_may_be_a_little_off() -> None:
    graph = branches(spans(("a", "", 0.0, 1.001, 1.0), ("b", "x", 1.0, 2.0, 1.0)), 4)
    assert graph.tasks[1].after == ("0 a",)


def test_chunks_go_to_the_lane_that_is_waited_for() -> None:
    long = spans(
        ("step", "shard:0", 0.0, 9.0, 0.9),
        ("value", "", 0.0, 2.0, 0.9),
        ("update", "", 9.0, 10.0, 0.3),
    )
    found = divide(branches(long, 16), 16)
    assert found.chunks["shard:0"] > found.chunks[COORDINATOR]
    assert sum(found.chunks.values()) == 16
    assert found.predicted_s < found.equal_s
    assert found.why["shard:0"] == "critical"
    with pytest.raises(ValueError, match="not enough"):
        divide(branches(long, 1), 1)


def test_an_operation_that_keeps_little_busy_needs_little() -> None:
    light = spans(("step", "x", 0.0, 4.0, 0.1), ("act", "", 0.0, 4.0, 1.0))
    found = divide(branches(light, 16), 16)
    assert found.chunks["x"] <= 2
    assert found.predicted_s == pytest.approx(4.0 * 16 / found.chunks[COORDINATOR])


def test_what_operations_take_by_themselves_replaces_a_fight_for_cores() -> None:
    crowded = Timeline(
        (
            Span("act", "", 0.0, 0.4, activity=1.0),
            Span("step", "host:sim", 0.0, 0.5, activity=1.0),
        )
    )

    def calm(act: float, step: float) -> list[Profile]:
        late = OpTime("act", 1, 2 * act, 2 * act)  # in an iteration that was disturbed
        ops = (OpTime("act", 1, act, act), OpTime("step", 1, step, step))
        return [Profile("m", (0.2,), ops=(late,)), Profile("m", (0.2,), ops=ops)]

    alone = alone_in({1: calm(0.09, 0.06), 2: calm(0.05, 0.06)})
    assert alone["act"].seconds(1) == pytest.approx(0.09)
    assert alone["act"].seconds(2) == pytest.approx(0.05)
    assert alone["step"].seconds(2) == pytest.approx(0.06)
    found = divide(branches(crowded, 2, alone), 2)
    assert dict(found.chunks) == {"coordinator": 1, "host:sim": 1}
    assert found.predicted_s == pytest.approx(0.09)
    assert divide(branches(crowded, 2), 2).predicted_s == pytest.approx(1.0)
    other = alone_in({1: [Profile("m", (0.2,), ops=(OpTime("other", 1, 1.0, 1.0),))]})
    assert branches(crowded, 2, other) == branches(crowded, 2)


def test_responses_come_from_iterations_under_several_quotas() -> None:
    def under(coordinator: int, lane: int) -> tuple[dict[str, int], Timeline]:
        quotas = {COORDINATOR: coordinator, "stream:a": lane}
        took = 8.0 / lane
        return quotas, spans(
            ("act", "", 0.0, 1.0 + 8.0 / coordinator, 1.0),
            ("value", "stream:a", 0.0, took, 1.0),
            ("value", "stream:a", took, 2 * took, 1.0),
            ("step", "shard:0", 0.0, 9.0, 1.0),
        )

    found = responses([under(8, 8), under(4, 12), under(12, 4)])
    assert set(found) == {"act", "value"}
    assert found["act"].seconds(6) == pytest.approx(1.0 + 8.0 / 6)
    assert found["value"].seconds(2) == pytest.approx(4.0)


def test_an_operation_without_quotas_is_one_point_however_often_it_ran() -> None:
    """Each run keeps a little more or less of the device busy: a point each would be fitted to."""
    free = spans(*(("act", "", k, k + 1.0 + 0.1 * k, 0.5 + 0.01 * k) for k in range(5)))
    alone = responses([(None, free)], 100)["act"]
    assert alone.knots == ()
    assert alone.seconds(52) == pytest.approx(1.2)
    assert alone.seconds(26) == pytest.approx(2.4)  # one point: nothing is known of its shape
