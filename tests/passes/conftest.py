"""Golden files: a program as text goes in, the program after some passes and the remarks come out.

``ROSE_UPDATE_GOLDEN=1 pytest tests/passes`` writes the files anew; read the difference before it is
kept. The name has no ``ROSE_`` knob behind it, so it is taken out of the environment on import.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from rose_compiler.base.remarks import RemarkLog
from rose_compiler.ir.dump import dump
from rose_compiler.ir.parse import parse
from rose_compiler.ir.program import Program
from rose_compiler.ir.rewriter import Rewriter
from rose_compiler.passes.base import Pass, PassContext
from rose_compiler.passes.manager import History, PassManager

FOLDER = Path(__file__).parent / "golden"
UPDATE = os.environ.pop("ROSE_UPDATE_GOLDEN", "") not in ("", "0")

Golden = Callable[..., History]


def rendered(history: History) -> str:
    """What a golden file holds: the program at the end, then the remarks as comments."""
    remarks = history.remarks.render(width=96)
    lines = [f"# {line}".rstrip() for line in remarks.splitlines()]
    return history.after().rstrip("\n") + "\n\n" + "\n".join(lines) + "\n"


@pytest.fixture(autouse=True)
def alone(one_thread: None) -> None:
    """Two threads on a busy machine spin at each other's barriers, for minutes."""


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """``golden(case, passes, context)``: run passes over ``golden/<pass>/<case>.in.txt`` and
    compare with ``<case>.out.txt``. A program given as ``program=`` takes the place of the file."""

    def check(
        case: str,
        passes: Sequence[Pass],
        context: PassContext | None = None,
        *,
        program: Program | None = None,
        folder: str | None = None,
    ) -> History:
        where = FOLDER / (folder or passes[-1].name)
        if program is None:
            program = parse((where / f"{case}.in.txt").read_text(encoding="utf-8"))
        history = PassManager(passes, verify=2).run(program, context or PassContext())
        path = where / f"{case}.out.txt"
        found = rendered(history)
        if UPDATE:
            where.mkdir(parents=True, exist_ok=True)
            path.write_text(found, encoding="utf-8")
        assert path.exists(), f"no golden file {path}; write it with ROSE_UPDATE_GOLDEN=1"
        assert found == path.read_text(encoding="utf-8")
        return history

    return check


@pytest.fixture
def blocked() -> Callable[[str, Pass, PassContext | None], list[str]]:
    """``blocked(text, pass, context)``: the codes a pass gives on what it must not touch."""

    def codes(text: str, one: Pass, context: PassContext | None = None) -> list[str]:
        program, untouched = parse(text), parse(text)
        history = PassManager([one], verify=2).run(program, context or PassContext())
        Rewriter(untouched, RemarkLog(), "nothing").tidy()
        untouched.stage = program.stage
        assert history.after() == dump(untouched)
        assert not history.remarks.applied()
        return [r.code for r in history.remarks.missed()]

    return codes
