"""Which schedule the next call runs: a fixed one, or the one that the chooser wants to see."""

from __future__ import annotations



from rose_compiler.api.options import Options
from rose_compiler.api.specialize import Specialization
from rose_compiler.base.decision import Decision
from rose_compiler.base.remarks import RemarkLog
from rose_compiler.runtime.support import Runtime


def default_decision(specialization: Specialization, options: Options) -> Decision:
    """The schedule that is right most often: two groups of shards, late work in the shadow."""
    shards = max((len(s) for s in specialization.shards().values()), default=1)
    return Decision(groups=min(2, shards), late="shadow")


class Tuning:
    """The schedules of one specialization. ``next`` answers ``None`` for the user's own statements."""

    def __init__(self, specialization: Specialization, options: Options, log: RemarkLog) -> None:
        self.specialization = specialization
        self.options = options
        self.best = options.decision or default_decision(specialization, options)

    @property
    def settled(self) -> bool:
        return True

    def next(self) -> Decision | None:
        return self.best

    def record(self, decision: Decision | None, seconds: float, runtime: Runtime) -> None:
        """Take note of one call."""

    def summary(self) -> str:
        return f"schedule {self.best}"

    def table(self) -> str:
        return ""


