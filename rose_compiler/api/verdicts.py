"""What is told of the schedules of one unit: remarks with what was predicted and measured, tables.

Each schedule that was tried leaves one remark: what it was predicted to take and to gain, and what
it was measured to take, to gain or to lose; or why one of the two can't be said.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence

from rose_compiler.base.decision import Decision
from rose_compiler.base.remarks import Remark, RemarkLog
from rose_compiler.kernels.scan_native import Built
from rose_compiler.runtime.inductor import Note
from rose_compiler.tune.chooser import Chooser
from rose_compiler.tune.forecasts import forecast_of, off
from rose_compiler.tune.stats import Report

PASS = "tune"


class Verdicts:
    """Tells what was found of the schedules of one unit; remarks go to ``log``.

    ``aims`` has what each schedule was meant for, in words, ``quotas`` the seconds of an iteration
    that were predicted of one with core quotas, without and with them.
    """

    def __init__(self, log: RemarkLog) -> None:
        self._log = log
        #: Seconds that an iteration of a schedule should take, where that can be said.
        self.forecast: Callable[[Decision], float | None] = lambda _: None
        self.aims: dict[Decision, str] = {}
        self.quotas: dict[Decision, tuple[float, float]] = {}
        self._told: dict[Decision, str] = {}  # the verdicts that remarks have been left of

    def remember(self, chooser: Chooser) -> None:
        """Remarks on the schedule that was kept and on those that were not, with what was gained
        or lost by each, measured and predicted, in seconds an iteration."""
        rows = chooser.reports()
        before, kept = rows[chooser.eager], rows[chooser.best]
        if kept is not before:
            gain = _difference(before, kept)
            why = f"[{kept.decision}] is kept: {kept.verdict}"
            why += f"{self._predicted(kept, rows, before)}{_measured(kept, before)}"
            self._log.add(Remark("applied", PASS, (), "tune", why, gain=gain))
        for row in rows:
            if row.decision is None or row is kept or not row.trials:
                continue
            if self._told.get(row.decision) == row.verdict:
                continue
            self._told[row.decision] = row.verdict
            why = f"[{row.decision}]: {row.verdict}"
            why += f"{self._predicted(row, rows, before)}{_measured(row, kept)}"
            gain = _difference(kept, row)
            self._log.add(Remark("missed", PASS, (), "measured-slower", why, gain=gain))

    def _predicted(self, row: Report, rows: Sequence[Report], eager: Report) -> str:
        """What a schedule was predicted to gain over program order, or by its quotas."""
        decision = row.decision
        if decision is not None and decision in self.quotas:
            without, expected = (1e3 * s for s in self.quotas[decision])
            return (
                f"; predicted {expected:.3g} ms an iteration with these cores, "
                f"{expected - without:+.3g} ms over threads that nobody bounds"
            )
        base, before = self.forecast(Decision()), eager.seconds_per_work
        seconds = None if decision is None else self.forecast(decision)
        if base is None or before is None or seconds is None:
            return "; nothing was predicted, for want of a profile or a trial of program order"
        if off(base, before):
            return (
                "; nothing can be predicted over program order: the iteration that was profiled "
                f"adds up to {1e3 * base:.3g} ms, those measured later took {1e3 * before:.3g} ms"
            )
        errors = [
            found.error(other.seconds_per_work)
            for other in rows
            if other is not row and other.decision is not None and other.seconds_per_work
            if (ahead := self.forecast(other.decision)) is not None
            if (found := forecast_of(ahead, base, before)) is not None
        ]
        made = forecast_of(seconds, base, before, errors)
        if made is None:
            return "; nothing can be predicted of it"
        low, middle, high = (1e3 * s for s in (made.low, made.seconds, made.high))
        return (
            f"; predicted {middle:.3g} ms an iteration ({low:.3g} to {high:.3g}), "
            f"{middle - 1e3 * before:+.3g} ms over program order"
        )

    def table(self, chooser: Chooser, width: int = 100) -> str:
        """What was tried, as text of at most ``width`` columns."""
        rows = chooser.reports()
        names = ["eager" if row.decision is None else str(row.decision) for row in rows]
        room = min(max(map(len, (*names, "schedule"))), max(width - 24, 20))
        lines = [f"  {'schedule':<{room}} {'trials':>6}  s/iteration"]
        for index, (row, name) in enumerate(zip(rows, names, strict=True)):
            score = "-" if row.seconds_per_work is None else f"{row.seconds_per_work:.4f}"
            mark = "*" if chooser.settled and index == chooser.best else " "
            first, *more = textwrap.wrap(name, room, break_long_words=False)
            lines.append(f"{mark} {first:<{room}} {row.trials:>6} {score:>12}")
            lines += [f"  {text}" for text in more]
            aim = None if row.decision is None else self.aims.get(row.decision)
            for text in (row.verdict, aim):
                if text:
                    lines += textwrap.wrap(
                        text, width, initial_indent="      ", subsequent_indent="      "
                    )
        return "\n".join(lines)


def _measured(row: Report, other: Report) -> str:
    """What an iteration was measured to take, beside one of another schedule."""
    if row.seconds_per_work is None or other.seconds_per_work is None:
        return "; too few trials to say what it takes"
    mine, theirs = 1e3 * row.seconds_per_work, 1e3 * other.seconds_per_work
    name = "the loop as written" if other.decision is None else f"[{other.decision}]"
    return f"; measured {mine:.4g} ms, {mine - theirs:+.3g} ms over the {theirs:.4g} of {name}"


def _difference(slow: Report, fast: Report) -> float | None:
    """How much less an iteration of the second takes than one of the first, in seconds."""
    if slow.seconds_per_work is None or fast.seconds_per_work is None:
        return None
    return slow.seconds_per_work - fast.seconds_per_work


def remarks_of(found: Sequence[Note | Built]) -> list[Remark]:
    """What became of compiling losses, graphs and recurrences: those of recurrences first."""
    built = [_scan(one) for one in found if isinstance(one, Built)]
    return [*built, *(_inductor(one) for one in found if isinstance(one, Note))]


_HOW = {
    "inductor": "compiled by Inductor",
    "script": "made one call of TorchScript",
    "tiles": "computed in tiles of its rows",
    "cuda-graph": "captured as a CUDA graph",
}


def _inductor(note: Note) -> Remark:
    if note.why:
        what = "as a CUDA graph, " if note.kind == "cuda-graph" else ""
        why = f"{note.name}, {what}{note.seconds:.1f} s: {note.why}"
        code = "not-available"
        if "differ" in note.why:
            code = "probe-bits-differ" if "bits differ" in note.why else "probe-values-differ"
        return Remark("missed", "fuse", (), code, why)
    why = f"{note.name} {_HOW[note.kind]} in {note.seconds:.1f} s" + (
        f": {note.gain}" if note.gain else ""
    )
    return Remark("note", "fuse", (), note.kind, why)


def _scan(built: Built) -> Remark:
    if built.why:
        code = "probe-bits-differ" if "differs" in built.why else "not-available"
        return Remark("missed", "scan", (), code, f"{built.name} stays on numpy: {built.why}")
    how = f"compiled to C in {built.seconds:.1f} s, beside the training"
    if not built.seconds:
        how = "taken in C from what an earlier run has compiled"
    return Remark("note", "scan", (), "native-scan", f"{built.name} {how}")
