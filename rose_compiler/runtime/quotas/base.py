"""What every quota back end offers, and choosing those that the machine has."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from rose_compiler.base.errors import QuotaError, fail, register
from rose_compiler.base.quota import Backend, QuotaPlan
from rose_compiler.base.remarks import Remark

register(
    "quota-fixed",
    QuotaError,
    "quotas of this kind can't be changed while they are in force",
    "end the hosts, apply the new plan and start them again; or use percentages or cores",
)


@dataclass(frozen=True)
class Probe:
    """Whether a back end can be used here, and what was found or is missing."""

    available: bool
    why: str


class Applied(Protocol):
    """A plan in force. Closing it takes everything back that applying it changed."""

    def environment(self, lane: str) -> dict[str, str]:
        """Variables for the process that the lane's component is started in."""

    def started(self, lane: str, pid: int) -> None:
        """The lane's process runs: do what can't be done through its environment."""

    def check(self) -> None:
        """Raises ``QuotaError`` if what the plan rests on has gone."""

    def replan(self, plan: QuotaPlan) -> None:
        """Hold for processes that start, or are told with ``started``, from now on.

        Raises ``QuotaError`` (``quota-fixed``) where that needs all of them to be gone.
        """

    def close(self) -> None:
        """Undo. Safe to call twice."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *exception: object) -> None: ...


class QuotaBackend(Protocol):
    """One way of dividing a device."""

    name: Backend

    def probe(self) -> Probe:
        """Look at the machine; changes nothing, and does not initialize CUDA."""

    def apply(self, plan: QuotaPlan) -> Applied:
        """Put a plan into force. Raises ``QuotaError`` if the machine refuses."""


def check_backend(plan: QuotaPlan, name: Backend) -> None:
    """Raises ``QuotaError`` (``quota-plan``) for a plan of another back end."""
    if plan.backend != name:
        raise fail("quota-plan", f"a plan for {plan.backend} was given to {name}")


def usable(
    backends: Iterable[QuotaBackend],
) -> tuple[list[QuotaBackend], list[Remark]]:
    """The back ends that the machine has, and a remark on each that it lacks."""
    found: list[QuotaBackend] = []
    remarks: list[Remark] = []
    for backend in backends:
        probe = backend.probe()
        if probe.available:
            found.append(backend)
        else:
            why = f"{backend.name} is passed over: {probe.why}"
            remarks.append(Remark("missed", "quota", (), "not-available", why))
    return found, remarks
