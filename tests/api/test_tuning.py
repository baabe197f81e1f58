"""What of an iteration counts as a trial of its schedule."""

from __future__ import annotations

from rose_compiler.api.options import Options
from rose_compiler.api.tuning import Tuning
from rose_compiler.base.remarks import RemarkLog
from rose_compiler.kernels.scan_native import Built
from rose_compiler.runtime.inductor import Note


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
