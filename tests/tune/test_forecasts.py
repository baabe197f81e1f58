"""Forecasts are scaled to what was measured, carry their error, or are not made."""

from __future__ import annotations

import math

import pytest

from rose_compiler.tune.forecasts import LEAST_ERROR, USUAL_ERROR, forecast_of, off


def test_a_slower_machine_scales_a_forecast() -> None:
    """The profile says 100 and 60 ms; by now program order takes 110."""
    found = forecast_of(0.060, 0.100, 0.110)
    assert found is not None
    assert found.seconds == pytest.approx(0.066)
    assert found.high / found.seconds == pytest.approx(1 + USUAL_ERROR)
    assert found.seconds / found.low == pytest.approx(1 + USUAL_ERROR)


@pytest.mark.parametrize("measured", [0.040, 0.079, 0.126, 0.7])
def test_nothing_follows_from_a_disturbed_profile(measured: float) -> None:
    assert off(0.1, measured)
    assert forecast_of(0.060, 0.100, measured) is None


def test_what_others_were_off_by_is_the_interval() -> None:
    first = forecast_of(0.060, 0.100, 0.100)
    assert first is not None
    error = first.error(0.090)
    assert error == pytest.approx(math.log(1.5))
    second = forecast_of(0.080, 0.100, 0.100, [error])
    assert second is not None
    assert (second.low, second.high) == pytest.approx((0.080 / 1.5, 0.080 * 1.5))
    close = forecast_of(0.080, 0.100, 0.100, [0.001, -0.002])
    assert close is not None
    assert close.high == pytest.approx(0.080 * (1 + LEAST_ERROR)), "two may agree by chance"


def test_times_of_nothing_give_no_forecast() -> None:
    assert forecast_of(0.0, 0.1, 0.1) is None
    assert forecast_of(0.1, 0.0, 0.1) is None
