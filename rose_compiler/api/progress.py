"""How tuning goes on, on one line of the terminal; nothing where there is none."""

from __future__ import annotations

import sys
import weakref
from time import perf_counter
from typing import TextIO

from rich.console import Console
from rich.errors import LiveError
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as Bar

from rose_compiler.base import knobs
from rose_compiler.tune.chooser import Chooser

#: Seconds between two pictures of the line at least.
EVERY_S = 0.25


class Progress:
    """The line of one search. It is drawn between iterations, by the thread that trains: no thread
    of its own takes part in what is being timed."""

    def __init__(self, console: Console | None = None) -> None:
        self.name = ""
        self._console = console
        self._bar: Bar | None = None
        self._task: TaskID | None = None
        self._drawn = 0.0

    def show(self, chooser: Chooser) -> None:
        """Draw where the search is; take the line away when it is over."""
        if chooser.settled:
            self.close()
            return
        now = perf_counter()
        if now - self._drawn < EVERY_S:
            return
        self._drawn = now
        if self._bar is None and not self._begin():
            return
        assert self._bar is not None
        assert self._task is not None
        trials = sum(map(len, chooser.trials.values()))
        what = f"{chooser.phase.value}, {trials} trials of {len(chooser.candidates)} schedules"
        self._bar.update(self._task, completed=chooser.used, what=what, seconds=chooser.spent_s)
        self._bar.refresh()

    def _begin(self) -> bool:
        if self._console is None:
            if not _terminal(sys.stderr, sys.__stderr__):  # rich believes FORCE_COLOR
                return False
            self._console = Console(stderr=True)
        if not self._console.is_terminal or not knobs.current().progress:
            return False
        bar = Bar(
            TextColumn(f"tuning {self.name}: {{task.fields[what]}}", markup=False),
            BarColumn(20),
            TextColumn("{task.fields[seconds]:.0f} s"),
            console=self._console,
            transient=True,
            auto_refresh=False,
            # what is printed goes above the line, or where it always goes
            redirect_stdout=_terminal(sys.stdout, sys.__stdout__),
        )
        try:
            bar.start()
        except LiveError:  # a display of the user's own is on
            return False
        # whoever forgets about the training, or ends the program, gets the cursor back
        weakref.finalize(self, bar.stop)
        self._bar, self._task = bar, bar.add_task("", total=1.0, what="", seconds=0.0)
        return True

    def close(self) -> None:
        """Take the line away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _terminal(stream: TextIO | None, own: TextIO | None) -> bool:
    """Whether a standard stream is a terminal, and nothing that somebody has put in its place."""
    try:
        return stream is not None and stream is own and stream.isatty()
    except ValueError:  # it is closed
        return False
