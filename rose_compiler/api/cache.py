"""Schedules that tuning settled on, kept on disk, so that a later run starts with them.

One small JSON file an entry, named after a digest of all that the decision hangs on: the program as
captured, the make of its arguments, what was asked of ``compile``, the machine, and versions. Files
are private to the user and replaced in one piece. What can't be read, or somebody else could have
written, is deleted or left alone, and a remark says so.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import rose_compiler
from rose_compiler.api.tracing import write_whole
from rose_compiler.base import knobs
from rose_compiler.base.decision import Decision
from rose_compiler.base.errors import RoseError
from rose_compiler.base.knobs import Settings
from rose_compiler.base.quota import BY_PROCESS, Backend, QuotaPlan
from rose_compiler.base.remarks import Remark, RemarkLog

PASS = "cache"
_FORMAT = 1
_LIMIT = 64 * 1024  # bytes; an entry has some hundred
#: Plans of SMs that are kept with a schedule, and what each may be had by: in force for components
#: in processes, waiting until these start anew, in force for streams.
SMS: dict[str, tuple[Backend, ...]] = {
    "processes": BY_PROCESS,
    "pending": BY_PROCESS,
    "streams": ("green-context",),
}


def folder(settings: Settings) -> Path | None:
    """Where entries lie: as ``ROSE_CACHE`` says, or the user's cache folder; ``None`` where
    nothing is to be kept, or some passes only are run."""
    bisecting = settings.passes or settings.fuel is not None or settings.edit is not None
    if settings.cache == knobs.OFF or bisecting or settings.interp or settings.serial:
        return None
    if settings.cache != knobs.AUTO:
        return Path(settings.cache).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
    try:
        return Path(base).expanduser() / "rose_compiler"
    except RuntimeError:  # a user without a home, as in some containers, keeps nothing
        return None


def machine() -> dict[str, Any]:
    """What a decision hangs on of this machine and its software."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpus = []
    if torch.cuda.is_available():
        gpus = [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())]
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": usable,
        "threads": torch.get_num_threads(),
        "gpus": gpus,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "rose_compiler": rose_compiler.__version__,
    }


class Entry:
    """The place of one unit's decision. ``about`` is all that it hangs on, as plain data."""

    def __init__(self, where: Path, name: str, about: Mapping[str, Any], log: RemarkLog) -> None:
        text = json.dumps({**about, "machine": machine()}, sort_keys=True, default=str)
        self.key = hashlib.sha256(text.encode()).hexdigest()
        plain = re.sub(r"\W+", "_", name)[:40]
        self.path = where / f"{plain}-{self.key[:24]}.json"
        self._log = log
        #: The quotas of the schedule that was loaded, with what was predicted of them.
        self.plan: QuotaPlan | None = None
        #: The plans of SMs that are kept with it, by what :data:`SMS` calls them.
        self.sms: dict[str, QuotaPlan] = {}
        self._data: dict[str, Any] | None = None  # what lies on disk, plans of SMs apart

    def load(self, candidates: list[Decision | None]) -> int | None:
        """Which candidate an earlier run settled on; ``None`` where there is none to be trusted.

        One with quotas, or with pipelined loops, is appended to the candidates.
        """
        try:
            with open(self.path, "rb") as file:
                status = os.fstat(file.fileno())
                if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                    self._say("others may have written it, so it is left alone")
                    return None
                data = file.read(_LIMIT)
            found = json.loads(data)
            if found["format"] != _FORMAT or found["key"] != self.key:
                raise ValueError("it belongs to something else")
            kept = found["decision"]
            decision = None if kept is None else Decision.from_dict(kept)
            plain = decision and replace(decision, cores=(), pipeline=(), cuda_graphs=False)
            if decision != plain and plain in candidates:
                candidates.append(decision)  # they are made from what was measured in that run
            index, quotas = candidates.index(decision), found.get("quotas")
            self.plan = None if quotas is None else _checked(quotas, decision)
            self.sms = _plans(found.pop("sms", {}))
            self._data = found
            return index
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError, RoseError) as error:
            said = str(error).split("\n")[0]
            self.discard(f"it can't be used ({type(error).__name__}: {said})")
            return None

    def store(self, decision: Decision | None, verdict: str, plan: QuotaPlan | None = None) -> None:
        """Keep what tuning settled on, and the plan that its quotas come from; a remark where that
        is not possible."""
        data: dict[str, Any] = {
            "format": _FORMAT,
            "key": self.key,
            "decision": None if decision is None else decision.to_dict(),
            "verdict": verdict,
        }
        if plan is not None:
            data["quotas"] = plan.to_dict()
        data = json.loads(json.dumps(data))  # as it is read again
        if self._data is None or self._data["decision"] != data["decision"]:
            self.sms = {}  # another schedule's
        self._data = data
        self._write()

    def keep(self, kind: str, plan: QuotaPlan | None) -> None:
        """Keep a plan of SMs with the schedule that is kept, if one is; None: there is none."""
        if plan == self.sms.get(kind):
            return
        self.sms = {name: one for name, one in self.sms.items() if name != kind}
        if plan is not None:
            self.sms[kind] = plan
        if self._data is not None:
            self._write()

    def forget(self, kind: str, why: str) -> None:
        """Delete a plan of SMs, with a remark."""
        self.keep(kind, None)
        self._say(f"the plan of SMs for {kind} {why}; it is deleted")

    def _write(self) -> None:
        assert self._data is not None
        data = dict(self._data)
        if self.sms:
            data["sms"] = {kind: plan.to_dict() for kind, plan in self.sms.items()}
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_whole(self.path, json.dumps(data, indent=1) + "\n")
        except OSError as error:
            self._say(f"the schedule could not be kept: {error}")

    def discard(self, why: str) -> None:
        """Delete the entry, with a remark."""
        self._data, self.sms = None, {}
        with suppress(OSError):
            self.path.unlink()
        self._say(f"{why}; it is deleted, and tuning begins anew")

    def _say(self, why: str) -> None:
        self._log.add(Remark("note", PASS, (), "decision-cache", f"{self.path}: {why}"))


def _checked(data: Mapping[str, Any], decision: Decision | None) -> QuotaPlan:
    """A plan as it was stored; raises ``ValueError`` if it is not that of the schedule."""
    plan = QuotaPlan.from_dict(data)
    shares = tuple((share.lane, share.units) for share in plan.shares)
    if plan.backend != "cores" or decision is None or shares != decision.cores:
        raise ValueError("its quotas are not those of its schedule")
    return plan


def _plans(data: Mapping[str, Any]) -> dict[str, QuotaPlan]:
    """Plans of SMs as they were stored; raises ``ValueError`` if any can't be one of its kind."""
    found = {kind: QuotaPlan.from_dict(plan) for kind, plan in dict(data).items()}
    for kind, plan in found.items():
        if plan.backend not in SMS.get(kind, ()) or not plan.shares:
            raise ValueError(f"a plan of {plan.backend} is not one for {kind}")
    return found
