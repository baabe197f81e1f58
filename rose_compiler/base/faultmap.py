"""What must be known about emitted code to explain a fault in it: frozen plain data.

The emitter writes a :class:`FaultMap` beside the source; the executor reads it when an operation
raises, to find out which operation came first in program order and which states are ahead of or
behind the program in its own order.

A body is one level of the program: the function itself, or what a loop or branch runs. A scheduled
loop body is issued in a fixed order; what has stage ``s`` belongs in emitted trip ``e`` to program
trip ``e - s``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rose_compiler.base.errors import SourceLocation


@dataclass(frozen=True)
class Site:
    """One operation of the program and where it is issued.

    ``position`` is its place in program order within its body and ``order`` its place in issue
    order. ``writes`` are the states that it writes. ``lane`` is empty for the coordinator.
    """

    name: str
    body: int
    position: int
    stage: int = 0
    order: int = 0
    lane: str = ""
    writes: tuple[str, ...] = ()
    where: SourceLocation | None = None


@dataclass(frozen=True)
class Level:
    """Where an emitted line stands in one body.

    The line issues or awaits the operation ``site``, or lies inside of it if that is a loop or a
    branch. ``stage`` and ``order`` are those of the line: an await has its own. ``epilogue`` is 0
    inside the loop; behind it, it counts from 1 the trips that finish what the loop began.
    """

    site: int
    stage: int = 0
    order: int = 0
    epilogue: int = 0


@dataclass(frozen=True)
class Issue:
    """One action of a scheduled body as text that can be run once more, modes included.

    ``site`` is -1 for what only moves values.
    """

    site: int
    stage: int
    order: int
    text: str


@dataclass(frozen=True)
class Body:
    """One level of the program.

    ``trips`` is the local variable that counts emitted trips, empty where trips do not overlap.
    ``issues`` are the actions of a scheduled body in issue order and ``end`` what it does behind
    them on each trip; its stages spread over ``depth`` further trips.
    """

    trips: str = ""
    depth: int = 0
    issues: tuple[Issue, ...] = ()
    end: str = ""


@dataclass(frozen=True)
class FaultMap:
    """Sites and bodies by index, emitted lines by number.

    A line has one :class:`Level` a body around it, outermost first.
    """

    filename: str
    sites: tuple[Site, ...] = ()
    bodies: tuple[Body, ...] = ()
    lines: Mapping[int, tuple[Level, ...]] = field(default_factory=dict)
