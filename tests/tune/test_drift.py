"""Drift: lasting changes are noticed soon, noise and single outliers never."""

from __future__ import annotations

import random

import pytest

from rose_compiler.tune.chooser import Chooser
from rose_compiler.tune.drift import CALIBRATION, Drift


def noisy(count: int, mean: float, share: float, seed: int) -> list[float]:
    draw = random.Random(seed)
    return [mean * draw.lognormvariate(0.0, share) for _ in range(count)]


def first(drift: Drift, seconds: list[float]) -> int | None:
    """After how many iterations a change is noticed."""
    return next((k for k, s in enumerate(seconds, 1) if drift.feed(s)), None)


@pytest.mark.parametrize("share", [0.0, 0.02, 0.1, 0.3])
@pytest.mark.parametrize("seed", range(3))
def test_noise_is_no_drift(share: float, seed: int) -> None:
    assert first(Drift(), noisy(3000, 0.2, share, seed)) is None


@pytest.mark.parametrize("factor", [0.5, 0.75, 1.3, 2.0])
@pytest.mark.parametrize("seed", range(3))
def test_a_lasting_change_is_noticed_soon(factor: float, seed: int) -> None:
    drift = Drift()
    assert first(drift, noisy(100, 0.2, 0.05, seed)) is None
    found = first(drift, noisy(100, 0.2 * factor, 0.05, seed + 50))
    assert found is not None
    assert 4 <= found <= 12


def test_a_slow_climb_is_noticed() -> None:
    drift = Drift()
    climb = [0.2 * (1 + 0.002 * k) for k in range(300)]
    found = first(drift, climb)
    assert found is not None
    assert climb[found - 1] / 0.2 < 1.5


def test_single_slow_iterations_are_not_a_change() -> None:
    drift = Drift()
    series = [2.0 if k % 10 == 5 else 0.2 for k in range(500)]
    assert first(drift, series) is None
    assert drift.expected_s == pytest.approx(0.2)


def test_a_small_change_is_not_worth_it() -> None:
    drift = Drift()
    assert first(drift, [0.2] * 50) is None
    assert first(drift, [0.22] * 500) is None
    assert drift.change == pytest.approx(0.1)


def test_what_is_normal_is_learned_anew() -> None:
    drift = Drift()
    assert first(drift, [0.2] * CALIBRATION) is None
    assert first(drift, [0.4] * 50) is not None
    assert drift.expected_s is None
    assert drift.change == 0.0
    assert first(drift, [0.4] * 200) is None
    assert drift.expected_s == pytest.approx(0.4)
    assert first(drift, [0.2] * 50) is not None


def test_times_are_above_zero() -> None:
    with pytest.raises(ValueError, match="took 0"):
        Drift().feed(0.0)


@pytest.mark.parametrize("seed", range(3))
def test_a_disturbed_second_is_no_drift_of_short_iterations(seed: int) -> None:
    """A neighbour that takes the core for a second slows hundreds of iterations of 2 ms."""
    drift = Drift()
    for _ in range(4):
        assert first(drift, noisy(3000, 2e-3, 0.2, seed)) is None
        assert first(drift, noisy(250, 4e-3, 0.2, seed + 9)) is None
    assert first(drift, noisy(3000, 2e-3, 0.2, seed)) is None
    found = first(drift, noisy(5000, 4e-3, 0.2, seed + 20))
    assert found is not None, "a change that lasts is noticed"
    assert 250 < found < 2500


def test_a_change_that_changed_nothing_has_to_last_longer() -> None:
    chooser = settled([0.2, 0.25])
    looks = []
    level = 0.2
    for _ in range(3):
        for _ in range(40):
            chooser.record(0, level)
        level *= 1.5
        count = 0
        while chooser.settled:
            chooser.record(0, level)
            count += 1
        looks.append(count * level)
        while not chooser.settled:
            chooser.record(chooser.current, level * (1.2 if chooser.current else 1.0))
        assert chooser.best == 0
    assert looks[2] > 1.5 * looks[1] > 1.5 * looks[0]


def settled(times: list[float]) -> Chooser:
    """A chooser at the end of its search, eager first."""
    chooser = Chooser([None, *[object()] * (len(times) - 1)], trial_s=0.0)  # type: ignore[list-item]
    while not chooser.settled:
        chooser.record(chooser.current, times[chooser.current])
    return chooser


def test_eager_is_challenged_again_when_its_iterations_get_longer() -> None:
    chooser = settled([0.2, 0.21])
    assert chooser.best == chooser.eager
    for _ in range(30):
        chooser.record(0, 0.2)
    later = [0.4, 0.25]
    for _ in range(30):
        if not chooser.settled:
            break
        chooser.record(0, later[0])
    assert not chooser.settled
    assert chooser.drifts == 1
    while not chooser.settled:
        chooser.record(chooser.current, later[chooser.current])
    assert chooser.best == 1


def test_what_failed_is_not_tried_again() -> None:
    chooser = Chooser([None, object()], trial_s=0.0)  # type: ignore[list-item]
    chooser.failed(1, "can't be built")
    while not chooser.settled:
        chooser.record(chooser.current, 0.2)
    for _ in range(30):
        chooser.record(0, 0.2)
    for _ in range(60):
        chooser.record(0, 0.4)
    assert chooser.settled
