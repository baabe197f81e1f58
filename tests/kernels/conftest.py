"""How recurrences come to be computed in C at once."""

from __future__ import annotations

from typing import Any

import pytest

from rose_compiler.base.recurrence import Recurrence
from rose_compiler.kernels import native, scan_cpu, scan_native


@pytest.fixture
def at_once(monkeypatch) -> None:
    """Recurrences are compiled when they first run, and that is waited for."""
    monkeypatch.setattr(scan_native, "AFTER_S", -1.0)
    poll = native.Build.poll
    monkeypatch.setattr(native.Build, "poll", lambda self, wait=0.0: poll(self, 60.0))
    monkeypatch.setattr(scan_native, "_kernels", {})


@pytest.fixture
def no_numpy(monkeypatch, at_once) -> list[Recurrence]:
    """The recurrences that ran on numpy."""
    found: list[Recurrence] = []
    original = scan_cpu.run

    def watched(given: Any) -> Any:
        found.append(given.of)
        return original(given)

    monkeypatch.setattr(scan_cpu, "run", watched)
    return found
