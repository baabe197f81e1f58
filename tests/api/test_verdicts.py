"""Every schedule that was tried leaves a remark with what it was predicted and measured to take."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rose_compiler.api.options import Options
from rose_compiler.api.tuning import Tuning
from rose_compiler.base.decision import Decision
from rose_compiler.base.remarks import Remark, RemarkLog


def searched(seconds: Callable[[Decision | None], float], predicted: bool = True) -> Tuning:
    """A search over iterations that take ``seconds`` of each schedule, until it has settled."""
    made = Tuning(Options(), 4, True, RemarkLog(), eager=True)
    if predicted:
        made.verdicts.forecast = lambda d: 1.0 - 0.1 * (d.groups or 0)
    for _ in range(2000):
        if made.settled:
            return made
        decision = made.next()
        made.record(decision, seconds(decision))
    raise AssertionError("the search does not end")


def by_decision(made: Tuning) -> dict[str, Remark]:
    found = [r for r in made.log if r.pass_name == "tune"]
    names = [r.why[1:].partition("]")[0] for r in found]
    assert len(set(names)) == len(names)
    return dict(zip(names, found, strict=True))


def tried(made: Tuning) -> list[str]:
    assert made._chooser is not None
    return [str(r.decision) for r in made._chooser.reports() if r.decision and r.trials]


def test_what_wins_and_what_loses_is_told_with_both_figures() -> None:
    def seconds(decision: Decision | None) -> float:
        if decision is None:
            return 1.0
        found = {0: 1.02, 2: 0.8, 4: 0.9}[decision.groups] + 0.01 * (not decision.defer)
        return found + 0.005 * (decision.update_threads == 1)  # tried where torch has several

    made = searched(seconds)
    assert made.chosen is not None
    assert made.chosen.groups == 2
    remarks = by_decision(made)
    assert sorted(remarks) == sorted(tried(made))
    for name, remark in remarks.items():
        kept = name == str(made.chosen)
        assert remark.kind == ("applied" if kept else "missed")
        assert "; predicted " in remark.why
        assert "ms over program order" in remark.why
        assert "; measured " in remark.why, remark.why
        assert remark.gain is not None
        assert remark.gain == pytest.approx(0.2) if kept else remark.gain < 0
    kept = remarks[str(made.chosen)].why
    assert "predicted 800 ms" in kept
    assert "-200 ms over program order" in kept
    assert "measured 800 ms, -200 ms over the 1000 of the loop as written" in kept
    loser = next(r for n, r in remarks.items() if "groups=4" in n and "defer" in n)
    assert "predicted 600 ms" in loser.why
    assert f"measured 900 ms, +100 ms over the 800 of [{made.chosen}]" in loser.why
    assert loser.gain == pytest.approx(-0.1)


def test_where_nothing_wins_each_loss_is_told() -> None:
    made = searched(lambda decision: 1.0 if decision is None else 1.1)
    assert made.chosen is None
    remarks = by_decision(made)
    assert sorted(remarks) == sorted(tried(made))
    assert all(r.kind == "missed" for r in remarks.values())
    assert all("+100 ms over the 1000 of the loop as written" in r.why for r in remarks.values())
    assert all(r.gain == pytest.approx(-0.1) for r in remarks.values())


def test_where_nothing_was_predicted_the_remark_says_why() -> None:
    made = searched(lambda decision: 1.0 if decision is None else 1.1, predicted=False)
    for remark in by_decision(made).values():
        assert "nothing was predicted, for want of a profile" in remark.why
        assert "; measured " in remark.why
