"""Tables in Markdown, and which goals are held."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from bench.measure import Estimate
from bench.workloads.measuring import Row

TIMES = ("E0", "E1", "C", "H", "close", "bitwise")
RATIOS = (("E0", "close"), ("E1", "close"), ("C", "close"), ("H", "close"), ("E0", "bitwise"))
#: What DESIGN calls "0.98x of E0 and E1": the interval's upper end decides.
FLOOR = 0.98


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; the first column to the left, all others to the right."""
    lines = [f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}"]
    return "\n".join([*lines, *(f"| {' | '.join(cells)} |" for cells in rows)])


def times(rows: Sequence[Row]) -> str:
    """Milliseconds an iteration."""
    head = ["ms an iteration", *TIMES, "bound", "predicted", "tuning close, bitwise, s"]
    body = []
    for r in rows:
        cells = [_ms(r.median(name)) for name in TIMES]
        cells += [_ms(float(np.median(r.bound))), _predicted(r)]
        seconds = (r.tuned.get(n) for n in ("close", "bitwise"))
        body.append([r.name, *cells, ", ".join("-" if s is None else f"{s:.0f}" for s in seconds)])
    return markdown(head, body)


def _predicted(row: Row) -> str:
    """What was predicted, of how much that is, and how far off that makes it."""
    made = row.forecast
    if made is None:
        return "-"
    return f"{_ms(made.predicted)} of {_ms(made.measured)} ({made.error:.2f})"


def ratios(rows: Sequence[Row]) -> str:
    """Medians of paired ratios with 95% bootstrap intervals."""
    head = ["", *(f"{a} / {b}" for a, b in RATIOS), "E1 / bound", "room used, %"]
    body = []
    for r in rows:
        cells = [_show(r.ratio(a, b)) for a, b in RATIOS]
        used = r.room_used()
        room = "no room" if used is None else f"{used.median:.0f} [{used.low:.0f}, {used.high:.0f}]"
        body.append([r.name, *cells, str(r.room()), room])
    return markdown(head, body)


def geometric_mean(rows: Sequence[Row], slow: str = "E0", fast: str = "close") -> Estimate | None:
    """The geometric mean of the rows' medians of paired ratios; the interval resamples pairs, each
    row's own."""
    logs = [
        np.log(np.divide(r.scores[slow], r.scores[fast]))
        for r in rows
        if slow in r.scores and fast in r.scores
    ]
    if not logs:
        return None
    rng = np.random.default_rng(0)
    drawn = [np.median(x[rng.integers(0, len(x), (4000, len(x)))], axis=1) for x in logs]
    low, high = np.exp(np.percentile(np.mean(drawn, axis=0), [2.5, 97.5]))
    middle = np.exp(np.mean([np.median(x) for x in logs]))
    return Estimate(float(middle), float(low), float(high))


def goals(rows: Sequence[Row]) -> list[str]:
    """A line for each goal: held or missed, and by which rows."""
    mean = geometric_mean(rows)
    lines = []
    if mean is not None:
        lines.append(
            _goal(mean.median >= 1.5, "geometric mean of E0 / close at least 1.5", [str(mean)])
        )
    below = [
        f"{r.name} {slow} / {fast} {x}"
        for r in rows
        for slow, fast in (("E0", "close"), ("E1", "close"), ("E0", "bitwise"))
        if (x := r.ratio(slow, fast)) is not None and x.high < FLOOR
    ]
    lines.append(_goal(not below, f"every row at least {FLOOR}x of E0 and E1", below))
    behind = [
        f"{r.name} {slow} / close {x}"
        for r in rows
        for slow in ("C", "H")
        if (x := r.ratio(slow, "close")) is not None and x.high < 1.0
    ]
    lines.append(_goal(not behind, "1.0x of C and H within noise, or better", behind))
    short = [
        f"{r.name} {used.median:.0f}%"
        for r in rows
        if (used := r.room_used()) is not None and used.median < 70
    ]
    lines.append(_goal(not short, "70% of the room where E1 / bound is 1.1 or more", short))
    off = [
        f"{r.name} {r.forecast.error:.2f}"
        for r in rows
        if r.forecast is not None and not 0.9 <= r.forecast.error <= 1.1
    ]
    lines.append(_goal(not off, "predicted within 10% of measured", off))
    return lines


def details(row: Row) -> str:
    """What was chosen in each column, what is absent and why."""
    parts = [
        f"{row.name}: {row.about}; capacity {row.capacity}, critical path"
        f" {1e3 * row.critical_path:.0f} ms, work {_ms(row.median('work'))} ms"
    ]
    parts += [f"{name}: {what}" for name, what in row.chosen.items()]
    if "C" in row.tuned:
        parts.append(f"C compiled and chosen in {row.tuned['C']:.0f} s")
    parts += [f"no {name}: {why}" for name, why in row.absent.items()]
    parts += row.notes
    again = f" ({row.repeated} more were run again)" if row.repeated else ""
    parts.append(f"{row.noisy:.0%} of trials beside other load{again}, {row.took:.0f} s in all")
    return "; ".join(parts)


def _goal(held: bool, what: str, which: list[str]) -> str:
    return f"- {'held' if held else 'missed'}: {what}" + (f" ({'; '.join(which)})" if which else "")


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.0f}"


def _show(x: Estimate | None) -> str:
    return "-" if x is None else str(x)
