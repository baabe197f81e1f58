"""Notices when iterations change their length for good: durations move as the policy learns.

The first iterations of a settled schedule say what to expect and how much it varies. After that a
two-sided cumulative sum (Page, "Continuous inspection schemes", 1954) of log times, in units of
that noise, tells a lasting change from chance; single slow iterations count for little.

Short iterations are taken together: what is looked at is the median of as many as last
:data:`LEAST_S`. A machine that is disturbed for a second disturbs hundreds of iterations of 2 ms,
which would pass for hundreds of witnesses of the same change.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field

#: Seconds of iterations that are looked at as one.
LEAST_S = 0.1
#: Seconds that a change has to last, to begin with.
LASTING_S = 2.5
#: Looks that say what to expect, and up to how many go on to refine it.
CALIBRATION, REFINED = 20, 100
#: Noise below this share is not trusted: machines vary by that much from hour to hour.
LEAST_NOISE = 0.02
#: Change, as a share, below which tuning anew is not worth its trials.
LEAST_CHANGE = 0.15
#: Deviations that one look counts for at most.
CLIP = 3.0
#: Deviations that are put down to chance each time, and the sum at which a change is certain. What
#: is normal is known from few iterations only, to about a quarter of a deviation, so the slack is
#: twice what the textbooks have for a change of one.
SLACK, CERTAIN = 1.0, 10.0
#: Looks, at least, whose median tells how large the change is.
RECENT = 7


@dataclass
class Drift:
    """Watches the seconds of a unit of work, iteration by iteration; :meth:`feed` says when to
    tune anew, and what is normal is learned again from there.

    ``lasting_s``: seconds of iterations, at least, whose median has to have changed.
    """

    lasting_s: float = LASTING_S
    _first: list[float] = field(default_factory=list)
    _expected: float | None = None
    _noise: float = LEAST_NOISE
    _up: float = 0.0
    _down: float = 0.0
    _recent: deque[tuple[float, float]] = field(default_factory=deque)  # log time, how long
    _open: list[float] = field(default_factory=list)
    _lasted: float = 0.0

    @property
    def expected_s(self) -> float | None:
        """The seconds that are taken for normal; ``None`` while that is learned."""
        return None if self._expected is None else math.exp(self._expected)

    @property
    def change(self) -> float:
        """By what share recent iterations take longer than expected; negative: less long."""
        if self._expected is None or not self._recent:
            return 0.0
        return math.exp(statistics.median(v for v, _ in self._recent) - self._expected) - 1.0

    def feed(self, seconds: float, lasted: float | None = None) -> bool:
        """Take note of an iteration; whether its like have changed for good.

        ``lasted`` is how long it took, where ``seconds`` is the time of a unit of its work. Raises
        ``ValueError`` for a time that is not above zero.
        """
        if not seconds > 0:
            raise ValueError(f"an iteration took {seconds} s")
        self._open.append(seconds)
        self._lasted += seconds if lasted is None else lasted
        if self._lasted < LEAST_S:
            return False
        value, lasted = math.log(statistics.median(self._open)), self._lasted
        self._open.clear()
        self._lasted = 0.0
        return self._look(value, lasted)

    def _look(self, value: float, lasted: float) -> bool:
        if len(self._first) < REFINED:
            self._first.append(value)
            calm = max(self._up, self._down) < CERTAIN / 2
            if len(self._first) % CALIBRATION == 0 and calm:
                self._calibrate()
        if self._expected is None:
            return False
        self._recent.append((value, lasted))
        while len(self._recent) > RECENT and self._recent_s - self._recent[0][1] >= self.lasting_s:
            self._recent.popleft()
        deviation = max(-CLIP, min(CLIP, (value - self._expected) / self._noise))
        self._up = max(0.0, self._up + deviation - SLACK)
        self._down = max(0.0, self._down - deviation - SLACK)
        if max(self._up, self._down) < CERTAIN or abs(self.change) < LEAST_CHANGE:
            return False
        if self._recent_s < self.lasting_s:
            return False
        self.reset()
        return True

    @property
    def _recent_s(self) -> float:
        return sum(lasted for _, lasted in self._recent)

    def reset(self) -> None:
        """Learn anew what is normal."""
        self._first.clear()
        self._recent.clear()
        self._open.clear()
        self._lasted = 0.0
        self._expected, self._up, self._down = None, 0.0, 0.0

    def _calibrate(self) -> None:
        middle = statistics.median(self._first)
        # 1.4826 makes the median absolute deviation of normal data their standard deviation
        spread = 1.4826 * statistics.median(abs(v - middle) for v in self._first)
        self._expected, self._noise = middle, max(spread, LEAST_NOISE)
