"""The return curves: what counts as inside eager's spread, and that a schedule is compared."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench import loops, returns


def curves(seed: int, shift: float = 0.0) -> returns.Array:
    """Five noisy learning curves of forty points."""
    rng = np.random.default_rng(seed)
    rise = np.linspace(0.0, 100.0, 40)
    return rise * rng.normal(1.0, 0.2, (5, 1)) + rng.normal(shift, 5.0, (5, 40))


def test_curves_of_the_same_kind_lie_inside() -> None:
    verdict = returns.judge(curves(0), curves(1))
    assert verdict.holds, verdict
    assert verdict.mean_inside == 1.0


@pytest.mark.parametrize("shift", [80.0, -80.0])
def test_shifted_curves_lie_outside(shift: float) -> None:
    verdict = returns.judge(curves(0), curves(1, shift))
    assert not verdict.holds
    assert verdict.p < 0.05


def test_the_spread_is_a_prediction_interval() -> None:
    """About 95% of further curves' points lie inside, at every number of seeds."""
    rng = np.random.default_rng(0)
    for n in (2, 5):
        low, high = returns.spread(rng.normal(size=(n, 4000)))
        more = rng.normal(size=4000)
        assert 0.93 < float(((more >= low) & (more <= high)).mean()) < 0.97


def test_a_short_run_compares_what_was_rewritten(tmp_path: Path) -> None:
    cfg = loops.Config(8, 10, 64, 2, 1, 2, 4, hosts="inline")
    eager, compiled, missing = returns.run(2, 3, cfg, episode=10)
    assert missing == frozenset()
    # the first call runs in program order; tiled products of two rows part the trainings
    assert [returns.parted(a, b) for a, b in zip(eager, compiled, strict=True)] == [2, 2]
    assert returns.stacked(eager).shape == (2, 2)  # a reset takes a step
    assert eager[0].returns[0] == compiled[0].returns[0]
    returns.draw(returns.stacked(eager), returns.stacked(compiled), 80, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000
