"""The benchmark commands: they import without running, and print what was measured."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

import pytest
from rich.console import Console

import bench
from bench import ppo_mujoco
from bench.loops import SHAPES
from bench.measure import Estimate
from bench.ppo_mujoco import Result, tables

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
        for table in tables(list(results)):
            console.print(table)
    return captured.get()


def test_ratios_and_room() -> None:
    result = made_up(1.25)
    assert result.room() == Estimate(2.0, 2.0, 2.0)
    assert result.ratio("E1", "compiled") == Estimate(1.6, 1.6, 1.6)
    used = result.room_used()
    assert used is not None
    assert used.median == 75.0
    text = printed(result)
    for cell in ("2000", "1400", "1250", "1.60", "1.43", "75", "12"):
        assert cell in text


def test_what_was_not_compiled_is_a_dash() -> None:
    result = made_up(None)
    assert result.ratio("E1", "compiled") is None
    assert result.room_used() is None
    assert "-" in printed(result)


def test_a_row_without_room_says_so() -> None:
    result = made_up(1.95, bound=1.9)
    assert result.room_used() is None
    assert "no room" in printed(result)


def test_an_unknown_shape_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    with pytest.raises(SystemExit):
        ppo_mujoco.main(["--shapes", "a,z", "--json", str(target)])
    assert "no shape 'z'" in capsys.readouterr().err
    assert not target.exists()
