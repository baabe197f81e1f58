"""Quotas of CPU cores: affinity and thread counts, and a cgroup's limit where one may be made."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

import torch

from rose_compiler.base.errors import QuotaError, fail, register
from rose_compiler.base.quota import Backend, QuotaPlan
from rose_compiler.runtime.hosts.child import bind_process
from rose_compiler.runtime.quotas.base import Probe, check_backend

register(
    "quota-cores",
    QuotaError,
    "the system does not let these cores be assigned",
    "look at `os.sched_getaffinity(0)`: a container or a batch system may have narrowed it",
)

_CGROUPS = Path("/sys/fs/cgroup")
_PERIOD_US = 100_000


class Cores:
    """Lanes get cores of their own, and as many threads.

    ``cgroups``: the mount point of the unified hierarchy, None to leave cgroups out.
    """

    name: Backend = "cores"

    def __init__(self, cgroups: Path | None = _CGROUPS) -> None:
        self._cgroups = cgroups

    def probe(self) -> Probe:
        """Needs the system call for affinity; says whether cgroups can be made too."""
        if not hasattr(os, "sched_setaffinity"):
            return Probe(False, "this system has no `sched_setaffinity`")
        count = len(os.sched_getaffinity(0))
        limits = "with" if self._parent() is not None else "without"
        return Probe(True, f"{count} cores, {limits} cgroup limits")

    def apply(self, plan: QuotaPlan) -> AppliedCores:
        """Map the plan's cores to those that this process may use.

        Raises ``QuotaError`` (``quota-cores``) if it may use fewer.
        """
        check_backend(plan, self.name)
        return AppliedCores(plan, _numbered(plan), self._parent())

    def _parent(self) -> Path | None:
        """This process's own cgroup, if limits can be set below it."""
        if self._cgroups is None or not (self._cgroups / "cgroup.controllers").exists():
            return None
        try:
            line = Path("/proc/self/cgroup").read_text().splitlines()[-1]
        except OSError:
            return None
        own = self._cgroups / line.rpartition(":")[2].lstrip("/")
        control = own / "cgroup.subtree_control"
        try:
            usable = "cpu" in control.read_text().split() and os.access(own, os.W_OK)
        except OSError:
            return None
        return own if usable else None


def _numbered(plan: QuotaPlan) -> dict[str, frozenset[int]]:
    """The cores of each lane among those that this process may use."""
    allowed = sorted(os.sched_getaffinity(0))
    highest = max((core for share in plan.shares for core in share.cores), default=0)
    if highest >= len(allowed):
        raise fail(
            "quota-cores",
            f"the plan numbers {highest + 1} cores",
            expected=f"{len(allowed)} at most",
            found=allowed,
        )
    return {s.lane: frozenset(allowed[core] for core in s.cores) for s in plan.shares}


class AppliedCores:
    """Cores by lane, in force for the threads and processes that were told."""

    def __init__(
        self, plan: QuotaPlan, cores: dict[str, frozenset[int]], parent: Path | None
    ) -> None:
        self.plan = plan
        self.cores = cores
        self._parent = parent
        self._made: list[Path] = []

    def environment(self, lane: str) -> dict[str, str]:
        """Thread counts for the lane's process."""
        return self.plan.environment(lane)

    def started(self, lane: str, pid: int) -> None:
        """Bind a process that has just started: threads that it makes later inherit the cores.

        Raises ``QuotaError`` (``quota-cores``) if the system refuses.
        """
        self.plan.share(lane)
        try:
            bind_process(pid, self.cores[lane])
        except OSError as error:
            what = f"process {pid} of lane {lane!r} can't be bound to {sorted(self.cores[lane])}"
            raise fail("quota-cores", what, found=error) from error
        if self._parent is not None:
            self._limit(lane, pid)

    @contextmanager
    def entered(self, lane: str) -> Iterator[None]:
        """Bind the calling thread, and the threads of torch's operations in it, while inside.

        Torch counts threads for each thread that calls it, so this is entered on the lane itself.
        """
        self.plan.share(lane)
        before, threads = os.sched_getaffinity(0), torch.get_num_threads()
        try:
            os.sched_setaffinity(0, self.cores[lane])
        except OSError as error:
            what = f"a thread of lane {lane!r} can't be bound to {sorted(self.cores[lane])}"
            raise fail("quota-cores", what, found=error) from error
        torch.set_num_threads(len(self.cores[lane]))
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            os.sched_setaffinity(0, before)

    def check(self) -> None:
        """Nothing can go away."""

    def replan(self, plan: QuotaPlan) -> None:
        """Other cores, for what is told with :meth:`started` or enters from now on."""
        check_backend(plan, self.plan.backend)
        self.plan, self.cores = plan, _numbered(plan)

    def close(self) -> None:
        """Remove the cgroups; processes in them go back to their parent's."""
        made, self._made = self._made, []
        for group in made:
            with suppress(OSError):
                assert self._parent is not None
                for pid in (group / "cgroup.procs").read_text().split():
                    with suppress(OSError):
                        (self._parent / "cgroup.procs").write_text(pid)
                group.rmdir()

    def _limit(self, lane: str, pid: int) -> None:
        """A cgroup that may use no more than the lane's cores; affinity holds if it can't be."""
        assert self._parent is not None
        group = self._parent / f"rose-{os.getpid()}-{lane}"
        with suppress(OSError):
            if group not in self._made:
                group.mkdir()
                self._made.append(group)
            quota = len(self.cores[lane]) * _PERIOD_US
            (group / "cpu.max").write_text(f"{quota} {_PERIOD_US}")
            (group / "cgroup.procs").write_text(str(pid))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
