"""Named stretches inside opaque components: noted while somebody profiles, free otherwise.

``with rose_compiler.phase("render"):`` runs where the component lives: on the coordinator, on a
lane's thread, or in a worker process. While :func:`recording` or :func:`collecting` is in force, it
leaves its name and its times there; a worker sends them back with the answer of the call.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter

from rose_compiler.base.profile import Span
from rose_compiler.base.spanlog import SpanLog

#: Kind of the spans that stand for phases.
KIND = "phase"
#: What the names of lanes' threads begin with.
THREAD = "rose "
_OURS = (THREAD, THREAD.strip() + "-")  # the latter those of components in threads

#: A phase that ended: its names, outermost first and joined by "/", start and end.
Ended = tuple[str, float, float]

_recorders: list[list[Span] | SpanLog] = []


def in_lane() -> bool:
    """Whether this thread is one of a lane, or of a component in a thread."""
    return threading.current_thread().name.startswith(_OURS)


class _Mine(threading.local):
    def __init__(self) -> None:
        self.names: list[str] = []
        self.into: list[Ended] | None = None


_mine = _Mine()


def wanted() -> bool:
    """Whether anybody wants to know of phases that run now in this thread."""
    return bool(_recorders) or _mine.into is not None


def enter(name: str) -> float:
    """A phase begins; when, for :func:`leave`."""
    _mine.names.append(name)
    return perf_counter()


def leave(start: float) -> None:
    """The phase that began last in this thread, at ``start``, ends."""
    ended = ("/".join(_mine.names), start, perf_counter())
    _mine.names.pop()
    hand_on([ended])


def hand_on(ended: Iterable[Ended]) -> None:
    """Leave phases of this thread, or of what it waited for, where its own go."""
    if _mine.into is not None:
        _mine.into.extend(ended)
    else:
        note(ended)


def note(ended: Iterable[Ended], lane: str | None = None) -> None:
    """Leave phases with whoever records; ``lane`` is that of this thread by default."""
    if not _recorders:
        return
    if lane is None:
        name = threading.current_thread().name
        lane = name.removeprefix(THREAD) if name.startswith(THREAD) else ""
    _recorders[-1].extend(Span(name, lane, a, b, kind=KIND) for name, a, b in ended)


@contextmanager
def recording(into: list[Span] | SpanLog) -> Iterator[None]:
    """Note the phases of all threads of this process as spans of kind :data:`KIND`."""
    _recorders.append(into)
    try:
        yield
    finally:
        del _recorders[next(k for k, one in enumerate(_recorders) if one is into)]


@contextmanager
def collecting() -> Iterator[list[Ended]]:
    """Note the phases of this thread in the list that is given, and nowhere else."""
    ended: list[Ended] = []
    before = divert(ended)
    try:
        yield ended
    finally:
        divert(before)


def divert(into: list[Ended] | None) -> list[Ended] | None:
    """Note the phases of this thread in a list from now on, or with whoever records (None); where
    they went before. For what runs so often that :func:`collecting` would be felt."""
    before, _mine.into = _mine.into, into
    return before


class _Phase:
    """A named stretch of the user's code. It is noted while a profile is taken, nothing else."""

    __slots__ = ("_start", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self._start: float | None = None

    def __enter__(self) -> None:
        if wanted():
            self._start = enter(self.name)

    def __exit__(self, *exc: object) -> None:
        if self._start is not None:
            start, self._start = self._start, None
            leave(start)


def phase(name: str) -> _Phase:
    """Name a stretch of code: ``with rose_compiler.phase("render"): ...``.

    Profiles and windows show it, in worker processes too. It never changes what the code does.
    """
    return _Phase(name)


phase.__rose_phase__ = True  # type: ignore[attr-defined]
