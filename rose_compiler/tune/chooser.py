"""Which schedule to keep: candidates tried in turn on real iterations, and eager when none wins.

A trial is as many consecutive iterations as last ``trial_s``. All candidates are seen once and the
hopeless ones dropped; the rest challenge the best in turn, pair by pair (``duel.py``). The last
champion meets eager the same way and stays only if it is faster beyond doubt. What was so much
slower in its first trial that noise can't be the reason is not compared at all (``screening.py``).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from enum import Enum

from rose_compiler.base.decision import Decision
from rose_compiler.tune import screening
from rose_compiler.tune.drift import Drift
from rose_compiler.tune.duel import LEAST_PAIRS, Duel
from rose_compiler.tune.stats import Report, Trial

#: Share of the budget after which candidates are compared with eager and no more with each other:
#: small differences between them must not take the time in which a large one would be found.
DUELS = 0.5
#: Share of a run of known length that tuning may take, and of a training so far.
SHARE = 0.1


class Phase(Enum):
    """Where the search is."""

    SCREEN = "screening"
    DUEL = "comparing"
    FINAL = "against eager"
    SETTLED = "settled"


class Chooser:
    """Drives the search, one iteration at a time.

    ``candidates`` are tried in order; ``None`` among them stands for the user's own statements and
    is the one that has to be beaten (the first candidate, when there is no ``None``). Ask
    :attr:`current` which candidate the next iteration runs, then tell :meth:`record` what it took.

    Args:
        candidates: the schedules, a handful.
        trial_s: seconds a trial lasts at least.
        budget_s: seconds of iterations after which the search ends with what it knows. A search
            that a drift begins anew may go on to :data:`SHARE` of all iterations so far.
        budget_trips: iterations after which it ends, for good.
    """

    def __init__(
        self,
        candidates: Sequence[Decision | None],
        *,
        trial_s: float = 0.5,
        budget_s: float = 120.0,
        budget_trips: int | None = None,
    ) -> None:
        if not candidates:
            raise ValueError("no candidates")
        self.candidates = list(candidates)
        self.eager = self.candidates.index(None) if None in self.candidates else 0
        self.trial_s = trial_s
        self.budget_s = budget_s
        self.budget_trips = budget_trips
        self.ended_early = False  # the budget ran out before the comparison was over
        self.spent_s = 0.0
        self.total_s = 0.0  # of all iterations, also of those that were no trials
        self.trips = 0
        self.phase = Phase.SCREEN
        self.best = self.eager
        self.verdicts: dict[int, str] = {}
        self.trials: dict[int, list[Trial]] = {i: [] for i in range(len(self.candidates))}
        self.against_eager: dict[int, list[float]] = {}
        self._dropped: set[int] = set()
        self._failed: set[int] = set()
        self._left_out: set[int] = set()
        self._queue: list[int] = list(range(len(self.candidates)))
        self._open: Trial | None = None
        self._duel: Duel | None = None
        self._challengers: list[int] = []
        self._drift = Drift()
        self._challenged = False  # the champion has been settled on before
        self._before: int | None = None  # what was in force when a drift began the search anew
        #: How often iterations have changed their length for good, since a schedule was settled on.
        self.drifts = 0
        if len(self.candidates) == 1:
            self._settle(self.eager, "the only schedule there is")

    # -- what to run ---------------------------------------------------------------------------

    @property
    def settled(self) -> bool:
        """Whether the search is over."""
        return self.phase is Phase.SETTLED

    @property
    def current(self) -> int:
        """The candidate of the next iteration."""
        if self.settled:
            return self.best
        return self._queue[0]

    @property
    def begun(self) -> bool:
        """Whether a candidate was seen, so that no other can join."""
        return self.phase is not Phase.SCREEN or any(self.trials.values())

    def offer(self, candidate: Decision) -> None:
        """One more candidate, while all are seen for the first time."""
        if self.begun:
            raise ValueError(f"the search is under way: {candidate} can't join it")
        self._queue.append(self._join(candidate))

    @property
    def open(self) -> list[Decision | None]:
        """The candidates that are neither left out nor hopeless."""
        return [one for c, one in enumerate(self.candidates) if c not in self._dropped]

    def arrange(self, order: Sequence[Decision], left_out: Mapping[Decision, str]) -> None:
        """Try what has to be beaten, then ``order``, then what is not named; leave others out, with
        the reasons why. Only while none was seen."""
        if self.begun:
            raise ValueError("the search is under way: its order stands")
        known = {one: c for c, one in enumerate(self.candidates)}
        for decision, why in left_out.items():
            self._left_out.add(known[decision])
            self.verdicts[known[decision]] = why
        self._dropped |= self._left_out
        first = [self.eager, *(known[one] for one in order)]
        rest = [c for c in self._queue if c not in first and c not in self._dropped]
        self._queue = [*first, *rest]

    def _join(self, candidate: Decision | None) -> int:
        """The place of one more candidate."""
        self.candidates.append(candidate)
        self.trials[len(self.candidates) - 1] = []
        return len(self.candidates) - 1

    @property
    def used(self) -> float:
        """The share of the budget that is spent, from 0 to 1."""
        shares = [self.spent_s / self.budget_s]
        if self.budget_trips is not None:
            shares.append(self.trips / self.budget_trips)
        return min(1.0, max(shares))

    # -- what it took --------------------------------------------------------------------------

    def record(self, candidate: int, seconds: float, work: float = 1.0) -> None:
        """One iteration of ``candidate`` took ``seconds`` for ``work`` units of work."""
        self.total_s += seconds
        if self.settled:
            self._watch(seconds / max(work, 1e-12), seconds)
            return
        self.spent_s += seconds
        self.trips += 1
        if self._open is None or self._open.candidate != candidate:
            self._open = Trial(candidate)
        self._open.seconds.append(seconds)
        self._open.work.append(work)
        if sum(self._open.seconds) >= self._trial_s():
            trial, self._open = self._open, None
            self._finished(trial)
        if not self.settled and self._out_of_time():
            self._end_early()

    def skip(self, seconds: float) -> None:
        """An iteration that can't be compared with others took ``seconds`` of the budget."""
        self.total_s += seconds
        if self.settled:
            return
        self.spent_s += seconds
        self.trips += 1
        if self._out_of_time():
            self._end_early()

    def spend(self, seconds: float, iterations: int | None = 1) -> None:
        """What is looked for beside the search took ``seconds`` of its budget, and so many
        iterations; None for what is no iteration, and counts as those that last as long."""
        if iterations is None:
            iterations = round(seconds * self.trips / self.spent_s) if self.spent_s else 0
        self.total_s += seconds
        self.spent_s += seconds
        self.trips += iterations

    def steady(self) -> None:
        """Learn anew what is normal: something else than the schedule was changed on purpose."""
        self._drift.reset()

    def allows(self, seconds: float) -> bool:
        """Whether the budget has room for so many seconds beside the iterations."""
        most = self._most_s()
        if self.budget_trips is not None and self.trips:
            most = min(most, self.budget_trips * self.spent_s / self.trips)
        return self.spent_s + seconds <= most

    def limit(self, trips: int) -> None:
        """The run has ``trips`` iterations: tuning takes at most :data:`SHARE` of them."""
        self.budget_trips = max(1, int(SHARE * trips))
        if not self.settled and self._over_budget():
            self._end_early()

    def _trial_s(self) -> float:
        """How long a trial lasts: shorter where a short run leaves no more to each candidate."""
        if self.budget_trips is None or not self.trips:
            return self.trial_s
        most = self.budget_trips * self.spent_s / self.trips
        return min(self.trial_s, most / (2 * len(self.open)))

    def adopt(self, decision: Decision | None, why: str) -> None:
        """Settle on a schedule at once, without trials; one that is no candidate becomes one."""
        known = decision in self.candidates
        self._settle(self.candidates.index(decision) if known else self._join(decision), why)

    def challenge(self, decision: Decision) -> None:
        """Let one more schedule, or one that was tried before, meet the one that is settled on,
        within what is left of the budget. Whichever wins is not compared with eager once more."""
        if not self.settled:
            raise ValueError("the search is not over")
        known = decision in self.candidates
        candidate = self.candidates.index(decision) if known else self._join(decision)
        if candidate == self.best or candidate in self._failed:
            return
        if self._over_budget():
            self.verdicts[candidate] = "the budget for tuning was spent"
            return
        self.phase = Phase.FINAL
        self._challenged = True
        self._open_duel(candidate, self.best)

    def failed(self, candidate: int, why: str) -> None:
        """``candidate`` can't be built or run: it is not tried again."""
        self._dropped.add(candidate)
        self._failed.add(candidate)
        self.verdicts[candidate] = why
        self._open = None
        self._queue = [c for c in self._queue if c != candidate]
        if self.best == candidate:
            self.best = self.eager
        if self._duel is not None and candidate in self._duel:
            self._duel = None
            self._queue = []
            if self._challenged:
                self._settle(self.best, self.verdicts.get(self.best, why))
        if not self._queue and not self.settled:
            self._advance()

    def _finished(self, trial: Trial) -> None:
        self.trials[trial.candidate].append(trial)
        self._queue.pop(0)
        if self._duel is not None:
            self._duel.add(trial)
            if not self._queue:
                self._judge()
            return
        if not self._queue:
            self._advance()

    def _advance(self) -> None:
        """The queue has run empty outside a duel: open the next one."""
        if self.phase is Phase.SCREEN:
            seen = {c: t[-1].score for c, t in self.trials.items() if t and c not in self._dropped}
            if not seen:
                self._settle(self.eager, "nothing else could be run")
                return
            hopeless = screening.hopeless(seen, self.eager)
            self._dropped |= hopeless.keys()
            self.verdicts |= hopeless
            self._challengers = sorted(
                (c for c in seen if c not in self._dropped and c != self.eager),
                key=seen.__getitem__,
            )
            self.best = self._challengers.pop(0) if self._challengers else self.eager
            self.phase = Phase.DUEL
        if self.phase is Phase.DUEL:
            slower = screening.beyond_chance(self.trials, self.best, self._challengers)
            self._challengers = [c for c in self._challengers if c not in slower]
            self.verdicts |= slower
            if self._challengers and self.used < DUELS:
                self._open_duel(self._challengers.pop(0), self.best)
                return
            for c in self._challengers:
                self.verdicts[c] = "slower in its first trial; the time to compare was over"
            self._challengers = []
            if self.best == self.eager:
                self._settle(self.eager, "nothing was faster")
                return
            self.phase = Phase.FINAL
            self._open_duel(self.best, self.eager)
            return
        self._settle(self.eager, "the schedule that was compared with it failed")

    def _open_duel(self, challenger: int, champion: int) -> None:
        self._duel = Duel(challenger, champion)
        self._queue = self._duel.order

    def _judge(self) -> None:
        """Enough of a duel has run to look at it."""
        assert self._duel is not None
        final = self.phase is Phase.FINAL
        found = self._duel.outcome(final=final, time=self.used < DUELS)
        if found is None:
            self._queue = self._duel.order
            return
        challenger, champion = self._duel.challenger, self._duel.champion
        if champion == self.eager:
            self.against_eager.setdefault(challenger, []).extend(found.speedups)
        self._duel = None
        text = found.text(self._name(champion))
        if not found.won:
            self.verdicts[challenger] = text
        if final:
            # what holds against a further schedule was kept for another reason
            kept = self.verdicts.get(champion, text) if self._challenged else text
            self._settle(*((challenger, text) if found.won else (champion, kept)))
            return
        if found.won:
            self.verdicts[champion] = f"{self._name(challenger)} is faster: {text}"
            self.best = challenger
        self._advance()

    # -- the end -------------------------------------------------------------------------------

    def _over_budget(self) -> bool:
        if self.budget_trips is not None and self.trips >= self.budget_trips:
            return True
        return self.spent_s >= self._most_s()

    def _out_of_time(self) -> bool:
        """Whether the search ends here. What Inductor took may leave nothing to see what came of
        it: a further schedule that met the champion in time is compared in a few pairs at least."""
        if self.budget_trips is not None and self.trips >= self.budget_trips:
            return True
        begun = self._challenged and self._duel is not None and self._duel.pairs < LEAST_PAIRS
        return self._over_budget() and not begun

    def _most_s(self) -> float:
        """Seconds of iterations that the search may take."""
        return max(self.budget_s, SHARE * self.total_s) if self.drifts else self.budget_s

    def _end_early(self) -> None:
        """The budget is spent: eager, unless the champion has clearly beaten it so far."""
        if self._challenged:
            found = None if self._duel is None else self._duel.so_far()
            kept, why = self.best, self.verdicts.get(self.best, "")
            if self._duel is not None and found is not None:
                text = found.text(self._name(self._duel.champion))
                self.verdicts[self._duel.challenger] = text
                if found.won:
                    kept, why = self._duel.challenger, text
            self._settle(kept, why)
            return
        seen = {c: statistics.median(t.score for t in ts) for c, ts in self.trials.items() if ts}
        champion = self.best
        if self.phase is Phase.SCREEN and seen:
            champion = min(seen, key=seen.__getitem__)
        clear = screening.clearly_faster(self.trials[champion], self.trials[self.eager])
        self._settle(champion if clear else self.eager, "the budget for tuning was spent")
        self.ended_early = True

    def _settle(self, best: int, why: str) -> None:
        self.best = best
        self.ended_early = False
        self.phase = Phase.SETTLED
        self.verdicts[best] = why
        self._queue, self._duel, self._open = [], None, None
        self._challenged = False
        self._drift.reset()
        if self._before is not None:
            # a change that changed nothing has to show for longer the next time
            self._drift.lasting_s *= 2.0 if self._before == best else 1.0
            self._before = None

    def _watch(self, score: float, seconds: float) -> None:
        """Notice when iterations change their length for good, and let the champion meet eager
        again, within the budget; where eager won, the best of the others."""
        if not self._drift.feed(score, seconds):
            return
        self.drifts += 1
        challenger = self.best
        if challenger == self.eager:
            last = {c: t[-1].score for c, t in self.trials.items() if t and c not in self._dropped}
            last.pop(self.eager, None)
            left_out = sorted(self._left_out - self._failed)  # by what no longer holds
            if not last and not left_out:
                return
            challenger = min(last, key=last.__getitem__) if last else left_out[0]
        self._before = self.best
        if self._over_budget():
            self._before = None
            return
        self.best = challenger
        self.phase = Phase.FINAL
        self._open_duel(challenger, self.eager)

    # -- looking inside ------------------------------------------------------------------------

    def _name(self, candidate: int) -> str:
        decision = self.candidates[candidate]
        return "eager" if decision is None else f"[{decision}]"

    def reports(self) -> list[Report]:
        """What was found, a row a candidate."""
        rows = []
        for index, decision in enumerate(self.candidates):
            trials = self.trials[index]
            left = f"undecided in {len(trials)} trials" if self.settled else ""
            verdict = self.verdicts.get(index, left if trials else "not tried")
            rows.append(Report.of(decision, trials, self.against_eager.get(index), verdict))
        return rows
