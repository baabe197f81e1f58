"""How far a forecast can be trusted: scaled to what was measured, with an interval, or not at all.

A forecast adds up one profiled iteration in program order. Machines change their speed from minute
to minute, so what it is worth is the *ratio* of two sums over that profile; times what program
order was measured to take, it is a time. Where the profiled iteration itself took something else
than those measured later, a disturbance is in it somewhere, and nothing follows from it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

#: By what share a profiled iteration and those measured later may differ.
TRUSTED = 0.25
#: What a forecast is off by, as a share, as long as none was held against a measurement.
USUAL_ERROR = 0.25
#: Errors below this share are not believed to last.
LEAST_ERROR = 0.1


@dataclass(frozen=True)
class Forecast:
    """Seconds of an iteration, between ``low`` and ``high``."""

    seconds: float
    low: float
    high: float

    def error(self, measured_s: float) -> float:
        """The log of the measured time over the forecast."""
        return math.log(measured_s / self.seconds)


def off(base_s: float, measured_s: float) -> bool:
    """Whether a profile that adds up to ``base_s`` does not stand for iterations that take
    ``measured_s``."""
    return abs(math.log(base_s / measured_s)) > math.log(1.0 + TRUSTED)


def forecast_of(
    seconds: float, base_s: float, measured_s: float, errors: Sequence[float] = ()
) -> Forecast | None:
    """A forecast in units of what was measured; ``None`` where nothing follows from the profile.

    Args:
        seconds: the schedule, added up over the profile of program order.
        base_s: program order, added up over the same.
        measured_s: what program order, or the loop as written, was measured to take later.
        errors: of other forecasts from the same profile, as :meth:`Forecast.error` has them.
    """
    if min(seconds, base_s, measured_s) <= 0 or off(base_s, measured_s):
        return None
    wide = math.log(1.0 + USUAL_ERROR)
    if errors:
        wide = math.sqrt(sum(e * e for e in errors) / len(errors))
    wide = max(wide, math.log(1.0 + LEAST_ERROR))
    middle = measured_s * seconds / base_s
    return Forecast(middle, middle * math.exp(-wide), middle * math.exp(wide))
