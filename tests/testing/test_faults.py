"""Faults at random points of compiled trainings: one clear error in time, and nothing left.

Each kind once; `python -m rose_compiler.testing faults --count 200` runs more.
"""

from __future__ import annotations

import itertools
import time

import pytest
from typer.testing import CliRunner

from rose_compiler.testing import faults
from rose_compiler.testing.__main__ import app
from rose_compiler.testing.fault_kinds import FAULTS, Fault, Stopped
from rose_compiler.testing.faults import inject


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault(name: str) -> None:
    fault = FAULTS[name]
    outcome = inject(fault, fault.hosts[0], 1)
    assert outcome.wrong == ""
    assert not outcome.hung
    assert outcome.seconds < faults.LIMIT + (fault.timeout or 0.0)


def test_a_fault_in_a_process() -> None:
    assert inject(FAULTS["unpicklable"], "process", 2).wrong == ""


def test_what_is_wrong_is_told() -> None:
    shard = FAULTS["shard"]
    other = Fault("other", shard.plant, (ZeroDivisionError,), lost=True)
    assert "expected ZeroDivisionError, got Fallen" in inject(other, "thread", 1).wrong
    kept = Fault("kept", FAULTS["coordinator"].plant, (Stopped,), lost=True)
    assert inject(kept, "thread", 1).wrong == "the next call worked on what is lost"
    none = Fault("none", lambda scene, draw: None, (Stopped,), lost=False)
    assert inject(none, "thread", 1).wrong == "nothing was raised"


def test_what_is_left_behind_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "SETTLE", 0.1)
    seen = iter([set()])
    monkeypatch.setattr(faults, "_left", lambda: next(seen, {"thread rose shard:0"}))
    outcome = inject(FAULTS["coordinator"], "thread", 1)
    assert outcome.wrong == "left behind: thread rose shard:0"


def test_a_hang_ends_the_command_and_a_pause_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []
    monkeypatch.setattr(faults, "_TICK", 0.01)
    monkeypatch.setattr(faults.os, "_exit", ended.append)
    monkeypatch.setattr(faults.faulthandler, "dump_traceback", lambda fd: None)
    with faults.ending(0.05):
        time.sleep(0.5)
    assert ended == [1]
    clock = itertools.count(0.0, 3600.0)  # as if the process were stopped for an hour at a time
    monkeypatch.setattr(faults.time, "monotonic", lambda: next(clock))
    with faults.ending(60.0):
        time.sleep(0.1)
    assert ended == [1]


def test_the_same_seed_plants_the_same() -> None:
    a, b = (inject(FAULTS["shard"], "thread", 3) for _ in range(2))
    assert a.error == b.error


def test_the_command_shows_a_table() -> None:
    ran = CliRunner().invoke(app, ["faults", "--count", "1", "--seed", "4"])
    assert ran.exit_code == 0, ran.output
    assert "1 faults, 0 hangs, 0 wrong" in ran.output
    assert "Fallen" in ran.output
