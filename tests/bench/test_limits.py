"""A time limit stops what catches exceptions, and leaves the alarm as it was."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import suppress

import pytest

from bench import measure
from bench.limits import Late, within


def endless() -> None:
    while True:
        with suppress(Exception):
            sum(range(1000))


def test_what_is_late_is_stopped() -> None:
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(Late), within(0.05):
        endless()
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_what_ends_in_time_is_not() -> None:
    with within(60.0):
        pass
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.parametrize(("again", "trials"), [(None, 9), (1, 7), (0, 6)])
def test_trials_beside_other_load_are_run_again_as_often_as_told(
    again: int | None, trials: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure.Bystanders, "share", lambda self: 1.0)
    ran = []
    step: Callable[[], None] = lambda: ran.append(1)  # noqa: E731
    scores = measure.abba({"a": step, "b": step}, 3, 0.0, again)
    assert len(ran) == trials
    assert scores.noisy == 6
    assert scores.repeated == trials - 6
