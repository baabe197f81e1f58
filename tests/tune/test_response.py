from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose_compiler.tune.response import Response, fit


@pytest.mark.parametrize("demand", [5.0, 9.0, math.inf])
@pytest.mark.parametrize("fixed", [0.0, 0.4])
def test_the_law_is_found_again(fixed: float, demand: float) -> None:
    law = Response(fixed, 12.0, demand)
    found = fit([(units, law.seconds(units)) for units in (1, 3, 6, 12)])
    assert not found.knots
    for units in range(1, 17):
        assert found.seconds(units) == pytest.approx(law.seconds(units), rel=0.02)


def test_what_follows_no_law_is_interpolated() -> None:
    steps = [(1, 10.0), (2, 9.5), (4, 9.0), (8, 2.0), (12, 1.9)]
    found = fit(steps)
    assert found.knots
    for units, seconds in steps:
        assert found.seconds(units) == pytest.approx(seconds)
    assert found.seconds(0.5) == pytest.approx(20.0)
    assert found.seconds(100) == pytest.approx(1.9)


def test_few_points() -> None:
    assert fit([(4, 2.0)]).seconds(8) == pytest.approx(1.0)  # as if all of it were parallel
    assert fit([(4, 2.0), (4, 2.2), (4, 9.0)]).seconds(4) == pytest.approx(2.2)  # the median
    assert fit([(4, 0.0), (8, 0.0)]).seconds(1) == 0.0
    with pytest.raises(ValueError, match="at least one"):
        fit([])
    with pytest.raises(ValueError, match="positive"):
        fit([(0, 1.0)])
    with pytest.raises(ValueError, match="never ends"):
        Response(1.0, 1.0).seconds(0)


@given(
    st.lists(
        st.tuples(st.integers(1, 16), st.floats(0.01, 100)),
        min_size=1,
        max_size=5,
        unique_by=lambda point: point[0],
    )
)
def test_more_is_never_slower(points: list[tuple[int, float]]) -> None:
    found = fit(points)
    times = [found.seconds(units) for units in range(1, 20)]
    assert all(b <= a * (1 + 1e-9) for a, b in itertools.pairwise(times))
    assert all(time >= 0 and math.isfinite(time) for time in times)


@given(st.lists(st.floats(-0.02, 0.02), min_size=4, max_size=4), st.integers(2, 16))
def test_small_noise_moves_the_curve_little(noise: list[float], demand: int) -> None:
    law = Response(0.5, 10.0, demand)
    at = (1, 3, 6, 12)
    found = fit([(u, law.seconds(u) * (1 + e)) for u, e in zip(at, noise, strict=True)])
    for units in at:
        assert found.seconds(units) == pytest.approx(law.seconds(units), rel=0.05)
