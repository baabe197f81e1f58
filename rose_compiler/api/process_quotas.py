"""Quotas that a process gets when it starts, for components in hosts: changed between iterations.

Once a schedule is settled on and profiled, its plan of SMs is put into force, where the machine has
MPS: components that have no state, or can hand it over, go on in new processes, all moved together.
What iterations took before is compared with what they take then; where they are slower, all goes
back.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from rose_compiler.api.objects import hosted
from rose_compiler.base.errors import QuotaError
from rose_compiler.base.quota import BY_PROCESS, QuotaPlan
from rose_compiler.base.remarks import Blocker, Remark, RemarkLog
from rose_compiler.runtime.quotas import Applied, QuotaBackend, all_backends
from rose_compiler.runtime.quotas.moves import move

PASS = "quota"
#: Iterations, and their seconds, that are compared at least.
LEAST, LEAST_S = 8, 0.5


class ProcessQuotas:
    """The process quotas of one unit. ``available`` says whether there is a device to share."""

    def __init__(
        self,
        log: RemarkLog,
        available: Callable[[], bool] = torch.cuda.is_available,
        backends: Callable[[], Sequence[QuotaBackend]] = all_backends,
    ) -> None:
        self._log = log
        self._available = available
        self._backends = backends
        #: The plan in force, if any.
        self.plan: QuotaPlan | None = None
        #: The plan that not all could be moved to: for the next start.
        self.pending: QuotaPlan | None = None
        self._applied: Applied | None = None
        self._moved: dict[str, Any] = {}
        self._times: list[float] = []
        self._before: float | None = None
        self._done = False

    def boundary(
        self, objects: dict[str, Any], plan: Callable[[], QuotaPlan], profiled: bool
    ) -> None:
        """An iteration begins. ``profiled``: its schedule is settled on, and was profiled."""
        self._check()
        if self._done:
            return
        if not profiled:
            self._times.clear()
            return
        components = {f"host:{n}": h for n, h in hosted(objects).items() if h.hosts == "process"}
        if not components or not self._available():
            self._done = True
        elif self._enough():
            median, self._times = statistics.median(self._times), []
            if self._before is None:
                self._before = median
                self._change(components, plan())
            else:
                self._judge(median)

    def record(self, seconds: float) -> None:
        """An iteration of the schedule that is settled on took so long."""
        if not self._done:
            self._times.append(seconds)

    def release(self) -> None:
        """Take the quotas back: whoever was moved goes on in a process without them, before the
        daemon that they rest on ends."""
        moved, self._moved = self._moved, {}
        applied, self._applied = self._applied, None
        self.plan = None
        if moved:
            self._note(move(moved, {lane: {} for lane in moved}))
        if applied is not None:
            with suppress(QuotaError, OSError):
                applied.close()

    def _check(self) -> None:
        """Whether what quotas rest on is still there; training goes on without."""
        if self._applied is None:
            return
        try:
            self._applied.check()
        except QuotaError as error:
            applied, self._applied = self._applied, None
            with suppress(QuotaError, OSError):
                applied.close()
            self.plan, self._done = None, True
            why = f"quotas have gone: {error.what}"
            self._note([Remark.from_blocker(PASS, Blocker("not-available", why, error.help))])

    def _enough(self) -> bool:
        return len(self._times) >= LEAST and sum(self._times) >= LEAST_S

    def _change(self, components: dict[str, Any], plan: QuotaPlan) -> None:
        lanes = [share.lane for share in plan.shares if share.lane in components]
        backend = next((b for b in self._backends() if b.name == plan.backend), None)
        if plan.backend not in BY_PROCESS or not lanes or backend is None:
            self._done = True
            return
        try:
            self._applied = applied = backend.apply(plan)
        except QuotaError as error:
            self._done = True
            why = f"{backend.name} refused the plan: {error.what}"
            self._note([Remark.from_blocker(PASS, Blocker("not-available", why, error.help))])
            return
        environments = {lane: applied.environment(lane) for lane in lanes}
        pids = {lane: components[lane].pid for lane in lanes}
        missed = move({lane: components[lane] for lane in lanes}, environments, applied.started)
        self._note(missed)
        self._moved = {n: components[n] for n in lanes if components[n].pid != pids[n]}
        self.pending = plan if missed else None
        if self._moved:
            self.plan = plan
        else:
            self._done = True
            self.release()

    def _judge(self, after: float) -> None:
        assert self._before is not None
        self._done = True
        names = ", ".join(self._moved)
        if after <= self._before:
            why = f"{names} in processes with quotas of SMs: {1e3 * after:.3g} ms an iteration"
            gain = self._before - after
            self._note([Remark("applied", PASS, (), "moved", why, gain=gain)])
            return
        self.release()
        why = f"quotas of SMs for {names}: slower by {after / self._before - 1:.0%}, and taken back"
        self._note([Remark.from_blocker(PASS, Blocker("measured-slower", why))])

    def _note(self, remarks: Sequence[Remark]) -> None:
        self._log.extend(remarks)
