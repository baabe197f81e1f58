"""Which schedule the next iteration runs: a fixed one, or the one that the chooser wants to see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from rose_compiler.api.cache import Entry
from rose_compiler.api.followups import FollowUps
from rose_compiler.api.options import Options
from rose_compiler.api.progress import Progress
from rose_compiler.api.verdicts import PASS, Verdicts, remarks_of
from rose_compiler.api.work import WorkMeter
from rose_compiler.base import knobs
from rose_compiler.base.decision import Decision
from rose_compiler.base.errors import RoseError
from rose_compiler.base.quota import QuotaPlan
from rose_compiler.base.remarks import Blocker, Remark, RemarkLog
from rose_compiler.codegen.emit import Emitted
from rose_compiler.kernels.scan_native import Built
from rose_compiler.runtime.inductor import Note
from rose_compiler.tune.chooser import Chooser
from rose_compiler.tune.search import LeftOut, Proposal
from rose_compiler.tune.space import (
    candidates,
    default_decision,
    with_compiled,
    with_script,
    with_tiles,
)


class Tuning:
    """The schedules of one unit: which comes next, and what was found of each."""

    def __init__(
        self,
        options: Options,
        shards: int,
        asynchronous: bool,
        log: RemarkLog,
        eager: bool,
        fusable: bool = False,
        stored: Callable[[Sequence[Decision | None]], Entry | None] = lambda _: None,
        hosted: bool = False,
        overlap: Callable[[], bool] = lambda: False,
        streams: Callable[[], bool] = lambda: False,
        accumulate: Callable[[], bool] = lambda: False,
        copies: Callable[[], bool] = lambda: False,
        compilable: Callable[[], bool] = lambda: False,
        wrappers: bool = False,
        plans: dict[Decision, QuotaPlan] | None = None,
    ) -> None:
        self.options = options
        #: The quotas of schedules that have some, with what was predicted of them.
        self.plans = {} if plans is None else plans
        self.log = log
        self.seconds = 0.0
        self._work = WorkMeter()
        self.progress = Progress()
        self.verdicts = Verdicts(log)
        #: Whether windows say which schedules are tried; without, all are.
        self.by_windows = True
        self._chooser: Chooser | None = None
        # what quotas are compared within where no schedules are
        self._alone = Chooser([None], budget_s=options.tune_budget)
        self._entry: Entry | None = None
        self._iterations = 0
        self._adopted = False  # what is in force was not tried in this run
        self._was_compiling = False  # something was compiled while the last iteration ran
        self._edit = knobs.current().edit
        close = options.numerics == "close"
        fuse = fusable and close
        #: Program order with what every candidate has.
        self._plain = Decision(fuse=fuse, hosted=hosted, wrappers=wrappers)
        #: What meets the schedule that is settled on.
        self.follow_ups = FollowUps(self.verdicts, self._plain)
        #: What runs where nothing is tuned.
        self.default = options.decision or default_decision(
            shards, asynchronous, close, self._plain
        )
        if options.decision is not None or not options.tune or self._edit is not None:
            self._fixed = self.default
            return
        self._fixed = Decision()
        space = candidates(
            shards,
            close=close,
            threads=torch.get_num_threads(),
            asynchronous=asynchronous,
            eager=eager,
            fuse=fuse,
            hosted=hosted,
            overlap=overlap(),
            wrappers=wrappers,
            streams=streams(),
            accumulate=accumulate(),
            copies=copies(),
        )
        self._entry = stored(space)
        self.follow_ups.compilable = compilable
        self.follow_ups.close = close
        known = [*space, *(with_script(one, self._plain) for one in space)]
        if close:
            known += filter(None, [with_tiles(one, torch.get_num_threads()) for one in known])
            known += [with_compiled(one, self._plain) for one in known]
        kept = None if self._entry is None else self._entry.load(known)
        self._chooser = Chooser(space, budget_s=options.tune_budget)
        if kept is not None:
            self._adopted = True
            assert self._entry is not None
            if (decision := known[kept]) is not None and self._entry.plan is not None:
                self.plans[decision] = self._entry.plan
            self._chooser.adopt(known[kept], "an earlier run settled on it")

    def limit(self, iterations: int) -> None:
        """Let tuning take no more than its share of so many iterations; 0: it is not known."""
        self._iterations = iterations
        if iterations:
            self._budget.limit(iterations)

    def offer(self, decision: Decision, without_s: float, with_s: float) -> None:
        """Try a schedule with quotas too, of which these seconds an iteration are predicted."""
        assert self._chooser is not None
        self.verdicts.quotas[decision] = without_s, with_s
        self._chooser.offer(decision)

    @property
    def entry(self) -> Entry | None:
        """Where what is settled on is kept for later runs, if anywhere."""
        return self._entry

    @property
    def drifts(self) -> int:
        """How often iterations have changed their length for good since the first search."""
        return 0 if self._chooser is None else self._chooser.drifts

    def steady(self) -> None:
        """Learn anew how long iterations take: more than the schedule was changed on purpose."""
        if self._chooser is not None:
            self._chooser.steady()

    @property
    def _budget(self) -> Chooser:
        return self._chooser or self._alone

    def spend(self, seconds: float, iterations: int | None = 1) -> None:
        """What quotas are looked for with, beside the search, took of its budget: an iteration, or
        None, something else that lasted so long."""
        self._budget.spend(seconds, iterations)
        self.seconds += seconds

    def allows(self, seconds: float) -> bool:
        """Whether quotas may be looked for so many seconds more."""
        return self._budget.allows(seconds)

    def again(self) -> Decision | None:
        """The schedule that quotas are to be looked for once more, after a drift: what is settled
        on, without its own; the first candidate with components beside the rest, where that is the
        user's own statements or leaves them in line. ``None`` while a search is under way, or where
        its budget is spent."""
        chooser = self._chooser
        if chooser is None or not chooser.settled or not chooser.allows(0.0):
            return None
        kept = self.chosen
        if kept is not None and kept.hosted:
            return replace(kept, cores=())
        return next((c for c in chooser.candidates if c and c.hosted and not c.cores), None)

    def reconsider(self, decision: Decision, without_s: float, with_s: float) -> None:
        """Let what is settled on meet quotas that were planned anew; where they are the ones in
        force, the same schedule without them, which a drift may have made the better one."""
        assert self._chooser is not None
        self.verdicts.quotas[decision] = without_s, with_s
        other = replace(decision, cores=()) if decision == self.chosen else decision
        self._chooser.challenge(other)

    @property
    def beside(self) -> Decision | None:
        """The first candidate whose components in hosts run beside the rest, before any is tried;
        ``None`` where there is none, or the search is under way."""
        if self._chooser is None or self.settled or self._chooser.begun:
            return None
        return next((c for c in self._chooser.open if c is not None and c.hosted), None)

    @property
    def untried(self) -> list[Decision]:
        """What is tried beside what has to be beaten, before any is; nothing later."""
        if self._chooser is None or self.settled or self._chooser.begun:
            return []
        known = enumerate(self._chooser.candidates)
        return [c for k, c in known if c is not None and k != self._chooser.eager]

    def arrange(self, proposals: Sequence[Proposal], left_out: Sequence[LeftOut]) -> None:
        """Try schedules in this order, and tell why others are not tried."""
        assert self._chooser is not None
        whys = {one.decision: f"left out: {one.blocker.why}" for one in left_out}
        self._chooser.arrange([one.decision for one in proposals], whys)
        self.verdicts.aims.update((one.decision, str(one)) for one in proposals)
        for one in left_out:
            self.log.add(replace(Remark.from_blocker(PASS, one.blocker), gain=one.gain_s))

    def propose(self, decision: Decision) -> None:
        """Try one more schedule, before any is tried."""
        assert self._chooser is not None
        self._chooser.offer(decision)

    @property
    def plain(self) -> Decision | None:
        """The first candidate that leaves trips as they follow each other, before any is tried;
        ``None`` where there is none, or the search is under way."""
        if self._chooser is None or self.settled or self._chooser.begun:
            return None
        found = (c for c in self._chooser.candidates if c is not None and c != Decision())
        return next((c for c in found if not c.defer), None)

    @property
    def forecast(self) -> Callable[[Decision], float | None]:
        """Seconds that an iteration of a schedule should take, where that can be said."""
        return self.verdicts.forecast

    @property
    def trying(self) -> bool:
        """Whether a schedule that can't be built is dropped, and another one taken."""
        return self._adopted or not self.settled

    @property
    def tuned(self) -> bool:
        """Whether several schedules are tried."""
        return self._chooser is not None

    @property
    def settled(self) -> bool:
        """Whether every further iteration runs the same schedule."""
        return self._chooser is None or self._chooser.settled

    @property
    def over(self) -> bool:
        """Whether nothing more is to be tried, unless iterations change: a compiled form is tried
        only once a training has gone on for a while."""
        chooser = self._chooser
        return self.settled and (chooser is None or self.follow_ups.to_compile(chooser) is None)

    @property
    def chosen(self) -> Decision | None:
        """The schedule in force; ``None`` for the user's own statements."""
        if self._chooser is None:
            return self._fixed
        return self._chooser.candidates[self._chooser.best]

    @property
    def best(self) -> Decision:
        """The schedule in force; the program's own order for the user's own statements."""
        return self.chosen or Decision()

    def next(self) -> Decision | None:
        """The schedule of the next iteration; ``None`` for the user's own statements."""
        if self._chooser is None:
            return self._fixed
        if not self._chooser.settled:
            self._work.start()
        return self._chooser.candidates[self._chooser.current]

    def record(self, decision: Decision | None, seconds: float, iterations: int = 1) -> None:
        """Take note of one iteration, or of some of them together."""
        chooser = self._chooser
        if chooser is None:
            return
        searching = not chooser.settled
        # caches are cold and memory is new to an iteration that something was compiled in
        cold, self._was_compiling = self._was_compiling, False
        if self._work.stop() and not cold:
            chooser.record(chooser.candidates.index(decision), seconds, float(iterations))
        else:
            chooser.skip(seconds)
        if searching:
            self.seconds += seconds
            self.progress.show(chooser)
        if searching and chooser.settled:
            self.verdicts.remember(chooser)
            if self._entry is not None and not chooser.ended_early:
                plan = None if self.chosen is None else self.plans.get(self.chosen)
                self._entry.store(self.chosen, chooser.verdicts.get(chooser.best, ""), plan)
        self.follow_ups.next(chooser, self._adopted)

    def compiled(self, found: Sequence[Note | Built]) -> float:
        """Tell what was compiled while an iteration ran; the seconds that took, which are no part
        of the iteration's time. Recurrences are compiled beside it."""
        for remark in remarks_of(found):
            self.log.add(remark)
        notes = [note for note in found if isinstance(note, Note)]
        seconds = sum(note.seconds for note in notes)
        self._was_compiling = any(note.seconds for note in found)
        if notes:
            self.skip(seconds)
        return seconds

    def skip(self, seconds: float) -> None:
        """An iteration that is not compared with others took part of the budget."""
        if self._chooser is not None:
            self._chooser.skip(seconds)
            self.seconds += seconds

    def failed(self, decision: Decision | None, error: Exception) -> None:
        """A schedule could not be built, or its own code failed: it is not tried again."""
        chooser = self._chooser
        if chooser is None or not self.trying:
            return
        if self._adopted and self._entry is not None:
            self._entry.discard(f"[{decision}] failed")
        chooser = self._unadopted(chooser)
        said = str(error).split("\n")[0]
        why = said if isinstance(error, RoseError) else f"{type(error).__name__}: {said}"
        chooser.failed(chooser.candidates.index(decision), why)
        self.log.add(Remark("missed", PASS, (), "candidate-failed", f"[{decision}]: {why}"))

    def refused(self, decision: Decision | None, blocker: Blocker, by: str = "memory") -> None:
        """A schedule takes more than is allowed or there is: it is no candidate, and where it was
        to be the only one, program order is."""
        self.log.add(Remark.from_blocker(by, blocker))
        if self._chooser is None:
            self._fixed = Decision()
            return
        chooser = self._unadopted(self._chooser)
        chooser.failed(chooser.candidates.index(decision), f"left out: {blocker.why}")

    def _unadopted(self, chooser: Chooser) -> Chooser:
        """The search, begun if what is in force comes from an earlier run."""
        self._work.drop()
        if self._adopted:
            self._adopted = False
            chooser = self._chooser = Chooser(chooser.candidates, budget_s=self.options.tune_budget)
            self.limit(self._iterations)
        return chooser

    def interrupted(self) -> None:
        """An iteration did not get to its end: nothing that watched it stays switched on."""
        self._work.drop()
        self.progress.close()

    def raised(self, decision: Decision | None, error: Exception, emitted: Emitted | None) -> None:
        """An iteration ended in an exception, which goes on to the user: states have moved, so it
        can't be run again another way. Only if it comes from the emitted code, or memory ran out,
        is it held against the schedule."""
        self.interrupted()
        if emitted is None:
            return
        out_of_memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if out_of_memory or _innermost(error) == emitted.filename:
            self.failed(decision, error)

    def summary(self) -> str:
        """One line on what is in force and why."""
        if self._chooser is None:
            how = "as given" if self.options.decision is not None else "not tuned"
            if self._edit is not None and self.options.tune and self.options.decision is None:
                how = "not tuned, since ROSE_EDIT runs one piece of code"
            return f"schedule [{self._fixed}], {how}"
        name = "the user's own statements" if self.chosen is None else f"[{self.chosen}]"
        if not self._chooser.settled:
            return f"still {self._chooser.phase.value}; best so far: {name}"
        why = self._chooser.verdicts.get(self._chooser.best, "")
        return f"settled on {name} after {self.seconds:.1f} s of training: {why}"

    def table(self, width: int = 100) -> str:
        """What was tried, as text of at most ``width`` columns; empty when nothing was."""
        return "" if self._chooser is None else self.verdicts.table(self._chooser, width)


def _innermost(error: BaseException) -> str:
    """The file of the frame that an exception comes from."""
    tb = error.__traceback__
    while tb is not None and tb.tb_next is not None:
        tb = tb.tb_next
    return "" if tb is None else tb.tb_frame.f_code.co_filename
