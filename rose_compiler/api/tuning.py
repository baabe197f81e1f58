"""Which schedule the next iteration runs: a fixed one, or the one that the chooser wants to see."""

from __future__ import annotations

from rose_compiler.api.options import Options
from rose_compiler.base.decision import Decision
from rose_compiler.base.remarks import RemarkLog


def default_decision(shards: int) -> Decision:
    """The schedule that is right most often: two groups of shards, late work in the shadow."""
    return Decision(groups=min(2, shards), late="shadow")


class Tuning:
    """The schedules of one unit."""

    def __init__(self, options: Options, shards: int, log: RemarkLog) -> None:
        self.options = options
        self.log = log
        self.best = options.decision or default_decision(shards)

    @property
    def settled(self) -> bool:
        """Whether every further iteration runs :attr:`best`."""
        return True

    def next(self, eager: bool) -> Decision | None:
        """The schedule of the next iteration; ``None`` for the user's own statements, if ``eager``
        says that they can be run."""
        return self.best

    def record(self, decision: Decision | None, seconds: float) -> None:
        """Take note of one iteration."""

    def summary(self) -> str:
        """One line on what is in force and why."""
        return f"schedule {self.best}"

    def table(self) -> str:
        """What was tried, as text; empty when nothing was."""
        return ""
