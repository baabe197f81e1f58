"""The fuzzer: it finds planted faults, and says which programs it ran."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from rose_compiler.ir.deps import Dependences
from rose_compiler.testing import fuzz as fuzzing
from rose_compiler.testing.__main__ import app
from rose_compiler.testing.fuzz import KINDS, fuzz


@pytest.mark.parametrize("kind", ["nests", "rollouts", "functions", "aliasing"])
def test_sound_programs_pass(kind: str) -> None:
    found = fuzz(kind, 8, 3)
    assert found.failure is None
    assert found.programs == 8
    assert sum(found.rewrites.values()) > 0


def test_a_seed_draws_the_same_programs() -> None:
    assert fuzz("nests", 6, 5).rewrites == fuzz("nests", 6, 5).rewrites


def test_dropped_dependences_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    edges = Dependences.edges

    def dropped(self: Dependences, graph: Any) -> Any:
        return tuple(e for e in edges(self, graph) if e.kind == "value")

    monkeypatch.setattr(Dependences, "edges", dropped)
    found = fuzz("functions", 60, 0)
    assert found.failure is not None
    assert "def main" in found.failure, "the program that differs is shown"


def test_the_command_tells_what_it_ran() -> None:
    ran = CliRunner().invoke(app, ["fuzz", "--programs", "3", "--seed", "1", "--kinds", "nests"])
    assert ran.exit_code == 0, ran.output
    assert "nests: 3 programs" in ran.output
    assert "all the same" in ran.output


def test_the_command_fails_with_the_program_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(data: Any, result: Any, folder: Any) -> None:
        raise AssertionError("it differs at x[g] of x[:ok:]")

    monkeypatch.setitem(KINDS, "nests", broken)
    ran = CliRunner().invoke(app, ["fuzz", "--programs", "3", "--kinds", "nests"])
    assert ran.exit_code == 1
    assert "DIFFERENT" in ran.output
    assert "it differs at x[g] of x[:ok:]" in ran.output
    assert fuzzing.fuzz("nests", 3, 0).programs == 1


def test_the_command_names_unknown_kinds() -> None:
    ran = CliRunner().invoke(app, ["fuzz", "--kinds", "nest"])
    assert ran.exit_code == 2
    assert "nests" in ran.output
