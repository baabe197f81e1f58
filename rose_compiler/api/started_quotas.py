"""Components that were started under a plan of SMs: it is in force for as long as they live.

``hosted(..., environment=plan)`` starts them so, since they have a state that they can't hand over.
So nothing is compared here, and nobody is moved; when iterations have changed for good, the plan
that follows is one for the next start.
"""

from __future__ import annotations

from typing import Any

from rose_compiler.api.objects import in_processes
from rose_compiler.api.profiling import Profiling
from rose_compiler.api.quota_trial import units
from rose_compiler.api.quotas import plan_quotas
from rose_compiler.api.tuning import Tuning
from rose_compiler.base.errors import QuotaError
from rose_compiler.base.quota import BY_PROCESS, QuotaPlan
from rose_compiler.base.remarks import Blocker, Remark, RemarkLog
from rose_compiler.runtime.hosts.moving import starts_with
from rose_compiler.runtime.quotas.moves import waits
from rose_compiler.runtime.quotas.planned import SMS, Planned

PASS = "quota"


class StartedQuotas:
    """The plan that components of one unit were started under, if any."""

    def __init__(self, log: RemarkLog) -> None:
        self._log = log
        #: The plan in force, if any, and one for the next start.
        self.plan: QuotaPlan | None = None
        self.pending: QuotaPlan | None = None
        self._under: Planned | None = None
        self._drifts = 0
        self._due = False  # a plan for the next start, once the schedule is profiled anew

    def between(
        self, objects: dict[str, Any], tuning: Tuning, profiling: Profiling, backend: str
    ) -> bool:
        """An iteration begins; whether any component was started under a plan."""
        found = {lane: one for lane, one in in_processes(objects).items() if _sms(one)}
        if not found:
            return False
        under: Planned = next(iter(found.values())).rose_planned
        if under is not self._under:
            self._under, self.plan, self.pending = under, under.plan, None
            what = f"{', '.join(found)} started with quotas of SMs ({_text(under.plan)})"
            self._log.add(Remark("applied", PASS, (), "moved", what))
        if self.plan is not None:
            self._check(under, found)
        if tuning.drifts != self._drifts:
            self._drifts, self._due = tuning.drifts, True
            profiling.anew()
        elif self._due and tuning.settled and not profiling.pending(tuning.best):
            self._due = False
            if profiling.latest is not None:
                made = plan_quotas(profiling.last.profile, backend, than=self.plan)
                self._replanned(made, ", ".join(found))
        return True

    def _check(self, under: Planned, found: dict[str, Any]) -> None:
        """Whether what the plan rests on is still there; training goes on without."""
        try:
            under.check()
        except QuotaError as error:
            self.plan = None
            for component in found.values():  # a process that takes over has no quota
                starts_with(component, {}, SMS)
            blocker = Blocker("not-available", f"quotas have gone: {error.what}", error.help)
            self._log.add(Remark.from_blocker(PASS, blocker))

    def _replanned(self, made: QuotaPlan, lanes: str) -> None:
        if not made.shares or made.backend not in BY_PROCESS:
            return
        if self.plan is not None and units(made) == units(self.plan):
            why = "quotas of SMs planned anew are those in force"
            self._log.add(Remark("note", PASS, (), "replanned", why))
            return
        self.pending = made
        self._log.add(Remark.from_blocker(PASS, waits(lanes)))


def _sms(component: Any) -> bool:
    under = getattr(component, "rose_planned", None)
    return under is not None and under.by == SMS


def _text(plan: QuotaPlan) -> str:
    return ", ".join(f"{share.lane} {share.units}" for share in plan.shares)
