"""What quotas of processes are compared with, and what iterations under them have shown."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from rose_compiler.api.objects import in_processes
from rose_compiler.base.machine import Machine
from rose_compiler.base.profile import Timeline
from rose_compiler.base.quota import COORDINATOR, QuotaPlan
from rose_compiler.tune.blocks import COLD, Blocks
from rose_compiler.tune.branches import Alone, responses
from rose_compiler.tune.levels import MOST, Quotas, to_measure

#: A plan by responses in chunks of SMs, None for what the profile alone says, better than another.
Plan = Callable[[Alone | None, QuotaPlan | None], QuotaPlan]


@dataclass
class Trial:
    """A plan that meets what is in force, for the components that could be moved, by lane.

    First an iteration is profiled under each of ``survey``, so that the plan rests on measured
    points; ``ready`` is False while it does not yet.
    """

    old: QuotaPlan | None
    new: QuotaPlan
    parts: dict[str, Any]
    blocks: Blocks = field(default_factory=Blocks)
    changed: bool = False
    survey: deque[QuotaPlan] = field(default_factory=deque)
    ready: bool = True
    same: bool = False  # the points speak for what is in force
    _cold: int = COLD

    @property
    def wanted(self) -> QuotaPlan | None:
        """What the next iteration is to run under; the winner once that is decided."""
        if self.survey:
            return self.survey[0]
        return self.new if self.blocks.new else self.old

    @property
    def last_cold(self) -> bool:
        """Whether the next iteration is the last that is not compared behind a change."""
        return (self._cold if self.survey else self.blocks.cold) == 1

    def record(self, seconds: float) -> None:
        """An iteration took so long under what was wanted."""
        if not self.survey:
            self.blocks.record(seconds)
            return
        self._cold -= 1
        if not self._cold:  # the last of them was profiled
            self.survey.popleft()
            self._cold = COLD

    def stop(self, late: bool = False) -> None:
        """What is known decides; ``late``: the time for tuning is over."""
        self.survey.clear()
        self.ready = True
        self.blocks.stop(late)


class Measured:
    """Profiled iterations under the plans that were tried, and without any."""

    def __init__(self) -> None:
        self._points: list[tuple[Quotas | None, Timeline]] = []

    def __bool__(self) -> bool:
        return bool(self._points)

    def add(self, plan: QuotaPlan | None, moved: Collection[str], timeline: Timeline) -> None:
        """An iteration ran under a plan, with the components of the lanes ``moved`` under it."""
        lanes = {COORDINATOR, *moved}
        chunks = None if plan is None else {n: c for n, c in units(plan).items() if n in lanes}
        self._points.append((chunks, timeline))

    @property
    def quotas(self) -> list[Quotas]:
        """The quotas in chunks by lane that iterations were profiled under."""
        return [chunks for chunks, _ in self._points if chunks is not None]

    def knows(self, plan: QuotaPlan) -> bool:
        """Whether an iteration was profiled under these quotas."""
        given = units(plan)
        return any(all(given.get(n) == c for n, c in known.items()) for known in self.quotas)

    @property
    def full(self) -> bool:
        """Whether no more plans are to be measured."""
        return len(self.quotas) >= MOST

    def alone(self, chunks: int) -> Alone:
        """The responses that follow."""
        return responses(self._points, chunks)

    def survey(self, first: QuotaPlan) -> deque[QuotaPlan]:
        """The plans to measure before one is compared, ``first`` among them unless it is known."""
        new = [] if self.knows(first) else [first]
        known = [*self.quotas, *map(units, new)]
        lanes = [share.lane for share in first.shares]
        for chunks in to_measure(lanes, first.machine.chunks, known):
            new.append(QuotaPlan.divide(first.backend, first.machine, chunks, device=first.device))
        return deque(new)


def units(plan: QuotaPlan) -> dict[str, int]:
    """The chunks of each lane."""
    return {share.lane: share.units // plan.chunk for share in plan.shares}


def parts_of(objects: dict[str, Any], plan: QuotaPlan) -> dict[str, Any]:
    """The components in processes that a plan has shares for, by lane."""
    found = in_processes(objects)
    return {s.lane: found[s.lane] for s in plan.shares if s.lane in found}


def misfit(plan: QuotaPlan, here: Machine, lanes: set[str], objects: dict[str, Any]) -> str:
    """Why a plan is not one for this device and a schedule with these lanes; "" if it is."""
    if here != plan.machine:
        return f"is one for {plan.machine.name} with {plan.machine.sms} SMs"
    if not parts_of(objects, plan) or not {s.lane for s in plan.shares} <= lanes:
        return "is not one for the lanes of its schedule"
    return ""
