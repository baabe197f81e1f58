"""Which lane may use how many SMs or cores: a plain value, checked before it is used.

A plan says nothing about how it was found (``rose_compiler.tune.slack``) and does nothing itself
(``rose_compiler.runtime.quotas``). It is made of whole chunks, never over-committed, and can be
saved, read and executed by hand: :meth:`QuotaPlan.environment` and
:meth:`QuotaPlan.daemon_commands` are what a person would type.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self, get_args

from rose_compiler.base.errors import QuotaError, fail, nearest, register
from rose_compiler.base.gpu import Group, VirtualGpu
from rose_compiler.base.machine import Machine

register(
    "quota-granularity",
    QuotaError,
    "a quota is no whole number of the chunks that the device hands out",
    "round it down to chunks: `Machine.sm_granularity` SMs each",
)
register(
    "quota-plan",
    QuotaError,
    "a quota plan contradicts itself, or names what does not exist",
    "make plans with `QuotaPlan.divide`",
)
register(
    "quota-file",
    QuotaError,
    "a file can't be read as a quota plan",
    "save plans with `plan.save(path)`",
)

Backend = Literal["mps-percentage", "mps-partition", "green-context", "cores"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)
#: Back ends whose quota belongs to a process, so that all lanes in one share it.
BY_PROCESS: tuple[Backend, ...] = ("mps-percentage", "mps-partition")
#: Variables that bound the threads of numeric libraries.
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
#: The lane of what no other lane runs, whose name in a profile is empty.
COORDINATOR = "coordinator"
#: Stands for all processes that step shards of simulators, which share its cores.
SHARDS = "shards"
#: Stands for the GPU's UUID in a plan that was made without one.
ANY_DEVICE = "<GPU UUID>"

_FORMAT = 1


@dataclass(frozen=True)
class Share:
    """What one lane gets: ``units`` SMs, or cores, those numbered in ``cores``.

    ``process`` is where its component lives; ``why`` is a note for :meth:`QuotaPlan.explain`.
    """

    lane: str
    units: int
    process: str = "main"
    cores: tuple[int, ...] = ()
    why: str = ""


@dataclass(frozen=True)
class QuotaPlan:
    """Quotas of all lanes on one machine through one back end.

    ``device`` is the GPU's UUID. ``before_s`` and ``predicted_s`` are the iteration's time without
    and with the plan, None where nobody predicted it.

    The constructor checks the plan. Raises ``QuotaError``: ``quota-overcommitted``,
    ``quota-granularity``, ``quota-minimum``, ``quota-clients`` or ``quota-plan``.
    """

    backend: Backend
    machine: Machine
    shares: tuple[Share, ...] = ()
    device: str = ANY_DEVICE
    before_s: float | None = None
    predicted_s: float | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise fail(
                "quota-plan",
                f"no back end is named {self.backend!r}{nearest(str(self.backend), BACKENDS)}",
                expected="one of " + ", ".join(BACKENDS),
            )
        if self.backend != "cores" and not self.machine.sms:
            raise fail("quota-plan", f"{self.machine.name} has no SMs to divide")
        _check_types(self)
        _check_lanes(self)
        for share in self.shares:
            _check_units(self, share)
        _check_sum(self)
        if self.backend == "cores":
            _check_cores(self)

    @classmethod
    def divide(
        cls,
        backend: Backend,
        machine: Machine,
        chunks: Mapping[str, int],
        *,
        process: Mapping[str, str] | None = None,
        why: Mapping[str, str] | None = None,
        **fields: Any,
    ) -> Self:
        """A plan that gives each lane so many chunks; cores are numbered in the lanes' order.

        ``process`` names the process of each lane; left out, each lane has one of its own, or all
        live in one for green contexts. Other fields are those of the plan.
        """
        size = 1 if backend == "cores" else machine.chunk
        places, notes = process or {}, why or {}
        shares, taken = [], 0
        for lane, count in chunks.items():
            cores: tuple[int, ...] = ()
            if backend == "cores":
                cores, taken = tuple(range(taken, taken + count)), taken + count
            home = places.get(lane, "main" if backend == "green-context" else lane)
            shares.append(Share(lane, count * size, home, cores, notes.get(lane, "")))
        return cls(backend, machine, tuple(shares), **fields)

    # -- asking --------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """The SMs or cores there are to give."""
        return self.machine.cores if self.backend == "cores" else self.machine.sms

    @property
    def chunk(self) -> int:
        """SMs or cores in the least quota."""
        return 1 if self.backend == "cores" else self.machine.chunk

    @property
    def given(self) -> int:
        """The SMs or cores that are given away: a process counts once, whatever lanes it has."""
        if self.backend in BY_PROCESS:
            return sum({share.process: share.units for share in self.shares}.values())
        return sum(share.units for share in self.shares)

    def share(self, lane: str) -> Share:
        """A lane's share; raises ``QuotaError`` (``quota-plan``) for a lane without one."""
        for share in self.shares:
            if share.lane == lane:
                return share
        lanes = [share.lane for share in self.shares]
        raise fail(
            "quota-plan",
            f"the plan has no lane {lane!r}{nearest(lane, lanes)}",
            expected="one of " + ", ".join(lanes),
        )

    def percentage(self, lane: str) -> int:
        """The active-thread percentage that comes to the lane's SMs once it is rounded down."""
        return math.ceil(100 * self.share(lane).units / self.machine.sms)

    def environment(self, lane: str, partition: str | None = None) -> dict[str, str]:
        """Variables for the process that the lane's component is started in.

        ``partition`` is the identifier that the daemon answered with, for static partitions:
        without it they raise ``QuotaError`` (``quota-plan``).
        """
        share = self.share(lane)
        found: dict[str, str] = {}
        if self.backend != "cores" and self.device != ANY_DEVICE:
            found["CUDA_VISIBLE_DEVICES"] = self.device
        if self.backend == "cores":
            found |= dict.fromkeys(THREADS, str(share.units))
        elif self.backend == "mps-percentage":
            found["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(self.percentage(lane))
        elif self.backend == "mps-partition":
            if partition is None:
                raise fail(
                    "quota-plan",
                    f"the partition of lane {lane!r} has no identifier before it is made",
                    expected="what the daemon answered to `sm_partition add`",
                )
            found["CUDA_MPS_SM_PARTITION"] = partition
        return found

    def daemon_arguments(self) -> tuple[str, ...]:
        """How ``nvidia-cuda-mps-control`` is started by hand; empty for a back end without it."""
        if self.backend not in BY_PROCESS:
            return ()
        return ("-d", "-S") if self.backend == "mps-partition" else ("-d",)

    def daemon_commands(self) -> tuple[str, ...]:
        """What is then written to ``nvidia-cuda-mps-control``, a command each."""
        if self.backend == "mps-percentage":
            return (f"start_server -uid {os.getuid()}",)
        if self.backend == "mps-partition":
            by_process = {share.process: share for share in self.shares}
            return tuple(
                f"sm_partition add {self.device} {share.units // self.chunk}"
                for share in by_process.values()
            )
        return ()

    def virtual_gpu(self, priority: Mapping[str, int] | None = None) -> VirtualGpu:
        """The machine divided like this, for simulated time."""
        if self.backend == "cores":
            raise fail("quota-plan", "a plan for cores does not divide a GPU")
        exclusive = self.backend != "mps-percentage"
        groups: dict[str, Group] = {}
        lanes: dict[str, str] = {}
        for share in self.shares:
            name = share.process if self.backend in BY_PROCESS else share.lane
            groups[name] = Group(name, share.process, share.units, exclusive)
            lanes[share.lane] = name
        mps = self.backend in BY_PROCESS
        return VirtualGpu(self.machine, tuple(groups.values()), lanes, priority or {}, mps)

    def explain(self) -> str:
        """The plan as text: a line a lane, what is left over, and what is expected of it."""
        unit = "cores" if self.backend == "cores" else "SMs"
        head = f"quotas on {self.machine.name} by {self.backend}"
        lines = [f"{head}: {self.given} of {self.capacity} {unit}, in chunks of {self.chunk}"]
        width = max((len(share.lane) for share in self.shares), default=0)
        for share in self.shares:
            part = f"{share.units:4d} {unit}, {share.units / self.capacity:4.0%}"
            where = f"  process {share.process}" if share.process != share.lane else ""
            numbers = f"  cores {','.join(map(str, share.cores))}" if share.cores else ""
            why = f"  {share.why}" if share.why else ""
            lines.append(f"  {share.lane:{width}}  {part}{where}{numbers}{why}")
        if not self.shares:
            lines.append("  no lane has a quota")
        if self.predicted_s is not None and self.before_s:
            gain = self.before_s / self.predicted_s if self.predicted_s else math.inf
            lines.append(
                f"  predicted: {self.before_s:.4g} s an iteration without, "
                f"{self.predicted_s:.4g} s with it ({gain:.2f}x)"
            )
        lines += [f"  {note}" for note in self.notes]
        return "\n".join(lines)

    # -- keeping -------------------------------------------------------------------------------

    def on(self, device: str) -> Self:
        """The same plan for the GPU with that UUID."""
        return replace(self, device=device)

    def to_dict(self) -> dict[str, Any]:
        """The plan as data that JSON can hold."""
        return {"format": _FORMAT, **asdict(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """What ``to_dict`` wrote.

        Raises ``QuotaError``: ``quota-file`` for anything else, or as the constructor does.
        """
        try:
            fields = dict(data)
            if fields.pop("format") != _FORMAT:
                raise ValueError(f"format {data['format']!r}")
            fields["machine"] = Machine.from_dict(fields["machine"])
            fields["notes"] = tuple(fields["notes"])
            fields["shares"] = tuple(
                Share(**{**share, "cores": tuple(share["cores"])}) for share in fields["shares"]
            )
            return cls(**fields)
        except (KeyError, TypeError, ValueError) as error:
            raise fail(
                "quota-file", "this is no quota plan", expected=f"format {_FORMAT}", found=error
            ) from error

    def save(self, path: str | Path) -> None:
        """Write the plan to a file as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what ``save`` wrote; raises ``QuotaError``, ``quota-file`` if it can't be read."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise fail(
                "quota-file", f"{path} can't be read as a quota plan", found=error
            ) from error
        if not isinstance(data, dict):
            raise fail("quota-file", f"{path} is no quota plan", found=type(data).__name__)
        return cls.from_dict(data)


def _check_types(plan: QuotaPlan) -> None:
    """What comes from a file may be anything."""
    device: Any = plan.device
    if not isinstance(device, str):
        raise fail("quota-plan", f"the device is {device!r}", expected="a UUID")
    for share in plan.shares:
        if any(type(number) is not int for number in (share.units, *share.cores)):
            found = f"{share.units!r} and cores {share.cores!r}"
            raise fail(
                "quota-plan", f"the share of lane {share.lane!r} is no whole number", found=found
            )
    figures: dict[str, Any] = {"before_s": plan.before_s, "predicted_s": plan.predicted_s}
    for name, seconds in figures.items():
        if seconds is not None and not isinstance(seconds, int | float):
            raise fail("quota-plan", f"{name} is {seconds!r}", expected="seconds, or None")


def _check_lanes(plan: QuotaPlan) -> None:
    seen: dict[str, Share] = {}
    homes: dict[str, Share] = {}
    for share in plan.shares:
        if share.lane in seen:
            raise fail("quota-plan", f"lane {share.lane!r} has two quotas")
        seen[share.lane] = share
        other = homes.setdefault(share.process, share)
        if plan.backend in BY_PROCESS and other.units != share.units:
            raise fail(
                "quota-plan",
                f"{plan.backend} belongs to a process: lanes {other.lane!r} and {share.lane!r} "
                f"of process {share.process!r} share one quota",
                found=f"{other.units} and {share.units} SMs",
            )
    if plan.backend in BY_PROCESS and len(homes) > plan.machine.max_clients:
        raise fail(
            "quota-clients",
            f"{len(homes)} processes would share {plan.machine.name}",
            expected=f"{plan.machine.max_clients} at most",
        )


def _check_units(plan: QuotaPlan, share: Share) -> None:
    if share.units < plan.chunk:
        raise fail(
            "quota-minimum",
            f"lane {share.lane!r} would have {share.units} of {plan.capacity}",
            expected=f"at least {plan.chunk}",
        )
    if share.units % plan.chunk:
        raise fail(
            "quota-granularity",
            f"lane {share.lane!r} would have {share.units}",
            expected=f"a multiple of {plan.chunk}",
        )


def _check_sum(plan: QuotaPlan) -> None:
    if plan.given > plan.capacity:
        raise fail(
            "quota-overcommitted",
            f"the plan gives away {plan.given} of {plan.capacity} on {plan.machine.name}",
            found=", ".join(f"{share.lane}: {share.units}" for share in plan.shares),
        )


def _check_cores(plan: QuotaPlan) -> None:
    numbers = [core for share in plan.shares for core in share.cores]
    if len(set(numbers)) != len(numbers):
        raise fail("quota-overcommitted", "two lanes have the same core", found=numbers)
    if any(not 0 <= core < plan.capacity for core in numbers):
        expected = f"numbers from 0 to {plan.capacity - 1}"
        raise fail("quota-plan", "no such core", expected=expected, found=numbers)
    for share in plan.shares:
        if len(share.cores) != share.units:
            raise fail(
                "quota-plan",
                f"lane {share.lane!r} has {share.units} cores and names {len(share.cores)}",
            )
