"""Components that are started under a plan: one that an earlier run has saved, or made by hand.

What a process gets when it starts can't be given later to a component that has a state and can't
hand it over. Its next process starts with it. All components under one plan share what it rests on,
an MPS daemon of our own among that, which ends with the last of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from rose_compiler.base.errors import QuotaError
from rose_compiler.base.quota import BY_PROCESS, QuotaPlan
from rose_compiler.base.remarks import Blocker, Remark
from rose_compiler.runtime.quotas import Applied, QuotaBackend, all_backends

#: Who gives a process its variables: quotas of SMs and of cores keep theirs apart.
SMS, CORES = "sms", "cores"


class Planned:
    """A plan in force for the components that were started under it."""

    def __init__(self, plan: QuotaPlan, applied: Applied | None) -> None:
        self.plan = plan
        self._applied = applied
        self._users = 0

    @property
    def by(self) -> str:
        """Who gives the variables."""
        return SMS if self.plan.backend in BY_PROCESS else CORES

    def environment(self, lane: str) -> dict[str, str]:
        """The variables of the lane's process."""
        return (self._applied or self.plan).environment(lane)

    def started(self, lane: str, pid: int) -> None:
        """The lane's process runs. Cores are bound while schedules that want that are in force."""
        if self._applied is not None:
            self._applied.started(lane, pid)

    def check(self) -> None:
        """Raises ``QuotaError`` if what the plan rests on has gone."""
        if self._applied is not None:
            self._applied.check()

    def join(self) -> Self:
        """One more component."""
        self._users += 1
        return self

    def leave(self) -> None:
        """A component has ended; with the last one, so does what the plan rests on."""
        self._users -= 1
        if self._users:
            return
        for key in [key for key, one in _LIVE.items() if one is self]:
            del _LIVE[key]
        applied, self._applied = self._applied, None
        if applied is not None:
            with suppress(QuotaError, OSError):
                applied.close()


#: Plans that components of this process rest on, by what they say.
_LIVE: dict[str, Planned] = {}


def planned(
    source: str | os.PathLike[str] | QuotaPlan,
    lane: str,
    backends: Callable[[], Sequence[QuotaBackend]] = all_backends,
) -> tuple[Planned | None, list[Remark]]:
    """The plan, in force, that the component of a lane is to be started under; None where there is
    none for it, or the machine refuses it, which a remark says: then it starts without. Whoever is
    given one :meth:`leaves <Planned.leave>` it.

    ``source`` is a plan, or where ``QuotaPlan.save`` is to write it. Raises ``QuotaError``
    (``quota-file``) for a file that holds something else.
    """
    if not isinstance(source, QuotaPlan):
        path = Path(source).expanduser()
        if not path.exists():
            return None, [_without(lane, f"there is no plan at {path} yet")]
        source = QuotaPlan.load(path)
    plan = source
    if lane not in (lanes := [share.lane for share in plan.shares]):
        why = f"the plan is for {', '.join(lanes) or 'no lane'}"
        return None, [_without(lane, f"{why}; `name=` is that of the variable in the loop")]
    if plan.backend == "green-context":
        return None, [_without(lane, "green contexts belong to streams of this process")]
    key = repr(plan)
    if key not in _LIVE:
        applied: Applied | None = None
        if plan.backend in BY_PROCESS:
            backend = next(one for one in backends() if one.name == plan.backend)
            probe = backend.probe()
            if not probe.available:
                return None, [_without(lane, f"{plan.backend} is passed over: {probe.why}")]
            try:
                applied = backend.apply(plan)
            except QuotaError as error:
                what = f"the plan was refused: {error.what}"
                return None, [_without(lane, what, error.help)]
        _LIVE[key] = Planned(plan, applied)
    return _LIVE[key].join(), []


def _without(lane: str, why: str, allow: str | None = None) -> Remark:
    blocker = Blocker("not-available", f"{lane} starts without a quota: {why}", allow)
    return Remark.from_blocker("quota", blocker)
