"""Counts the generated programs that tests ran, for the summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from rose_compiler.testing.fuzz import Result

_RAN: Counter[str] = Counter()


@pytest.fixture
def tally() -> Callable[[Result], None]:
    """Adds a run of the fuzzer to what the summary tells."""

    def add(result: Result) -> None:
        _RAN[result.kind] += result.programs

    return add


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _RAN:
        kinds = ", ".join(f"{kind} {n}" for kind, n in _RAN.items())
        terminalreporter.write_line(f"generated programs: {_RAN.total()} ({kinds})")
