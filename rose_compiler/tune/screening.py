"""What the first trials of candidates say, before any two are compared pair by pair."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

from rose_compiler.tune.stats import Trial, noise_of

#: Candidates this much slower than the best one in their first trial are not tried again.
HOPELESS = 1.4
#: Standard deviations by which a first trial may be the slower one by chance.
CHANCE = 2.0


def hopeless(scores: Mapping[int, float], eager: int) -> dict[int, str]:
    """The candidates whose first trial was so slow that no second is worth while, and why; never
    ``eager``."""
    fastest = min(scores.values())
    return {
        c: f"slower by {score / fastest - 1:.0%} in its first trial"
        for c, score in scores.items()
        if score > HOPELESS * fastest and c != eager
    }


def beyond_chance(
    trials: Mapping[int, Sequence[Trial]], best: int, candidates: Iterable[int]
) -> dict[int, str]:
    """The candidates from which no gain is to be expected, and why: their first trials were slower
    than that of ``best`` by more than trials vary. None while that is not known."""
    noise = noise_of(trials.values())
    if noise is None:
        return {}
    first = trials[best][0].score
    # two trials are compared, each as noisy as the other
    most = math.exp(CHANCE * math.sqrt(2.0) * noise)
    found = {}
    for c in candidates:
        ratio = trials[c][0].score / first
        if ratio > most:
            found[c] = (
                f"no gain to be expected: slower by {ratio - 1:.0%} in its first trial, trials "
                f"of one schedule differ by {noise:.0%}"
            )
    return found


def clearly_faster(champion: Sequence[Trial], eager: Sequence[Trial]) -> bool:
    """Whether trials that were not run side by side leave no doubt that one is the faster."""
    trials = min(len(champion), len(eager))
    if trials == 0:
        return False
    scores = [statistics.median(t.score for t in side) for side in (champion, eager)]
    return scores[1] / scores[0] > (1.1 if trials > 2 else 1.5)
