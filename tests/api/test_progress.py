"""The line that shows how tuning goes on: on a terminal only, and never left behind."""

from __future__ import annotations

import io
import sys

from rich.console import Console

from rose_compiler.api import progress
from rose_compiler.api.progress import Progress
from rose_compiler.base.decision import Decision
from rose_compiler.base.knobs import knobs
from rose_compiler.tune.chooser import Chooser


def searched(shown: Progress) -> None:
    """Run a search and show each of its iterations."""
    chooser = Chooser([None, Decision(groups=2), Decision(groups=4)], trial_s=0.0)
    while not chooser.settled:
        chooser.record(chooser.current, (0.3, 0.2, 0.25)[chooser.current])
        shown.show(chooser)


def terminal(on: bool = True) -> Console:
    return Console(file=io.StringIO(), force_terminal=on, width=100)


def test_a_terminal_is_told_and_cleared(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    console, out = terminal(), sys.stdout
    shown = Progress(console)
    shown.name = "ppo"
    searched(shown)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "tuning ppo: screening, 1 trials of 3 schedules" in text
    assert "against eager" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1, "the cursor is there again"
    assert sys.stdout is out


def test_elsewhere_nothing_is_written(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    for console, on in ((terminal(False), True), (terminal(), False)):
        with knobs(progress=on):
            searched(Progress(console))
        assert console.file.getvalue() == ""  # type: ignore[attr-defined]


def test_a_search_that_is_forgotten_leaves_no_line(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    console = terminal()
    for on, own in ((False, False), (True, False), (True, True), (False, True)):
        out, shown = sys.stdout, Progress(console)
        monkeypatch.setattr(out, "isatty", lambda on=on: on, raising=False)
        monkeypatch.setattr(sys, "__stdout__", out if own else None)
        shown.show(Chooser([None, Decision(groups=2)]))
        told = "what is printed meanwhile goes above the line, or to a file or to the user's own"
        assert (sys.stdout is not out) == (on and own), told
        del shown
        assert sys.stdout is out
