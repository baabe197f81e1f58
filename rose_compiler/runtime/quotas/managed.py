"""Components in process hosts under quotas, moved to other quotas between iterations."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any, Self

from rose_compiler.base.errors import QuotaError, RoseError
from rose_compiler.base.quota import QuotaPlan
from rose_compiler.base.remarks import Blocker, Remark
from rose_compiler.runtime.hosts.process import ProcessHost, close_all
from rose_compiler.runtime.quotas.base import Applied, QuotaBackend

_STATE = ("get_state", "set_state")


class ManagedHosts:
    """One process host for each lane, started with its quota in its environment.

    ``factories`` build the components, by lane; ``plan`` has a share for each. Lanes named in
    ``stateless`` may be started anew at any time; others only if their component has ``get_state``
    and ``set_state``. ``options`` go to every :class:`~rose_compiler.runtime.hosts.ProcessHost`.

    Where the machine refuses the plan, the hosts run without quotas and :attr:`remarks` says so:
    training goes on.
    """

    def __init__(
        self,
        factories: Mapping[str, Callable[[], Any]],
        backend: QuotaBackend,
        plan: QuotaPlan,
        *,
        stateless: Collection[str] = (),
        **options: Any,
    ) -> None:
        self.plan = plan
        self.remarks: list[Remark] = []
        #: The plan that some hosts could not be moved to, for the next start; None if all could.
        self.pending: QuotaPlan | None = None
        self._factories = dict(factories)
        self._stateless = frozenset(stateless)
        self._options = options
        self._applied: Applied | None = None
        try:
            self._applied = backend.apply(plan)
        except QuotaError as error:
            self._lost(f"{backend.name} refused the plan: {error.what}", error)
        self.hosts: dict[str, ProcessHost] = {}
        try:
            for lane in self._factories:
                self.hosts[lane] = self._start(lane)
            for host in self.hosts.values():
                host.ready()
        except BaseException:
            self.close()
            raise

    def __getitem__(self, lane: str) -> ProcessHost:
        return self.hosts[lane]

    def check(self) -> bool:
        """Whether quotas are in force; call it between iterations.

        If what they rest on has gone (a daemon that died), the hosts go on as they are, what is
        started later has no quota, and :attr:`remarks` says so, once.
        """
        if self._applied is None:
            return False
        try:
            self._applied.check()
        except QuotaError as error:
            applied, self._applied = self._applied, None
            with suppress(RoseError, OSError):
                applied.close()
            self._lost(f"quotas have gone: {error.what}", error)
        return self._applied is not None

    def change(self, plan: QuotaPlan) -> list[Remark]:
        """Move the hosts to another plan, between iterations; what was not done and why.

        Hosts whose environment stays the same are told where they belong now. The others are
        started anew, all together, and take over their component's state; a host that does not
        start is left as it was. Nothing that a component has done is lost. What could not be moved
        is :attr:`pending`, and the remarks name it. Raises ``QuotaError`` (``quota-plan``) for a
        plan without a share for each lane, and changes nothing then.
        """
        if not self.check():
            return []
        for lane in self.hosts:
            plan.share(lane)
        assert self._applied is not None
        missed: list[Remark] = []
        before = {lane: self._applied.environment(lane) for lane in self.hosts}
        try:
            self._applied.replan(plan)
        except QuotaError as error:
            self.pending = plan
            missed.append(_missed("not-available", error.what, error.help))
            self.remarks += missed
            return missed
        self.plan = plan
        anew = [lane for lane in self.hosts if self._applied.environment(lane) != before[lane]]
        for lane, host in self.hosts.items():
            if lane not in anew:
                self._applied.started(lane, host.pid)
        movable = []
        for lane in anew:
            if lane in self._stateless or self._has_state(lane):
                movable.append(lane)
            else:
                missed.append(
                    _missed(
                        "hosted-elsewhere",
                        f"the quota of {lane} needs a new process, and its component can't hand "
                        "over its state",
                        "`get_state` and `set_state` on the component, or naming it stateless",
                    )
                )
        missed += self._restart(movable)
        self.pending = plan if missed else None
        self.remarks += missed
        return missed

    def close(self) -> None:
        """Close the components and end their processes, then take back the quotas."""
        hosts, self.hosts = list(self.hosts.values()), {}
        try:
            close_all(hosts)
        finally:
            applied, self._applied = self._applied, None
            if applied is not None:
                applied.close()

    def _start(self, lane: str) -> ProcessHost:
        options = dict(self._options)
        environment = dict(options.pop("environment", None) or {})
        if self._applied is not None:
            environment |= self._applied.environment(lane)
        host = ProcessHost(self._factories[lane], name=lane, environment=environment, **options)
        if self._applied is not None:
            self._applied.started(lane, host.pid)
        return host

    def _has_state(self, lane: str) -> bool:
        names = self.hosts[lane].call("__dir__")
        return all(name in names for name in _STATE)

    def _restart(self, lanes: list[str]) -> list[Remark]:
        """New processes for some lanes, side by side; the old ones end once theirs are ready."""
        missed = []
        started: dict[str, ProcessHost] = {}
        for lane in lanes:
            with suppress(RoseError):
                started[lane] = self._start(lane)
        for lane in lanes:
            new, old = started.get(lane), self.hosts[lane]
            try:
                if new is None:
                    raise OSError("it could not be started")
                new.ready()
                if lane not in self._stateless:
                    new.call("set_state", old.call("get_state"))
            except Exception as error:
                if new is not None:
                    new.kill()
                what = error.what if isinstance(error, RoseError) else f"{error}"
                missed.append(
                    _missed("not-available", f"{lane} stays in its old process: {what}", None)
                )
                continue
            self.hosts[lane] = new
            with suppress(Exception):  # its component has been taken over
                old.close()
        return missed

    def _lost(self, why: str, error: RoseError) -> None:
        self.remarks.append(_missed("not-available", why, error.help))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _missed(code: str, why: str, allow: str | None) -> Remark:
    return Remark.from_blocker("quota", Blocker(code, why, allow))
