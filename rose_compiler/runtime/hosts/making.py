"""``hosted(factory)``: what puts a component into a host of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, Literal, get_args

from rose_compiler.base.errors import fail
from rose_compiler.base.quota import THREADS, QuotaPlan
from rose_compiler.base.remarks import Remark
from rose_compiler.runtime.hosts import served
from rose_compiler.runtime.hosts.child import own_cores
from rose_compiler.runtime.hosts.host import InlineHost
from rose_compiler.runtime.hosts.hosted import Hosted
from rose_compiler.runtime.hosts.process import ProcessHost
from rose_compiler.runtime.hosts.thread import ThreadHost
from rose_compiler.runtime.quotas.planned import Planned, planned

Kind = Literal["process", "thread", "inline"]
_HELP = "see `help(rose_compiler.hosted)`"


def hosted(
    factory: Callable[[], Any],
    *,
    host: Kind = "process",
    name: str = "",
    threads: int | None = 1,
    cores: Collection[int] | None = None,
    environment: Mapping[str, str] | str | os.PathLike[str] | QuotaPlan | None = None,
    timeout: float | None = None,
    start_timeout: float | None = 120.0,
    stateless: bool = False,
    recover: bool = False,
) -> Hosted:
    """A component in a host of its own: a policy, simulator, trainer, evaluator, reward model.

    ``factory()`` builds it there; calls of its methods look like calls of the component. In a loop
    that is compiled, a call runs beside what does not need its result. The constructor returns at
    once, so that several start side by side; :meth:`Hosted.ready` or the first result waits.

    Args:
        factory: a function without parameters, sent by cloudpickle.
        host: ``"process"`` (a fresh interpreter, never a fork), ``"thread"``, or ``"inline"``.
        name: for errors; that of the factory by default.
        threads: threads of numeric libraries in the process; None for as many as cores.
        cores: numbers of the cores that the process may use; None for the caller's.
        environment: variables added to the caller's before the process starts. Or the file of a
            quota plan (``compiled.quota_plan.save(file)``), or the plan: the process starts with
            its share for ``"host:" + name``. Without one, while there is no such file for instance,
            it starts without a quota, and `explain()` says so.
        timeout: seconds that an answer may take; the process is killed then, and with `stateless`
            or `recover` a new one takes over. None: no limit.
        start_timeout: seconds for starting the process and building the component, in a thread for
            building it; a thread that takes longer can't be stopped and is left.
        stateless: the component keeps nothing from one call to the next but published parameters.
            Where its process dies or hangs past `timeout`, a new one takes over, and is asked again
            what was not answered.
        recover: the component has ``get_state`` and ``set_state``, and draws from no generator that
            is not in its state. Where its process dies or hangs in a compiled loop, a new one takes
            over from the state at the beginning of the iteration, and repeats its calls since. A
            call that hangs again raises ``HostTimeout``.

    Raises:
        FactoryError: if the factory can't be pickled; the message names what holds it back.
        QuotaError: ``quota-file`` if `environment` is a file that holds no quota plan.
        RuntimeFault: ``host-start`` if the process can't be started.
        ConfigError: for another kind of host, and for threads, cores and variables that can't be.
    """
    if host not in get_args(Kind):
        raise fail(
            "config-argument",
            "there is no such kind of host",
            expected=", ".join(map(repr, get_args(Kind))),
            found=f"host={host!r}",
            help=_HELP,
        )
    if threads is not None and (type(threads) is not int or threads < 1):
        what, wanted = "a host runs on one thread at least", "a positive whole number or None"
        raise fail(
            "config-argument", what, expected=wanted, found=f"threads={threads!r}", help=_HELP
        )
    name = name or getattr(factory, "__name__", "component")
    build = partial(served.Served, factory)
    start: Callable[..., Any]
    under: Planned | None = None
    remarks: list[Remark] = []
    if threads is None:
        threads = len(os.sched_getaffinity(0) if cores is None else cores)
    if environment is not None and not isinstance(environment, Mapping):
        if host == "process":
            under, remarks = planned(environment, f"host:{name}")
        environment = None
    if host == "process":
        start = partial(
            ProcessHost,
            build,
            name=name,
            timeout=timeout,
            environment={**dict.fromkeys(THREADS, str(threads)), **(environment or {})},
            # also of processes that are started anew, by a thread that a quota may bind meanwhile
            cores=own_cores() if cores is None else cores,
            start_timeout=start_timeout,
        )
    elif host == "thread":
        start = partial(
            ThreadHost,
            build,
            name=name,
            timeout=timeout,
            torch_threads=threads,
            start_timeout=start_timeout,
        )
    else:
        start = partial(InlineHost, build, name=name, timeout=timeout)
    try:
        made = Hosted(start, name, timeout, threads, under)
    except BaseException:
        if under is not None:
            under.leave()
        raise
    made.rose_remarks += remarks
    if host == "process" and (stateless or recover):
        made.rose_guard(stateless)
    return made
