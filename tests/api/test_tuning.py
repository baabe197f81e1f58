"""What of an iteration counts as a trial of its schedule."""

from __future__ import annotations

import pytest

from rose_compiler.api.options import Options
from rose_compiler.api.tuning import Tuning
from rose_compiler.base.decision import Decision, Pipelined
from rose_compiler.base.remarks import RemarkLog
from rose_compiler.kernels.scan_native import Built
from rose_compiler.runtime.inductor import Note
from rose_compiler.tune.chooser import Chooser


def tuning() -> Tuning:
    return Tuning(Options(), 2, True, RemarkLog(), eager=True)


def test_an_iteration_in_which_something_was_compiled_is_no_trial() -> None:
    made = tuning()
    for found in ([Note("loss", 9.0)], [Built("gae", 0.5, "")]):
        decision = made.next()
        made.compiled(found)
        made.record(decision, 30.0)
        assert not any(made._chooser.trials.values())  # type: ignore[union-attr]
        assert made.next() == decision
    made.record(made.next(), 1.0)
    assert sum(map(len, made._chooser.trials.values())) == 1  # type: ignore[union-attr]


def test_what_was_refused_at_once_takes_no_trial_away() -> None:
    made = tuning()
    decision = made.next()
    made.compiled([])
    made.record(decision, 1.0)
    assert sum(map(len, made._chooser.trials.values())) == 1  # type: ignore[union-attr]


class Kept:
    """A kept schedule that no search of this run proposes."""

    plan = None

    def __init__(self, decision: Decision) -> None:
        self.decision = decision

    def load(self, known: list[Decision | None]) -> int:
        known.append(self.decision)
        return len(known) - 1


PIPELINED = Decision(groups=2, pipeline=(Pipelined("loop", 1),))


@pytest.mark.parametrize("alone", [False, True])
def test_a_kept_schedule_from_outside_the_space_is_one_like_any_other(alone: bool) -> None:
    options = Options()
    made = Tuning(options, 2, True, RemarkLog(), eager=True, stored=lambda _: Kept(PIPELINED))  # type: ignore[arg-type,return-value]
    chooser = made._chooser
    assert chooser is not None
    if alone:
        chooser = made._chooser = Chooser([None])
        chooser.adopt(PIPELINED, "an earlier run settled on it")
    assert made.chosen == PIPELINED
    assert "pipeline" in made.summary()
    assert [row.decision for row in chooser.reports()] == chooser.candidates


def test_a_schedule_from_outside_the_space_meets_eager_after_a_drift() -> None:
    chooser = Chooser([None, Decision(groups=2)])
    chooser.adopt(PIPELINED, "an earlier run settled on it")
    assert chooser.candidates.count(PIPELINED) == 1
    slow = chooser.best
    for trip in range(4000):
        if trip > 300 and chooser.settled and chooser.best == chooser.eager:
            break
        chooser.record(chooser.current, 0.1 if trip >= 300 and chooser.current == slow else 0.05)
    assert chooser.best == chooser.eager
    assert chooser.trials[slow]
