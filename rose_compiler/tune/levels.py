"""Which quotas to measure iterations under, so that a response rests on enough different ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rose_compiler.tune.slack import apportion, profile_quotas

#: Different quotas that a response is fitted from at least, where a lane can have as many.
LEAST = 3
#: Plans that iterations are profiled under, at most.
MOST = 5

Quotas = Mapping[str, int]


def to_measure(
    lanes: Sequence[str], chunks: int, known: Sequence[Quotas] = (), most: int = MOST
) -> list[dict[str, int]]:
    """Quotas in chunks to measure beside the ``known`` ones, ``most`` in all, until each lane was
    seen with :data:`LEAST` numbers of chunks, or with all that it can have."""
    wanted = min(LEAST, chunks - len(lanes) + 1)
    seen = {lane: {quotas[lane] for quotas in known if lane in quotas} for lane in lanes}
    options = profile_quotas(lanes, chunks, MOST)
    for lane in lanes:  # with few chunks to spare: all of them for one lane, then half
        most_of = dict.fromkeys(lanes, 0.0) | {lane: 1.0}
        half = dict.fromkeys(lanes, 1.0 / max(1, len(lanes) - 1)) | {lane: 1.0}
        options += [apportion(most_of, chunks), apportion(half, chunks)]
    found: list[dict[str, int]] = []

    def news(quotas: Quotas) -> int:
        return sum(len(seen[n]) < wanted and quotas[n] not in seen[n] for n in lanes)

    while len(known) + len(found) < most:
        best = max(options, key=news)
        if not news(best):
            break
        found.append(best)
        for lane in lanes:
            seen[lane].add(best[lane])
    return found


def too_few(measured: Sequence[Quotas], chunks: int) -> str:
    """Which lanes were seen with fewer than :data:`LEAST` numbers of chunks, and why that is all;
    empty where there are none."""
    lanes = dict.fromkeys(lane for quotas in measured for lane in quotas)
    counts = {n: len({quotas[n] for quotas in measured if n in quotas}) for n in lanes}
    short = [f"{lane} from {count}" for lane, count in counts.items() if count < LEAST]
    if not short:
        return ""
    can = max(0, chunks - len(lanes) + 1)
    why = f"there are {can}" if can < LEAST else f"{len(measured)} plans were measured"
    return f"responses of {', '.join(short)} different quotas: {why}"
