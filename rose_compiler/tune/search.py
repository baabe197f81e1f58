"""Which schedules to try, in which order, and for which window: asked of a profiled iteration.

A schedule differs from program order by some moves: the batch in groups that take turns, late work
beside the steps or behind the loop, fewer threads, work aside, trips that overlap. Each move puts
work into windows of low activity at some level of the program, so a schedule is tried where every
one of its moves has such a window, or where the predictor sees a gain without one. Those that are
left are tried by their predicted time; the others, and those that come out as the same code, are
left out with the figure that speaks against them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self

from rose_compiler.base.decision import Decision
from rose_compiler.base.remarks import Blocker
from rose_compiler.tune.forecasts import USUAL_ERROR
from rose_compiler.tune.windows import Kind, Windows

#: Share of an iteration that windows must leave unused of the device to be worth filling.
LEAST_UNUSED = 0.01
#: Share of an iteration that a schedule must be predicted to gain to need no window.
LEAST_GAIN = 0.03
#: Predicted times that differ by less than this share are in the order of the space.
ALIKE = 0.03
#: Cores that operations must keep busy for a thread count to change anything.
ONE_THREAD = 1.1
#: Seconds below which threads of an operation wait for each other, busily, for much of its time:
#: the device looks active where it does little.
SHORT_S = 3e-4

#: Who a move concerns: loops that step a simulator; those that only roll out, or only train, and
#: can have a thread count; one loop by its path; everything.
Purpose = Literal["steps", "rollout", "update"]


@dataclass(frozen=True)
class Room:
    """Windows that are alike: where they are, how much of the device they leave unused."""

    path: tuple[str, ...]
    device: str
    idle: bool
    count: int
    total_s: float
    activity: float
    running: tuple[str, ...] = ()
    fits: tuple[str, ...] = ()

    @classmethod
    def of(cls, kind: Kind) -> Self:
        """From windows of one kind."""
        first = kind.first
        return cls(
            first.path,
            first.device,
            first.idle,
            len(kind.windows),
            kind.total_s,
            kind.activity,
            first.running,
            first.fits,
        )

    @property
    def unused_s(self) -> float:
        """Seconds of the whole device that they leave unused."""
        return self.total_s * (1.0 - self.activity)

    def __str__(self) -> str:
        where = " > ".join(self.path) or "outside loops"
        what = "nothing is resident" if self.idle else f"{self.activity:.0%} active"
        beside = f", while {self.running[0]} runs" if self.running else ""
        return f"{where}: {self.count} x {1e3 * self.total_s / self.count:.3g} ms, {what}{beside}"


@dataclass(frozen=True)
class Region:
    """A loop that steps a simulator, rolls out or trains.

    ``threads`` is how many cores its operations keep busy, those of simulators left out, ``each_s``
    what one of them takes.
    """

    path: tuple[str, ...]
    purpose: Purpose
    threads: float = 1.0
    each_s: float = 0.0


@dataclass(frozen=True)
class Evidence:
    """What is known of one iteration in program order, and of the schedules that could be tried.

    ``seconds`` has what an iteration of a schedule is predicted to take, ``same`` the schedule in
    front of it that comes out as the same code; who is missing in it was not built. ``base_s`` is
    program order, added up the same way. ``local`` has what was measured of the operations that a
    schedule calls on other rows or threads, in words; it is in the predictions already.
    """

    iteration_s: float
    base_s: float
    rooms: tuple[Room, ...]
    regions: tuple[Region, ...]
    seconds: Mapping[Decision, float]
    same: Mapping[Decision, Decision]
    local: Mapping[Decision, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Everything as dictionaries and lists."""
        return {
            "iteration_s": self.iteration_s,
            "base_s": self.base_s,
            "rooms": [asdict(room) for room in self.rooms],
            "regions": [asdict(region) for region in self.regions],
            "seconds": [[d.to_dict(), s] for d, s in self.seconds.items()],
            "same": [[a.to_dict(), b.to_dict()] for a, b in self.same.items()],
            "local": [[d.to_dict(), text] for d, text in self.local.items()],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """What ``to_dict`` wrote."""
        tuples = ("path", "running", "fits")

        def plain(one: Mapping[str, Any]) -> dict[str, Any]:
            return {k: tuple(v) if k in tuples else v for k, v in one.items()}

        return cls(
            data["iteration_s"],
            data["base_s"],
            tuple(Room(**plain(room)) for room in data["rooms"]),
            tuple(Region(**plain(region)) for region in data["regions"]),
            {Decision.from_dict(d): s for d, s in data["seconds"]},
            {Decision.from_dict(a): Decision.from_dict(b) for a, b in data["same"]},
            {Decision.from_dict(d): text for d, text in data.get("local", ())},
        )


@dataclass(frozen=True)
class Proposal:
    """A schedule to try. ``gain_s``: predicted, over program order; ``aims``: for each of its moves
    the windows that it is meant for, or what else speaks for it; ``local``: what was measured of
    the operations that it calls otherwise."""

    decision: Decision
    gain_s: float | None
    aims: tuple[tuple[str, Room | str], ...]
    local: str = ""

    def __str__(self) -> str:
        rooms: dict[Room | str, list[str]] = {}
        for move, room in self.aims:
            rooms.setdefault(room, []).append(move)
        parts = [
            f"{', '.join(moves)}: for {room if isinstance(room, str) else f'windows in {room}'}"
            for room, moves in rooms.items()
        ]
        if self.gain_s is not None:
            parts.append(f"predicted {0.0 - 1e3 * self.gain_s:+.3g} ms an iteration")
        if self.local:
            parts.append(self.local)
        return "; ".join(parts)


@dataclass(frozen=True)
class LeftOut:
    """A schedule that is not tried, and why; ``gain_s`` as above."""

    decision: Decision
    blocker: Blocker
    gain_s: float | None


def rooms(windows: Windows) -> tuple[Room, ...]:
    """The windows of an iteration, alike ones together, those that leave most unused first."""
    found = [Room.of(kind) for kind in windows.kinds()]
    return tuple(sorted(found, key=lambda room: -room.unused_s))


def propose(
    space: Sequence[Decision], seen: Evidence
) -> tuple[tuple[Proposal, ...], tuple[LeftOut, ...]]:
    """Which schedules to try, the most promising first, and which not."""
    tried: list[Proposal] = []
    left: list[LeftOut] = []
    kept: dict[Decision, Decision] = {}
    place = {decision: k for k, decision in enumerate(space)}
    # of what comes out as one code, program order says best what runs
    for decision in sorted(space, key=lambda one: one != Decision()):
        seconds = seen.seconds.get(decision)
        gain = None if seconds is None else seen.base_s - seconds
        code = seen.same.get(decision, decision)  # who was first to come out as this code
        local = seen.local.get(decision, "")
        blocker = _why_not(decision, seconds, seen.base_s, kept.get(code), local)
        aims: list[tuple[str, Room | str]] = []
        for move in _moves(decision, seen) if blocker is None else ():
            found = _support(move, seen, gain)
            if isinstance(found, Blocker):
                why = f"[{decision}] is not tried: {move.text}: {found.why}"
                if gain is not None:
                    why += f"; predicted {0.0 - 1e3 * gain:+.3g} ms over program order"
                blocker = Blocker(found.code, why)
                break
            aims.append((move.text, found))
        if blocker is None:
            tried.append(Proposal(decision, gain, tuple(aims), local))
            kept[code] = decision
        else:
            left.append(LeftOut(decision, blocker, gain))
    best = min(seen.seconds.values(), default=seen.base_s)
    tried.sort(key=lambda one: (_rank(seen.seconds.get(one.decision), best), place[one.decision]))
    left.sort(key=lambda one: place[one.decision])
    return tuple(tried), tuple(left)


def _rank(seconds: float | None, best: float) -> float:
    """What is alike has one rank; what was not predicted comes last."""
    if seconds is None:
        return math.inf
    return math.floor(math.log(max(seconds, 1e-12) / max(best, 1e-12)) / math.log(1.0 + ALIKE))


def _why_not(
    decision: Decision,
    seconds: float | None,
    base: float,
    other: Decision | None,
    local: str,
) -> Blocker | None:
    if other is not None:
        return Blocker(
            "predicted-slower",
            f"[{decision}] is not tried: it comes out as the same code as [{other}]",
        )
    if seconds is not None and seconds > (1.0 + USUAL_ERROR) * base:
        measured = f": {local}" if local else ""
        return Blocker(
            "predicted-slower",
            f"[{decision}] is not tried: predicted {1e3 * seconds:.4g} ms an iteration, "
            f"{1e3 * base:.4g} ms in program order{measured}",
        )
    return None


@dataclass(frozen=True)
class _Move:
    """What a schedule does in loops of one purpose, in the loop of that path, or anywhere."""

    text: str
    where: Purpose | tuple[str, ...] | None
    threads: bool = False


def _moves(decision: Decision, seen: Evidence) -> Iterator[_Move]:
    if decision.groups > 1:
        yield _Move(f"{decision.groups} groups in turn", "steps")
    if decision.late == "shadow":
        yield _Move("late work beside the steps", "steps")
    if decision.defer:
        yield _Move("late work in one call behind the loop", "steps")
    if decision.overlap:
        yield _Move("work that no training waits for on threads", None)
    if decision.accumulate:
        yield _Move("work on what was collected while more is collected", None)
    for one in decision.pipeline:
        yield _Move(f"trips of {one.loop} that overlap", tuple(one.loop.split("/")))
    for purpose, count in (
        ("rollout", decision.rollout_threads),
        ("update", decision.update_threads),
    ):
        if count is not None and any(r.purpose == purpose for r in seen.regions):
            what = f"{count} thread{'s' * (count != 1)} in {purpose}s"
            yield _Move(what, purpose, True)  # type: ignore[arg-type]


def _support(move: _Move, seen: Evidence, gain: float | None) -> Room | str | Blocker:
    """The windows that a move is meant for, or what else speaks for it, or why nothing does."""
    if move.where is None:
        paths: list[tuple[str, ...]] = [()]
    elif isinstance(move.where, tuple):
        paths = [move.where]
    else:  # a simulator in the program's own code has no steps
        paths = [r.path for r in seen.regions if r.purpose == move.where] or [()]
    inside = [r for r in seen.rooms if any(r.path[: len(p)] == p for p in paths)]
    unused = sum(r.unused_s for r in inside)
    room = next((r for r in inside if r.fits), inside[0]) if inside else None
    enough = room is not None and unused >= LEAST_UNUSED * seen.iteration_s
    if move.threads:
        return _threads(move, seen, room if enough else None)
    if enough:
        assert room is not None
        return room
    if gain is not None and gain >= LEAST_GAIN * seen.base_s:
        return "its prediction"
    where = ", ".join(" > ".join(p) for p in paths if p) or "the program"
    return Blocker(
        "no-window",
        f"windows in {where} leave {1e3 * unused:.3g} of {1e3 * seen.iteration_s:.4g} ms unused",
    )


def _threads(move: _Move, seen: Evidence, room: Room | None) -> Room | str | Blocker:
    """What speaks for a thread count. Another one changes nothing where operations keep one core
    busy, and threads of short operations spin, which looks like no window at all. In a rollout
    operations will stand beside others, who want the cores."""
    regions = [r for r in seen.regions if r.purpose == move.where]
    if move.where == "rollout":
        return room or "operations that will stand beside others"
    several = [r for r in regions if r.threads > ONE_THREAD]
    if not several:
        busy = max(r.threads for r in regions)
        return Blocker("predicted-slower", f"its operations keep {busy:.2f} cores busy as it is")
    if room is not None or any(r.each_s < SHORT_S for r in several):
        return room or "operations so short that threads wait for each other"
    busy, each = max((r.threads, r.each_s) for r in several)
    return Blocker(
        "no-window",
        f"its operations keep {busy:.2f} cores busy for {1e6 * each:.0f} µs each, and the device "
        "is active all the while",
    )
