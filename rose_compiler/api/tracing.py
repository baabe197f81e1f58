"""Timelines of one iteration in Chrome's trace format, for Perfetto or ``chrome://tracing``.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
(complete events "X" with times in microseconds, metadata events "M").
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from rose_compiler.base import knobs, phases
from rose_compiler.base.callers import warn_caller
from rose_compiler.base.errors import SourceLocation, fail
from rose_compiler.base.faultmap import FaultMap
from rose_compiler.base.profile import Span
from rose_compiler.codegen.timed import Statement

COORDINATOR = "coordinator"


class Tracer:
    """Where the next iteration's timeline goes, if anywhere."""

    def __init__(self) -> None:
        self._next: Path | None = None

    def arm(self, path: str | Path) -> None:
        """Have the next iteration traced.

        Raises:
            ConfigError: when there can be no such file.
        """
        path = Path(path)
        if path.is_dir():
            raise fail(
                "config-argument",
                f"trace({str(path)!r}) is a folder",
                expected="the path of a file",
                help="name a file in it, like trace.json",
            )
        self._next = path

    @property
    def armed(self) -> bool:
        """Whether the next iteration is to be traced."""
        return self._next is not None or knobs.current().trace is not None

    def take(self) -> Path | None:
        """The file for the iteration that begins now."""
        armed, self._next = self._next, None
        if armed is not None:
            return armed
        setting = knobs.current().trace
        return None if setting is None else Path(setting)


@dataclass
class Trace:
    """One iteration as it ran. Times are seconds of :func:`time.perf_counter`."""

    function: str
    schedule: str
    start: float = field(default_factory=perf_counter)
    end: float = 0.0
    own: list[tuple[Statement, float, float]] = field(default_factory=list)
    spans: Sequence[Span] = ()
    faults: FaultMap | None = None

    def events(self) -> list[dict[str, Any]]:
        """The events: a lane is a thread, the coordinator the first."""
        lanes = dict.fromkeys(s.lane for s in sorted(self.spans, key=lambda s: s.start_s) if s.lane)
        threads = {COORDINATOR: 0, **{lane: k for k, lane in enumerate(sorted(lanes), 1)}}
        found: list[dict[str, Any]] = [_meta("process_name", 0, f"rose: {self.function}")]
        for lane, thread in threads.items():
            found.append(_meta("thread_name", thread, lane))
            found.append({**_meta("thread_sort_index", thread, ""), "args": {"sort_index": thread}})
        whole = {"function": self.function, "schedule": self.schedule}
        found.append(self._event(self.function, "iteration", 0, self.start, self.end, whole))
        for statement, start, end in self.own:
            about = _about(statement.where)
            found.append(self._event(statement.name, statement.kind, 0, start, end, about))
        free: dict[str, float] = {}
        for span in sorted(self.spans, key=lambda s: (s.start_s, s.end_s)):
            if span.kind == phases.KIND:
                thread = threads[span.lane or COORDINATOR]
                name = span.op.rpartition("/")[2]
                found.append(self._event(name, span.kind, thread, span.start_s, span.end_s, {}))
                continue
            # what was handed over early began when the lane was free
            start = max(span.start_s, free.get(span.lane, span.start_s))
            free[span.lane] = end = max(start, span.end_s)
            about = _about(self._where(span.site))
            found.append(self._event(span.op, "lane", threads[span.lane], start, end, about))
        return found

    def _where(self, site: int) -> SourceLocation | None:
        if self.faults is None or not 0 <= site < len(self.faults.sites):
            return None
        return self.faults.sites[site].where

    def _event(
        self, name: str, kind: str, thread: int, start: float, end: float, args: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            "ph": "X",
            "name": name,
            "cat": kind,
            "pid": os.getpid(),
            "tid": thread,
            "ts": round(max(0.0, start - self.start) * 1e6, 3),
            "dur": round(max(0.0, end - start) * 1e6, 3),
            "args": args,
        }

    def write(self, path: Path) -> None:
        """Write the file in one piece; a warning where that is not possible, since the iteration
        itself is done and right."""
        text = json.dumps({"traceEvents": self.events(), "displayTimeUnit": "ms"})
        try:
            write_whole(path, text)
        except OSError as error:
            warn_caller(f"no trace was written: {error}")


def write_whole(path: Path, text: str) -> None:
    """Write a text file so that a reader sees all of it or nothing; makes its folder.

    Raises:
        OSError: when it can't be written; nothing is left behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def _meta(name: str, thread: int, value: str) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": os.getpid(), "tid": thread, "args": {"name": value}}


def _about(where: SourceLocation | None) -> dict[str, Any]:
    if where is None:
        return {"line": ""}
    return {"line": str(where), "code": where.source}
