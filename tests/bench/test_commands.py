"""The benchmark commands: they import without running, and print what was measured."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path

import pytest
from rich.console import Console

import bench
from bench import ppo_mujoco
from bench.loops import SHAPES
from bench.measure import Estimate
from bench.ppo_mujoco import Result, table

MODULES = [m.name for m in pkgutil.iter_modules(bench.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imports_without_running(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    importlib.import_module(f"bench.{name}")
    assert capfd.readouterr().out == ""


def made_up(compiled: float | None, bound: float = 1.0) -> Result:
    """A result whose times are E1 2 s, H 1.4 s and what is given."""
    times = {"E0": 3.0, "E1": 2.0, "H": 1.4, "work": 1.8, "E1 rollout": 1.2, "H rollout": 0.8}
    if compiled is not None:
        times |= {"compiled": compiled, "compiled rollout": 0.6}
    scores = {name: [seconds] * 15 for name, seconds in times.items()}
    capacity = Estimate(1.8, 1.7, 1.9)
    tuned = None if compiled is None else 12.0
    chosen = {"E1": "2 shards"}
    return Result("c", SHAPES["c"], capacity, 0.5, scores, [bound] * 15, chosen, 0.0, tuned)


def printed(*results: Result) -> str:
    console = Console(width=160)
    with console.capture() as captured:
        console.print(table(list(results)))
    return captured.get()


def test_ratios_and_room() -> None:
    result = made_up(1.25)
    assert result.room() == Estimate(2.0, 2.0, 2.0)
    assert result.ratio("E1", "compiled") == Estimate(1.6, 1.6, 1.6)
    used = result.room_used("compiled")
    assert used is not None
    assert used.median == 75.0
    rows = dict(re.findall(r"^│ (.*?) +│ +(.*?) │$", printed(result), re.MULTILINE))
    assert rows["E1, ms"] == "2000"
    assert rows["compiled, ms"] == "1250"
    assert rows["bound, ms"] == "1000"
    assert rows["E1 / compiled"] == "1.60 [1.60, 1.60]"
    assert rows["E1 rollout / H rollout"] == "1.50 [1.50, 1.50]"
    assert rows["room used by H, %"] == "60 [60, 60]"
    assert rows["room used by compiled, %"] == "75 [75, 75]"
    assert rows["tuned, s"] == "12"


def test_what_was_not_compiled_is_a_dash() -> None:
    result = made_up(None)
    assert result.ratio("E1", "compiled") is None
    rows = dict(re.findall(r"^│ (.*?) +│ +(.*?) │$", printed(result), re.MULTILINE))
    for name in ("compiled, ms", "E1 / compiled", "room used by compiled, %", "tuned, s"):
        assert rows[name] == "-"
    assert rows["E1 / H"] == "1.43 [1.43, 1.43]"


def test_a_row_without_room_says_so() -> None:
    result = made_up(1.95, bound=1.9)
    assert result.room_used("compiled") is None
    assert "no room" in printed(result)


def test_an_unknown_shape_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    with pytest.raises(SystemExit):
        ppo_mujoco.main(["--shapes", "a,z", "--json", str(target)])
    assert "no shape 'z'" in capsys.readouterr().err
    assert not target.exists()
