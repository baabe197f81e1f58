"""Quotas through MPS: percentages of a process's threads, or static partitions of the SMs.

A daemon that answers already is used and never touched: its settings stay, and it stays up. Else
one of our own is started, without root: this user's, in directories of its own with short names
(sockets have 108 bytes for theirs), in the foreground as a child that is watched and always ended.
"""

from __future__ import annotations

import atexit
import shutil
import subprocess
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self

from rose_compiler.base.errors import QuotaError, fail, register
from rose_compiler.base.quota import ANY_DEVICE, Backend, QuotaPlan
from rose_compiler.runtime.hosts.child import before_kill
from rose_compiler.runtime.quotas.base import Probe, check_backend
from rose_compiler.runtime.quotas.control import BINARY, Control
from rose_compiler.runtime.quotas.nvml import Device, devices

register(
    "quota-mps-start",
    QuotaError,
    "an MPS control daemon of our own could not be started",
    "the daemon's last lines say why; quotas can also be had through green contexts",
)
register(
    "quota-mps-died",
    QuotaError,
    "the MPS control daemon ended while quotas rested on it",
    "its clients run on; apply the plan again before starting others",
)

#: Bytes that the address of a Unix socket may have.
_SOCKET_PATH = 107
_POLL = 0.02
#: Variables that hold for every client of a daemon that was started with them.
_BOUNDS = ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUDA_MPS_SM_PARTITION")


class MpsDaemon:
    """A running daemon: one that was there (``owned`` is False), or our own.

    ``start`` is the seconds that starting may take, ``grace`` those that clients have to end
    before they are terminated when the daemon is stopped.

    Raises ``QuotaError``: ``quota-mps-start``, or ``quota-mps-timeout`` if a daemon that is there
    hangs.
    """

    def __init__(
        self,
        *,
        static: bool = False,
        binary: str = BINARY,
        timeout: float = 5.0,
        start: float = 10.0,
        grace: float = 5.0,
    ) -> None:
        self._grace = grace
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None
        self.control = Control(binary=binary, timeout=timeout)
        if self.control.answers():
            return
        self._folder = Path(tempfile.mkdtemp(prefix="rose-mps-", dir="/tmp"))
        pipe, log = self._folder / "p", self._folder / "l"
        pipe.mkdir()
        log.mkdir()
        self.control = Control(pipe, log, binary, timeout)
        self._finalizer = weakref.finalize(self, _remove, self._folder)
        atexit.register(self.stop)
        try:
            self._launch(static, start)
        except BaseException:
            self.stop()
            raise

    @property
    def owned(self) -> bool:
        """Whether it was started here, and so is ended here."""
        return self._folder is not None

    def check(self) -> None:
        """Raises ``QuotaError`` (``quota-mps-died``) if our own daemon has ended."""
        if self._process is not None and self._process.poll() is not None:
            raise fail(
                "quota-mps-died",
                f"the daemon exited with status {self._process.returncode}",
                found=self._last_lines(),
            )

    def ask(self) -> None:
        """As :meth:`check`, for a daemon of somebody else's too, which has to be asked for that."""
        self.check()
        if not self.owned and not self.control.answers():
            raise fail("quota-mps-died", "the daemon does not answer any more")

    def stop(self) -> None:
        """End our own daemon: clients first, then ``quit``, then the process itself."""
        atexit.unregister(self.stop)
        process, self._process = self._process, None
        if process is not None:
            if process.poll() is None:
                with suppress(QuotaError):
                    self._dismiss_clients()
                with suppress(QuotaError):
                    self.control.quit()
            _end(process, self._grace)
        if self._folder is not None:
            self._finalizer()

    def _launch(self, static: bool, limit: float) -> None:
        assert self._folder is not None
        assert self.control.log is not None
        if len(str(self.control.pipe)) + len("/control_privileged") > _SOCKET_PATH:
            raise fail("quota-mps-start", f"{self.control.pipe} is too long for a socket's name")
        command = [self.control.binary, "-f", *(["-S"] if static else [])]
        with (self.control.log / "output").open("wb") as output:
            try:
                # a session of its own: Ctrl-C must not end the daemon before its clients
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=_unlimited(self.control.process_environment()),
                    start_new_session=True,
                )
            except OSError as error:
                what = f"{' '.join(command)} can't be run"
                raise fail("quota-mps-start", what, found=error) from error
        deadline = time.monotonic() + limit
        while True:
            if self._process.poll() is not None:
                what = f"{' '.join(command)} exited with status {self._process.returncode}"
                raise fail("quota-mps-start", what, found=self._last_lines())
            if self.control.answers():
                return
            if time.monotonic() > deadline:
                what = f"{' '.join(command)} does not answer"
                raise fail("quota-mps-start", what, expected=f"an answer within {limit:g} s")
            time.sleep(_POLL)

    def _dismiss_clients(self) -> None:
        deadline = time.monotonic() + self._grace
        while clients := self.control.all_clients():
            if time.monotonic() > deadline:
                for client, server in clients.items():
                    with suppress(QuotaError):
                        self.control.terminate_client(server, client)
                return
            time.sleep(_POLL)

    def _last_lines(self, count: int = 5) -> str:
        if self.control.log is None:
            return ""
        with suppress(OSError):
            text = (self.control.log / "output").read_text(errors="replace")
            return "\n".join(text.splitlines()[-count:])
        return ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()


def _unlimited(environment: Mapping[str, str]) -> dict[str, str]:
    """Without what would bound the daemon, and so all of its clients, who can only go below."""
    return {name: value for name, value in environment.items() if name not in _BOUNDS}


def _end(process: subprocess.Popen[bytes], grace: float) -> None:
    for ask in (lambda: None, process.terminate, process.kill):
        ask()
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace)
            return


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


class AppliedMps:
    """A plan in force under a daemon."""

    def __init__(self, plan: QuotaPlan, daemon: MpsDaemon) -> None:
        self.plan = plan
        self.daemon = daemon
        self.partitions: dict[str, str] = {}  # process -> identifier

    def environment(self, lane: str) -> dict[str, str]:
        """Variables for the lane's process; a quota is fixed when the process starts."""
        partition = self.partitions.get(self.plan.share(lane).process)
        return {**self.daemon.control.variables(), **self.plan.environment(lane, partition)}

    def started(self, lane: str, pid: int) -> None:
        """The environment has said it all. Before the process is killed its work is ended."""
        before_kill(pid, self.release)

    def check(self) -> None:
        """Raises ``QuotaError`` (``quota-mps-died``) if our own daemon has ended."""
        self.daemon.check()

    def replan(self, plan: QuotaPlan) -> None:
        """Percentages hold for processes that start from now on; partitions are fixed.

        Raises ``QuotaError``: ``quota-fixed`` for partitions, which their clients keep, and
        ``quota-mps-died`` if no daemon answers, whoever started it.
        """
        check_backend(plan, self.plan.backend)
        self.daemon.ask()
        if plan.backend == "mps-partition":
            raise fail("quota-fixed", "partitions stay while clients run in them")
        self.plan = plan.on(self.plan.device)

    def release(self, pid: int) -> None:
        """End a client's work in order, before its process is killed."""
        server = self.daemon.control.all_clients().get(pid)
        if server is not None:
            self.daemon.control.terminate_client(server, pid)

    def close(self) -> None:
        """Give partitions back to a daemon that stays, and end one of our own."""
        if not self.daemon.owned:
            for partition in self.partitions.values():
                with suppress(QuotaError):
                    self.daemon.control.remove_partition(self.plan.device, partition)
        self.partitions.clear()
        self.daemon.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class MpsPercentage:
    """``CUDA_MPS_ACTIVE_THREAD_PERCENTAGE``, a cap on the SMs of a process."""

    name: Backend = "mps-percentage"
    _capability = (7, 0)
    _cuda = 0
    _static = False

    def __init__(
        self,
        binary: str = BINARY,
        find: Callable[[], list[Device]] = devices,
        timeout: float = 5.0,
        grace: float = 5.0,
    ) -> None:
        self._binary = binary
        self._find = find
        self._timeout = timeout
        self._grace = grace

    def probe(self) -> Probe:
        """Needs the control program and a GPU that is new enough, and a driver for partitions."""
        try:
            found = self._find()
        except QuotaError as error:
            return Probe(False, f"{error.what} ({error.found})")
        if not found:
            return Probe(False, "there is no GPU")
        if shutil.which(self._binary) is None:
            return Probe(False, f"{self._binary} is not installed")
        gpu = found[0]
        major, minor = self._capability
        if gpu.capability < self._capability:
            return Probe(False, f"{gpu.name} is older than compute capability {major}.{minor}")
        if gpu.cuda < self._cuda:
            has, needs = (f"{v // 1000}.{v % 1000 // 10}" for v in (gpu.cuda, self._cuda))
            return Probe(False, f"the driver serves CUDA {has}, and this needs {needs}")
        return Probe(True, f"{gpu.name}, {gpu.sms} SMs")

    def apply(self, plan: QuotaPlan) -> AppliedMps:
        """Find or start a daemon, and make the partitions if the plan has some.

        Raises ``QuotaError``; nothing is left behind then.
        """
        check_backend(plan, self.name)
        if plan.device == ANY_DEVICE:
            plan = plan.on(self._find()[0].uuid)
        daemon = MpsDaemon(
            static=self._static,
            binary=self._binary,
            timeout=self._timeout,
            grace=self._grace,
        )
        applied = AppliedMps(plan, daemon)
        try:
            self._prepare(applied)
        except BaseException:
            applied.close()
            raise
        return applied

    def _prepare(self, applied: AppliedMps) -> None:
        """Nothing: clients start the server."""


class MpsPartition(MpsPercentage):
    """Static partitions: SMs that belong to one process. Needs CUDA 13.1 and a daemon for them."""

    name: Backend = "mps-partition"
    _capability = (8, 0)
    _cuda = 13010
    _static = True

    def _prepare(self, applied: AppliedMps) -> None:
        for share in applied.plan.shares:
            if share.process not in applied.partitions:
                applied.partitions[share.process] = applied.daemon.control.add_partition(
                    applied.plan.device, share.units // applied.plan.chunk
                )
