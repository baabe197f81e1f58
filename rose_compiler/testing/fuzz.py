"""Random programs against the executors: what can be seen afterwards stays the same.

Each kind of program has a check that draws from hypothesis and raises ``AssertionError`` with what
differs. :func:`fuzz` runs one for many programs from one seed, and shrinks the first failure.
"""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from rose_compiler.testing import aliasing, functions
from rose_compiler.testing.check_critics import critics
from rose_compiler.testing.check_iterations import iterations
from rose_compiler.testing.check_programs import (
    groups,
    lanes,
    nests,
    pipelines,
    references,
    rollouts,
    streams,
    updates,
)
from rose_compiler.testing.check_sources import (
    captured,
    hosted,
    losses,
    recurrences,
    streamed,
    trainings,
)
from rose_compiler.testing.result import Check
from rose_compiler.testing.result import Result as Result

#: The checks by name.
KINDS: dict[str, Check] = {
    "nests": nests,
    "lanes": lanes,
    "rollouts": rollouts,
    "references": references,
    "pipelines": pipelines,
    "updates": updates,
    "streams": streams,
    "groups": groups,
    "functions": captured(functions),
    "aliasing": captured(aliasing),
    "recurrences": recurrences,
    "trainings": trainings,
    "streamed": streamed,
    "losses": losses,
    "critics": critics,
    "hosted": hosted,
    "iterations": iterations,
}


def fuzz(kind: str, count: int, seed: int, *, shrink: bool = True) -> Result:
    """Check ``count`` random programs of one kind, the same ones for the same seed. The first that
    differs is made smaller with ``shrink``.

    Raises ``KeyError`` for a kind that is not in :data:`KINDS`.
    """
    check, result = KINDS[kind], Result(kind)
    shrinking = False
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")

        @seeded(seed)
        @settings(
            max_examples=count,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, *[Phase.shrink] * shrink],
            report_multiple_bugs=False,
        )
        @given(data=st.data())
        def run(data: Any) -> None:
            nonlocal shrinking
            try:
                check(data, result, Path(name))
                # a program that hypothesis gives up half drawn has left by now
                result.programs += not shrinking
            except Exception as error:
                result.programs += not shrinking
                shrinking = True
                # one place to be raised at: else each file of a generated module is another fault
                raise AssertionError(f"{type(error).__name__}: {error}\n{result.shown}") from None

        try:
            run()
        except Exception as error:
            notes = "\n".join(getattr(error, "__notes__", ()))
            result.failure = f"{error}\n{notes}".rstrip()
    return result
