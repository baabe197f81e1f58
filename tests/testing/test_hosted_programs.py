"""Random iterations with calls of a hosted component are as eager, with calls under way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import rose_compiler
from rose_compiler.passes import hosts
from rose_compiler.runtime import remote
from rose_compiler.testing import hosting
from rose_compiler.testing.functions import load

PROGRAMS = 8
ITERATIONS = 4


def run(fn: Any, compiled: Any) -> tuple[list[Any], list[Any]]:
    """What each iteration leaves behind, as written and compiled."""
    found: list[list[Any]] = [[], []]
    for states, step in zip(found, (fn, compiled), strict=True):
        with rose_compiler.hosted(hosting.Scorer, host="thread") as scorer:
            given = hosting.world(scorer)
            for it in range(ITERATIONS):
                step(it, *given)
                states.append(hosting.seen(given))
    return found[0], found[1]


def differing(folder: Path, seeds: range) -> tuple[list[int], int]:
    """The programs that differ, and in how many a call ran beside something."""
    wrong, beside = [], 0
    for seed in seeds:
        text = "import torch\n\n\n" + hosting.source(seed)
        fn = load(text, folder / f"hosted_{seed}.py").iteration
        compiled = rose_compiler.compile(fn, tune=False)
        try:
            eager, found = run(fn, compiled)
            beside += "beside" in compiled.explain().split("Missed")[0]
        except Exception:
            wrong.append(seed)
            continue
        finally:
            compiled.close()
        if eager != found:
            wrong.append(seed)
    return wrong, beside


def test_hosted_programs_are_as_eager(tmp_path: Path) -> None:
    wrong, beside = differing(tmp_path, range(PROGRAMS))
    assert wrong == []
    assert beside >= 2, "no call ran beside anything"


def test_an_order_without_dependences_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_order = hosts.in_order
    monkeypatch.setattr(
        hosts,
        "in_order",
        lambda nodes, edges, calls: in_order(nodes, [e for e in edges if e.kind == "value"], calls),
    )
    assert found(tmp_path)


def found(folder: Path) -> bool:
    """Whether one of the programs differs."""
    return any(differing(folder, range(seed, seed + 1))[0] for seed in range(PROGRAMS))


def test_a_lane_that_does_not_wait_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote.ComponentTask, "wait", lambda task: task.value)
    assert found(tmp_path)


def test_answers_of_another_call_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lane takes in the answers of calls under way in another order than they were begun."""
    receive = remote.ComponentTask.receive

    def turned(task: Any, *rest: Any) -> None:
        other = task.lane._running[-1]
        if not other.pending.done:
            task.pending, other.pending = other.pending, task.pending
        receive(task, *rest)

    monkeypatch.setattr(remote.ComponentTask, "receive", turned)
    assert found(tmp_path)
