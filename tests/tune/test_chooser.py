"""The chooser on simulated schedules: it ends at the right one, and never at one that does harm."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rose_compiler.base.decision import Decision
from rose_compiler.tune.chooser import Chooser
from rose_compiler.tune.space import candidates, with_compiled
from rose_compiler.tune.stats import median_interval


def decisions(count: int) -> list[Decision | None]:
    return [None, *(Decision(groups=g + 2) for g in range(count - 1))]


def search(times: list[float], seed: int, *, noise: float = 0.1, work=None, **options) -> Chooser:  # type: ignore[no-untyped-def]
    """Run a chooser over candidates with the given true seconds a unit of work."""
    generator = np.random.default_rng(seed)
    chooser = Chooser(decisions(len(times)), trial_s=0.5, **options)
    level = 1.0
    for _ in range(20_000):
        if chooser.settled:
            break
        level = np.clip(level * np.exp(0.02 * generator.normal()), 0.7, 1.4)
        c = chooser.current
        amount = 1.0 if work is None else work(generator)
        spike = 3.0 if generator.random() < 0.02 else 1.0
        seconds = times[c] * amount * level * spike * np.exp(noise * generator.normal())
        chooser.record(c, seconds, amount)
    assert chooser.settled
    return chooser


def share(times: list[float], wanted: set[int], runs: int = 100, **options) -> float:  # type: ignore[no-untyped-def]
    return sum(search(times, seed, **options).best in wanted for seed in range(runs)) / runs


def test_finds_the_fastest_of_several() -> None:
    assert share([0.30, 0.24, 0.20, 0.31], {2}) >= 0.95


def test_a_small_gain_in_noise_is_looked_at_for_longer() -> None:
    assert share([0.2, 0.19], {1}, noise=0.05) >= 0.75


def test_keeps_eager_when_nothing_beats_it() -> None:
    assert share([0.20, 0.23, 0.26, 0.22], {0}) >= 0.95


def test_does_not_take_one_that_does_harm() -> None:
    assert share([0.200, 0.206, 0.206, 0.206], {0}) >= 0.97


def test_equal_candidates_stay_with_eager_mostly() -> None:
    assert share([0.2, 0.2, 0.2], {0}) >= 0.8


def test_work_that_varies_does_not_mislead() -> None:
    """Iterations that stop early are short, not fast."""
    assert share([0.2, 0.25], {0}, work=lambda g: float(g.integers(1, 10))) >= 0.95


def test_budget_is_respected() -> None:
    chooser = search([0.3, 0.28, 0.26, 0.24, 0.2], 0, budget_s=4.0)
    assert chooser.spent_s < 4.0 + 0.5
    chooser = search([0.3, 0.28, 0.26], 0, budget_trips=7)
    assert chooser.trips <= 7


def test_budget_spent_falls_back_to_eager_unless_the_gain_is_clear() -> None:
    assert search([0.30, 0.29], 0, budget_s=1.5).best == 0
    assert search([0.60, 0.20], 0, budget_s=2.5).best == 1


@pytest.mark.parametrize("trips", [20, 200, 1000])
def test_a_tenth_of_a_run_of_known_length_at_most(trips: int) -> None:
    generator = np.random.default_rng(trips)
    chooser = Chooser(decisions(4))
    chooser.limit(trips)
    ran = 0
    while not chooser.settled:
        ran += 1
        times = (0.05, 0.049, 0.02, 0.04)
        chooser.record(chooser.current, times[chooser.current] * float(generator.normal(1, 0.02)))
    assert ran <= trips / 10
    assert chooser.best == (0 if trips == 20 else 2), "each was seen, if the run is long enough"


def test_the_length_of_a_run_may_become_known_late() -> None:
    chooser = Chooser(decisions(3))
    for _ in range(5):
        chooser.record(chooser.current, 0.2)
    chooser.limit(1000)
    assert not chooser.settled
    chooser.limit(40)
    assert chooser.settled
    assert chooser.best == chooser.eager
    assert chooser.ended_early


def test_search_ends_where_the_gain_to_expect_is_under_the_noise() -> None:
    """Candidates that were slower by more than trials vary are not compared pair by pair."""
    generator = np.random.default_rng(0)
    chooser, times = Chooser(decisions(5)), (0.30, 0.20, 0.23, 0.24, 0.25)
    while not chooser.settled:
        c = chooser.current
        chooser.record(c, times[c] * float(np.exp(0.01 * generator.normal())))
    assert chooser.best == 1
    saved = [k for k, v in chooser.verdicts.items() if "no gain to be expected" in v]
    assert set(saved) >= {3, 4}, chooser.verdicts
    assert all(len(chooser.trials[k]) == 1 for k in saved)


def test_what_is_compared_beside_the_search_takes_of_its_budget() -> None:
    chooser = Chooser([None], budget_s=10.0)
    chooser.spend(4.0)
    assert chooser.allows(6.0)
    assert not chooser.allows(6.1)
    chooser.limit(100)  # a tenth of which may be tuning
    for _ in range(4):
        chooser.spend(0.5)
    assert (chooser.trips, chooser.allows(0.0)) == (5, True)
    chooser.spend(1.2, None)  # which is as long as an iteration on average
    assert chooser.trips == 6
    for _ in range(5):
        chooser.spend(0.1)
    assert not chooser.allows(0.0), "iterations count, however short they are"


def test_tuning_anew_stays_within_a_tenth_of_the_training() -> None:
    generator = np.random.default_rng(0)
    chooser = Chooser(decisions(2), budget_s=12.0)
    level = 0.2
    for k in range(6000):
        if k % 100 == 0:
            level = 0.2 if level > 0.25 else 0.4  # for good, time and again
        c = chooser.current
        chooser.record(c, level * (1.0, 0.8)[c] * float(np.exp(0.01 * generator.normal())))
    assert chooser.spent_s <= max(12.0, 0.1 * chooser.total_s) + 1.0
    assert chooser.spent_s > 20.0, "it was tuned anew"


def test_a_failed_candidate_is_dropped() -> None:
    chooser = Chooser(decisions(3), trial_s=0.1)
    while not chooser.settled:
        if chooser.current == 1:
            chooser.failed(1, "refused")
        else:
            chooser.record(chooser.current, 0.2 if chooser.current == 0 else 0.1)
    assert chooser.best == 2
    assert chooser.reports()[1].verdict == "refused"


def test_when_all_fail_eager_stays() -> None:
    chooser = Chooser(decisions(3), trial_s=0.1)
    while not chooser.settled:
        if chooser.current:
            chooser.failed(chooser.current, "refused")
        else:
            chooser.record(0, 0.2)
    assert chooser.best == 0


def test_a_champion_that_fails_in_its_duel_gives_way() -> None:
    chooser = Chooser(decisions(2), trial_s=0.1)
    for _ in range(3):
        chooser.record(chooser.current, 0.1 if chooser.current else 0.2)
    chooser.failed(1, "broke")
    while not chooser.settled:
        chooser.record(chooser.current, 0.2)
    assert chooser.best == 0


def test_drift_opens_a_new_duel_with_eager() -> None:
    chooser = search([0.3, 0.2], 0)
    assert chooser.best == 1
    for _ in range(20):
        chooser.record(1, 0.2)
    for _ in range(20):
        if chooser.settled:
            chooser.record(1, 0.4)
    assert not chooser.settled
    while not chooser.settled:
        chooser.record(chooser.current, 0.3 if chooser.current == 0 else 0.4)
    assert chooser.best == 0


def test_after_a_drift_what_was_left_out_is_tried() -> None:
    made = decisions(3)
    chooser = Chooser(made)
    first, second = made[1:]
    assert first is not None
    assert second is not None
    chooser.arrange((), {first: "no window", second: "no window"})
    while not chooser.settled:
        chooser.record(chooser.current, 0.3)
    for _ in range(20):
        chooser.record(0, 0.3)
    for _ in range(40):
        if chooser.settled:
            chooser.record(0, 0.6)
    assert not chooser.settled
    while not chooser.settled:
        chooser.record(chooser.current, 0.4 if chooser.current == 1 else 0.6)
    assert chooser.best == 1


def test_one_candidate_needs_no_search() -> None:
    assert Chooser([None]).settled


def test_no_candidates() -> None:
    with pytest.raises(ValueError, match="no candidates"):
        Chooser([])


def test_interval_of_a_constant() -> None:
    interval = median_interval([2.0] * 5)
    assert (interval.low, interval.median, interval.high) == (2.0, 2.0, 2.0)
    with pytest.raises(ValueError, match="no values"):
        median_interval([])


def test_space_is_a_handful_and_starts_with_what_must_be_beaten() -> None:
    space = candidates(4, close=True, threads=2, asynchronous=True, eager=True)
    assert space[0] is None
    assert 4 <= len(space) <= 12
    assert len(set(space)) == len(space)
    bitwise = candidates(4, close=False, threads=2, asynchronous=True, eager=True)
    assert all(
        d is None or (d.rollout_threads is None and d.update_threads is None) for d in bitwise
    )
    assert candidates(1, close=True, threads=1, asynchronous=False, eager=False)[0] == Decision()
    early = candidates(1, close=False, threads=1, asynchronous=False, eager=True, accumulate=True)
    assert {d.accumulate for d in early if d is not None} == {True, False}


def test_the_space_has_program_order_with_what_costs_nothing() -> None:
    known: dict[str, Any] = {"close": False, "threads": 2, "asynchronous": True}
    assert Decision() in candidates(2, eager=True, **known)
    assert Decision(wrappers=True) in candidates(2, eager=True, wrappers=True, **known)
    assert Decision(fuse=True) in candidates(2, eager=False, fuse=True, **known)


def test_a_compiled_form_has_what_every_candidate_has() -> None:
    plain = Decision(fuse=True, wrappers=True)
    assert with_compiled(None, plain) == replace(plain, compile=True)
    assert with_compiled(Decision(), plain) == replace(plain, compile=True)
    assert with_compiled(Decision(groups=2), plain) == replace(plain, groups=2, compile=True)


def challenged(times: list[float], further: float, *, seed: int = 0) -> Chooser:
    """A search that is over, then one more schedule against what it settled on."""
    chooser = search(times, seed)
    chooser.challenge(Decision(groups=9, compile=True))
    generator = np.random.default_rng(seed)
    known = [*times, further]
    while not chooser.settled:
        c = chooser.current
        chooser.record(c, known[c] * np.exp(0.05 * generator.normal()))
    return chooser


@pytest.mark.parametrize(("further", "best"), [(0.15, 2), (0.25, 1)])
def test_one_more_schedule_meets_what_is_settled_on(further: float, best: int) -> None:
    chooser = challenged([0.30, 0.20], further)
    assert chooser.best == best
    assert not chooser.against_eager.get(2)  # the champion is compared with, not eager
    assert "times the speed of [groups=2]" in chooser.verdicts[2]


def test_what_holds_against_a_challenge_keeps_the_reason_that_it_was_kept_for() -> None:
    chooser = search([0.30, 0.20], 0)
    why = chooser.verdicts[1]
    chooser.challenge(Decision(groups=9, compile=True))
    while not chooser.settled:
        chooser.record(chooser.current, 0.4 if chooser.current == 2 else 0.2)
    assert (chooser.best, chooser.verdicts[1]) == (1, why)
    assert "times the speed of" in chooser.verdicts[2]


def test_a_challenger_that_fails_leaves_what_is_settled_on() -> None:
    chooser = search([0.30, 0.20], 0)
    chooser.challenge(Decision(compile=True))
    chooser.record(chooser.current, 0.2)
    chooser.failed(2, "no compiler")
    assert chooser.settled
    assert chooser.best == 1


def test_a_challenge_has_no_budget_of_its_own() -> None:
    chooser = search([0.30, 0.20], 0)
    kept, why = chooser.best, chooser.verdicts[chooser.best]
    assert chooser.allows(10.0)
    chooser.budget_s = chooser.spent_s + 3.0
    assert not chooser.allows(10.0)
    chooser.challenge(Decision(compile=True))
    for _ in range(20):
        if not chooser.settled:
            chooser.record(chooser.current, 0.5)
    assert chooser.settled
    assert (chooser.best, chooser.verdicts[kept]) == (kept, why)
    chooser.budget_s = chooser.spent_s
    chooser.challenge(Decision(groups=3, compile=True))
    assert chooser.settled


@pytest.mark.parametrize(("further", "best"), [(0.16, 2), (0.20, 1)])
def test_what_compiling_took_leaves_a_few_pairs(further: float, best: int) -> None:
    chooser = search([0.30, 0.20], 0)
    chooser.budget_s = chooser.spent_s + 20.0
    chooser.challenge(Decision(compile=True))
    chooser.skip(70.0)
    generator, trips = np.random.default_rng(0), 0
    while not chooser.settled:
        seconds = further if chooser.current == 2 else 0.20
        chooser.record(chooser.current, seconds * np.exp(0.02 * generator.normal()))
        trips += 1
    assert chooser.best == best
    assert "in 4 pairs" in chooser.verdicts[2]
    assert trips <= 8 * 4  # trials of 0.5 s


def test_a_run_of_known_length_ends_a_challenge_at_once() -> None:
    chooser = search([0.30, 0.20], 0)
    chooser.challenge(Decision(compile=True))
    chooser.limit(10 * chooser.trips + 10)
    chooser.skip(70.0)
    assert chooser.settled
    assert chooser.best == 1


def test_the_better_of_two_schedules_that_beat_eager_is_found() -> None:
    assert share([0.45, 0.30, 0.285, 0.30], {2}, noise=0.05) >= 0.9


@pytest.mark.parametrize("seed", range(5))
def test_small_differences_leave_time_for_what_comes_after(seed: int) -> None:
    """Of long iterations only few fit into a budget: what is alike is not compared until it ends,
    so that a compiled form can still be tried."""
    chooser = search([1.7, *[1.2, 1.19, 1.21, 1.2, 1.18, 1.2]], seed, noise=0.03, budget_s=120.0)
    assert not chooser.ended_early
    assert chooser.best != 0
    assert chooser.allows(25.0)
