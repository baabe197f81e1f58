"""What the points of an instrumented function stand for: frozen plain data.

A function emitted with ``tick=`` calls ``tick(k)`` behind each thing that its coordinator does; the
time since the tick before belongs to mark ``k`` of the list that the emitter returns beside the
text. Outside profiled iterations a function without ticks runs, so that they cost nothing then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rose_compiler.base.errors import SourceLocation

MarkKind = Literal["run", "submit", "wait", "trip", "leave"]


@dataclass(frozen=True)
class Mark:
    """One point of an instrumented function.

    ``run``, ``submit`` and ``wait`` stand behind what the coordinator did for the operation
    ``key``; ``trip`` at the beginning of a trip of the loop ``key``, ``leave`` behind the loop.
    ``path`` names the loops around it, outermost first; ``key`` is the path and the node's name,
    unique in a program. ``label`` is for people. What has ``stage`` s belongs to the program trip
    s trips before the emitted one.
    """

    kind: MarkKind
    key: str
    label: str
    path: tuple[str, ...] = ()
    lane: str = ""
    stage: int = 0
    where: SourceLocation | None = None


def key_of(path: tuple[str, ...], name: str) -> str:
    """The key of a node: its name behind those of the loops around it."""
    return "/".join((*path, name))
