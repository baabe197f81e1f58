"""Tuning outlives whatever a candidate does; the training's own exceptions reach the user."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim import optimizer

import rose_compiler
from rose_compiler.api import schedules
from rose_compiler.api.schedules import Schedule
from rose_compiler.api.work import WorkMeter
from rose_compiler.base.decision import Decision
from rose_compiler.ir.program import Program
from rose_compiler.ir.rewriter import Rewriter
from rose_compiler.passes.base import context_of
from rose_compiler.passes.manager import History
from rose_compiler.passes.pipeline import pipeline
from tests.api.loops import Drift, Training, differing, iteration


@pytest.fixture
def training() -> Iterator[Training]:
    made = Training()
    yield made
    made.close()


def begin(fast: Any, training: Training) -> None:
    """Run the first iteration, and let a single one of each candidate be a trial; the iteration
    that is profiled before the first trial is left out."""
    training.run(fast)
    fast._last.unit.profiling.baseline_done = True
    fast._last.unit.tuning()._chooser.trial_s = 0.0


def eager_bits(times: int) -> dict[str, Any]:
    plain = Training()
    plain.run(iteration, times)
    found = plain.bits()
    plain.close()
    return found


@dataclass(frozen=True)
class Stumbles(rose_compiler.Pass):
    """Raises an exception that is no ``RoseError``, on every schedule that cuts the batch."""

    name = "stumbles"

    def run_program(self, program: Program, rewrite: Rewriter) -> None:
        if context_of(rewrite).options.groups:
            raise ZeroDivisionError("division by zero in a pass")


def test_candidates_that_can_not_be_built_are_dropped_by_name(training: Training) -> None:
    fast = rose_compiler.compile(iteration, numerics="bitwise", passes=pipeline([Stumbles()]))
    begin(fast, training)
    runs = 1
    while not fast.settled and runs < 60:  # program order can be built, and meets eager
        training.run(fast)
        runs += 1
    assert fast.settled
    failed = [r for r in fast._log.missed() if r.code == "candidate-failed"]
    assert len(failed) == 2, fast.explain()
    assert all("groups=2" in r.why and "division by zero in a pass" in r.why for r in failed)
    assert differing(training.bits(), eager_bits(runs)) == []
    fast.close()


def test_without_tuning_the_exception_of_a_pass_names_the_pass(training: Training) -> None:
    fast = rose_compiler.compile(iteration, tune=False, passes=pipeline([Stumbles()]))
    with pytest.raises(ZeroDivisionError) as caught:
        training.run(fast, 2)
    assert any("'stumbles'" in note for note in caught.value.__notes__)
    fast.close()


def test_a_candidate_whose_code_fails_is_not_run_again(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = schedules.load
    ran = []

    def load(emitted: Any, **options: Any) -> Any:
        text = emitted.source
        lines = text.splitlines()
        at = next(k for k, line in enumerate(lines) if line.startswith("def run("))
        if "shard:1" in text:
            lines.insert(at + 1, "    note_a_run()")
            lines.insert(at + 2, "    name_that_is_nowhere")
        made = replace(
            emitted,
            source="\n".join(lines),
            namespace={**emitted.namespace, "note_a_run": lambda: ran.append(1)},
        )
        return real(made, **options)

    monkeypatch.setattr(schedules, "load", load)
    fast = rose_compiler.compile(iteration, numerics="bitwise")
    begin(fast, training)
    raised = 0
    for _ in range(12):
        try:
            training.run(fast)
        except NameError:
            raised += 1
    assert raised == len(ran) > 0
    failed = [r for r in fast._log.missed() if r.code == "candidate-failed"]
    assert len(failed) == raised
    assert all("name_that_is_nowhere" in r.why for r in failed)
    training.run(fast, 3)
    assert len(ran) == raised
    fast.close()


def stops(agent: Any, optimizer: Any, envs: Any, buffer: Any, obs: Any, when: Any) -> Any:
    when.check()
    return iteration(agent, optimizer, envs, buffer, obs)


class Fuse:
    """Blows on given calls."""

    def __init__(self, *calls: int) -> None:
        self.calls = set(calls)
        self.count = 0

    def check(self) -> None:
        self.count += 1
        if self.count in self.calls:
            raise LookupError(f"call {self.count}")


def test_the_users_own_exception_is_raised_and_drops_nobody(training: Training) -> None:
    fast = rose_compiler.compile(stops, numerics="bitwise")
    fuse, raised = Fuse(2, 4, 5), 0
    for _ in range(9):
        try:
            training.obs = fast(
                training.agent,
                training.optimizer,
                training.envs,
                training.buffer,
                training.obs,
                fuse,
            )
        except LookupError:
            raised += 1
    assert raised == 3
    assert not [r for r in fast._log if r.code == "candidate-failed"]
    assert differing(training.bits(), eager_bits(6)) == []
    fast.close()


@pytest.mark.parametrize("error", [KeyboardInterrupt, LookupError])
def test_an_iteration_that_ends_early_leaves_no_counter_behind(
    training: Training, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    fast = rose_compiler.compile(iteration, numerics="bitwise")
    begin(fast, training)
    monkeypatch.setattr(Drift, "broken", error())
    before = dict(optimizer._global_optimizer_post_hooks)
    with pytest.raises(error):
        training.run(fast)
    assert dict(optimizer._global_optimizer_post_hooks) == before
    fast.close()


def test_what_was_not_run_to_its_end_does_not_say_what_is_usual() -> None:
    weights = torch.nn.Parameter(torch.ones(2))
    weights.grad = torch.ones(2)
    sgd, meter = torch.optim.SGD([weights]), WorkMeter()
    meter.start()  # of a schedule that then could not be built
    meter.start()
    sgd.step()
    assert meter.stop()
    for steps, usual in ((1, True), (0, False), (1, True)):
        meter.start()
        for name in (*["rose thread:0"] * steps, "of the user's own"):
            thread = threading.Thread(target=sgd.step, name=name)
            thread.start()
            thread.join()
        assert meter.stop() is usual


def test_memory_that_runs_out_drops_the_candidate(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = rose_compiler.compile(iteration, numerics="bitwise")
    begin(fast, training)
    unit = fast._last.unit
    schedule = unit.build(Decision(groups=2, late="shadow", defer=True))

    def runs_out(*_: Any) -> Any:
        raise MemoryError

    schedule.run = runs_out
    chooser = unit.tuning()._chooser
    index = chooser.candidates.index(schedule.decision)
    chooser._queue = [index, *chooser._queue]
    with pytest.raises(MemoryError):
        training.run(fast)
    assert index in chooser._dropped
    training.run(fast, 2)
    fast.close()


@pytest.mark.parametrize(
    ("asked", "done", "idle"),
    [
        (Decision(groups=2, late="shadow"), ("late",), ("groups=2",)),
        (Decision(groups=2, defer=True), ("tile_batch",), ("defer=True",)),
        (Decision(groups=1, late="shadow"), ("unswitch",), ()),
        (Decision(), (), ()),
    ],
)
def test_what_of_a_decision_came_to_nothing(
    asked: Decision, done: tuple[str, ...], idle: tuple[str, ...]
) -> None:
    found: Any = SimpleNamespace(decision=asked, history=History(rewrites=dict.fromkeys(done, 1)))
    assert Schedule.idle.fget(found) == idle  # type: ignore[attr-defined]
