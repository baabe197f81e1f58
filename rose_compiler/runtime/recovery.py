"""Behind a fault, finishes what comes before it in program order and was still to be issued.

The emitted function has been left by then. Its variables are in its frame, and the fault map has
the lines of each scheduled body, so that these can be run once more for the trips that are due.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from rose_compiler.base.faultmap import Body, FaultMap, Issue
from rose_compiler.runtime.faults import Verdict

#: What the lines that are run once more go by in tracebacks.
PLACE = "<rose: work of before the fault>"


class _NotReady(Exception):
    """A line needs a value that is not there."""


def _raised_in(error: BaseException, filename: str) -> bool:
    tb = error.__traceback__
    while tb is not None and tb.tb_next is not None:
        tb = tb.tb_next
    return tb is not None and tb.tb_frame.f_code.co_filename == filename


class Finisher:
    """Finishes earlier operations; ``finished`` counts by site what was done."""

    def __init__(self, verdict: Verdict, faults: FaultMap) -> None:
        self.verdict, self.faults = verdict, faults
        self.finished: Counter[int] = Counter()
        frame = verdict.at.frame
        self._globals: dict[str, Any] = frame.f_globals
        self._variables: dict[str, Any] = dict(frame.f_locals)

    def run(self) -> Verdict:
        """Run what is due, outermost body first. An exception on the way is the one to report: in
        eager order it would have come first."""
        for depth in range(len(self.verdict.key)):
            level = self.verdict.at.levels[depth]
            body = self.faults.bodies[self.faults.sites[level.site].body]
            try:
                earlier = self._finish(depth, body)
            except _NotReady:
                break
            if earlier is not None:
                return earlier
        return self.verdict

    def _finish(self, depth: int, body: Body) -> Verdict | None:
        at, whole = self.verdict.at, self.verdict.at.whole[depth]
        begun = at.trip[depth] if whole is None else whole - 1
        for trip in range(at.trip[depth], at.trip[depth] + body.depth + 1):
            for issue in body.issues:
                if trip == at.trip[depth] and issue.order <= at.levels[depth].order:
                    continue  # was issued
                mine = trip - issue.stage
                if not 0 <= mine <= begun or not self._due(depth, issue, mine):
                    continue
                error = self._execute(issue)
                if error is not None and issue.site >= 0:
                    place = (mine, self.faults.sites[issue.site].position)
                    return Verdict(error, (*self.verdict.key[:depth], place), at)
            if body.trips:
                self._variables[body.trips] = trip
                self._move(body.end)
                self._variables[body.trips] = trip + 1
        return None

    def _due(self, depth: int, issue: Issue, trip: int) -> bool:
        if issue.site < 0:
            return True
        return (trip, self.faults.sites[issue.site].position) < self.verdict.key[depth]

    def _execute(self, issue: Issue) -> Exception | None:
        try:
            exec(compile(issue.text, PLACE, "exec"), self._globals, self._variables)
        except NameError as error:
            if _raised_in(error, PLACE):
                raise _NotReady from None
            return error
        except Exception as error:
            return error
        if issue.site >= 0:
            site = self.faults.sites[issue.site]
            self.finished[issue.site] += (issue.stage, issue.order) == (site.stage, site.order)
        return None

    def _move(self, text: str) -> None:
        """Hand values on to the next trip; some of them are of trips that are not due."""
        statements: list[list[str]] = []
        for line in text.splitlines():
            if line.startswith(" ") and statements:
                statements[-1].append(line)
            else:
                statements.append([line])
        for lines in statements:
            try:
                exec("\n".join(lines), self._globals, self._variables)
            except NameError:
                continue
