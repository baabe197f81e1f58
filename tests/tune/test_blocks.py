"""Two arrangements compared by blocks, in the order ABBA."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from rose_compiler.tune.blocks import COLD, LEAST, LEAST_S, MOST_PAIRS, PAIRS, Blocks, least_s


def compared(took: Callable[[bool, int], float]) -> tuple[Blocks, list[bool]]:
    """Blocks of iterations that take ``took(new, number)`` seconds, and what each ran under."""
    blocks, seen = Blocks(), []
    while not blocks.decided:
        seen.append(blocks.new)
        blocks.record(took(blocks.new, len(seen)))
    return blocks, seen


def test_turns_are_abba_and_start_cold() -> None:
    blocks, seen = compared(lambda new, k: 0.5 if new else 1.0)
    assert blocks.won
    assert len(blocks.speedups) == PAIRS
    changes = [k for k in range(1, len(seen)) if seen[k] != seen[k - 1]]
    assert [seen[0], *(seen[k] for k in changes)] == [False, True, False, True, False]
    assert len(seen) == 2 * PAIRS * LEAST + COLD * len(changes)
    assert least_s(1.0) == len(seen), "seconds, of iterations that take one each"
    assert least_s(1e-6) == pytest.approx(2 * PAIRS * LEAST_S, rel=1e-3)


def test_the_first_iterations_behind_a_change_are_not_compared() -> None:
    since = [0, False]

    def took(new: bool, _: int) -> float:
        since[:] = [since[0] + 1 if since[1] == new else 1, new]
        return (0.9 if new else 1.0) + (9.0 if since[0] <= COLD and _ > COLD else 0.0)

    blocks, _ = compared(took)
    assert blocks.seconds(True) == pytest.approx(0.9)
    assert blocks.won


def test_a_lasting_drift_of_the_machine_decides_nothing() -> None:
    blocks, _ = compared(lambda new, k: 1.01**k)
    assert not blocks.won


def test_what_is_slower_for_sure_is_given_up_early() -> None:
    blocks, _ = compared(lambda new, k: 1.2 if new else 1.0)
    assert not blocks.won
    assert len(blocks.speedups) == 2


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_no_gain(seed: int) -> None:
    generator = np.random.default_rng(seed)
    blocks, _ = compared(lambda new, k: float(np.exp(0.1 * generator.normal())))
    assert len(blocks.speedups) <= MOST_PAIRS
    assert not blocks.won or blocks.interval.low > 1.0


def test_what_is_stopped_keeps_what_was_there_unless_the_gain_is_sure() -> None:
    blocks = Blocks()
    blocks.stop()
    assert blocks.won is False
    assert blocks.speedups == []
    with pytest.raises(ValueError, match="no values"):
        blocks.interval  # noqa: B018
    decided, _ = compared(lambda new, k: 0.5 if new else 1.0)
    decided.stop()
    assert decided.won
    decided.record(9.0)
    assert decided.seconds(True) == 0.5
