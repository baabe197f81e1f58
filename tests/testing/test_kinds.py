"""Planted faults in the passes that kinds of programs of their own are about are found by these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rose_compiler.ir import casts, losses
from rose_compiler.passes import (
    accumulate,
    drop_gradients,
    fuse_losses,
    fusion,
    hosts,
    interleave,
    unswitch,
)
from rose_compiler.runtime import remote
from rose_compiler.testing.fuzz import fuzz

Plant = Callable[[pytest.MonkeyPatch], None]


def an_order_without_dependences(monkeypatch: pytest.MonkeyPatch) -> None:
    in_order = hosts.in_order
    monkeypatch.setattr(
        hosts,
        "in_order",
        lambda nodes, edges, calls: in_order(nodes, [e for e in edges if e.kind == "value"], calls),
    )


def a_lane_that_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote.ComponentTask, "wait", lambda task: task.value)


def answers_of_another_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lane takes in the answers of calls under way in another order than they were begun."""
    receive = remote.ComponentTask.receive

    def turned(task: Any, *rest: Any) -> None:
        other = task.lane._running[-1]
        if not other.pending.done:
            task.pending, other.pending = other.pending, task.pending
        receive(task, *rest)

    monkeypatch.setattr(remote.ComponentTask, "receive", turned)


def work_that_others_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unswitch, "_closed", lambda moved, gate, edges: moved)


def a_condition_that_is_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unswitch, "_overwritten", lambda *given: False)


def what_stands_in_front_of_a_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "conflicts", lambda *given: False)


def who_goes_on_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuse_losses, "graph_leaving", lambda *given: None)


def versions_of_buffers_that_others_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accumulate, "_saves_rows", lambda *given: False)


def what_stands_between_two_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusion, "_clear", lambda *given: [])


def a_dependence_that_fusing_turns_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusion, "_turned", lambda *given: None)


def loops_of_any_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interleave, "_shape", lambda *given: None)


def loops_of_other_trips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interleave, "same_trips", lambda *given: True)


def casts_that_a_region_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(casts.Casts, "keeps", lambda self, node: False)


def the_last_trip_of_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    mended = drop_gradients.backward_without

    def always(loss: Any, *dropped: Any) -> None:
        mended(loss, *(v for k in range(0, len(dropped), 4) for v in (dropped[k], 0, 2, 1)))

    monkeypatch.setattr(drop_gradients, "backward_without", always)


def who_looks_at_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drop_gradients, "_looks", lambda *given: False)


@pytest.mark.parametrize(
    ("plant", "kind", "count", "seed"),
    [
        (an_order_without_dependences, "hosted", 8, 1),
        (a_lane_that_does_not_wait, "hosted", 8, 1),
        (answers_of_another_call, "hosted", 8, 1),
        (work_that_others_wait_for, "updates", 20, 1),
        (a_condition_that_is_overwritten, "updates", 60, 3),
        (what_stands_in_front_of_a_backward, "losses", 30, 1),
        (the_last_trip_of_a_loop, "critics", 40, 1),
        (who_looks_at_gradients, "critics", 40, 1),
        (who_goes_on_recording, "losses", 8, 14),
        (versions_of_buffers_that_others_write, "groups", 10, 1),
        (what_stands_between_two_loops, "groups", 20, 1),
        (a_dependence_that_fusing_turns_round, "references", 40, 1),
        (loops_of_any_shape, "references", 20, 2),
        (loops_of_other_trips, "references", 40, 1),
        (casts_that_a_region_keeps, "aliasing", 60, 1),
    ],
    ids=lambda v: getattr(v, "__name__", str(v)),
)
def test_a_planted_fault_is_found(
    plant: Plant, kind: str, count: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        plant(patched)
        found = fuzz(kind, count, seed, shrink=False)
    assert found.failure is not None, f"{found.programs} programs let it pass"
