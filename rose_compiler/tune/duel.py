"""A duel of two candidates: run in turn until one is faster beyond doubt, or enough pairs have run.

They run in the order ABBA, so that a drift of the machine hits both; what is compared is the ratio
of neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass

from rose_compiler.tune.stats import Interval, Trial, median_interval, paired_ratios

#: Pairs after which a duel between two candidates is decided whatever its interval.
PAIRS = 6
#: Pairs of the last duel, against eager.
FINAL_PAIRS = 8
#: Pairs of any duel where a gain shows in the median, but not beyond doubt.
MOST_PAIRS = 20
#: Pairs that say something.
LEAST_PAIRS = 4
#: By how much the median must win, the interval lying above 1 besides.
MARGIN = 0.01
#: An interval that lies above this ends a duel before all pairs have run.
EARLY = 1.04


@dataclass(frozen=True)
class Outcome:
    """How a duel ended. ``speedups`` are the champion's time over the challenger's, by pairs."""

    speedups: list[float]
    interval: Interval
    won: bool

    def text(self, champion: str) -> str:
        """In words, with the champion's name."""
        return f"{self.interval} times the speed of {champion} in {len(self.speedups)} pairs"


class Duel:
    """A ``challenger`` against a ``champion``, candidates by number."""

    def __init__(self, challenger: int, champion: int) -> None:
        self.challenger = challenger
        self.champion = champion
        self._scores: tuple[list[float], list[float]] = ([], [])

    def __contains__(self, candidate: int) -> bool:
        return candidate in (self.challenger, self.champion)

    @property
    def order(self) -> list[int]:
        """The candidates of the next four trials."""
        return [self.challenger, self.champion, self.champion, self.challenger]

    def add(self, trial: Trial) -> None:
        """One trial of either has run."""
        side = 0 if trial.candidate == self.challenger else 1
        self._scores[side].append(trial.score)

    @property
    def pairs(self) -> int:
        """How many pairs have run."""
        return min(map(len, self._scores))

    def so_far(self) -> Outcome | None:
        """How it ends where no more trials can run; ``None`` before there are enough pairs. Looked
        at once, a gain beyond doubt is one."""
        if self.pairs < LEAST_PAIRS:
            return None
        speedups = paired_ratios(self._scores[1], self._scores[0])
        interval = median_interval(speedups)
        won = interval.low > 1.0 and interval.median >= 1.0 + MARGIN
        return Outcome(speedups, interval, won)

    def outcome(self, *, final: bool, time: bool) -> Outcome | None:
        """How it ends; ``None`` where another four trials are to run first.

        ``final``: it is the last duel of a search. ``time``: there is time to look at a gain that
        is not beyond doubt for longer.
        """
        # >1: the challenger needs less time than the champion
        speedups = paired_ratios(self._scores[1], self._scores[0])
        interval = median_interval(speedups)
        promising = interval.median >= 1.0 + MARGIN
        longer = promising and (final or time)
        wanted = MOST_PAIRS if longer else FINAL_PAIRS if final else PAIRS
        # looking again and again finds a difference by chance: an early end takes a clear one
        enough = len(speedups) >= LEAST_PAIRS
        decided = enough and (interval.low > EARLY or interval.high < 1.0)
        hopeless = len(speedups) >= 2 and max(speedups) < 1.0 and interval.median < 0.95
        won = interval.low > 1.0 and promising
        decided = decided or (won and len(speedups) >= (FINAL_PAIRS if final else PAIRS))
        if len(speedups) < wanted and not decided and not hopeless:
            return None
        return Outcome(speedups, interval, won)
