"""Settings do what the README says: dumps, emitted code, remarks, traces, edited code."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rose_compiler
from rose_compiler.base.errors import ConfigError
from rose_compiler.base.knobs import KNOBS
from rose_compiler.ir.parse import parse
from tests.api.loops import Drift, Training, differing, iteration


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for knob in KNOBS.values():
        monkeypatch.delenv(knob.variable, raising=False)
    monkeypatch.setenv("ROSE_CACHE", "0")


@pytest.fixture
def training() -> Iterator[Training]:
    made = Training()
    yield made
    made.close()


def compiled(**options: Any) -> Any:
    return rose_compiler.compile(iteration, **{"numerics": "bitwise", "tune": False, **options})


def eager_bits(times: int) -> dict[str, Any]:
    plain = Training()
    plain.run(iteration, times)
    found = plain.bits()
    plain.close()
    return found


# -- ROSE_DUMP, ROSE_FACTS, ROSE_REMARKS


def test_a_dump_holds_every_pass_and_the_emitted_code(
    training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROSE_DUMP", str(tmp_path / "out"))
    fast = compiled()
    training.run(fast, 2)
    names = sorted(p.name for p in (tmp_path / "out").iterdir())
    passes = [name for name, _ in fast.history]
    assert names == [
        *(f"iteration.{k:02d}-{name}.py" for k, name in enumerate(passes)),
        f"iteration.{len(passes):02d}-emitted.py",
    ]
    assert (tmp_path / "out" / names[-1]).read_text() == fast.source
    last = (tmp_path / "out" / names[-2]).read_text()
    assert last.startswith(f"# rose ir | iteration | after {len(passes) - 1:02d} {passes[-1]}\n")
    assert last == fast.ir() + "\n" == fast.history[-1][1] + "\n"
    assert parse(last).stage == "scheduled"
    fast.close()


def test_a_block_dumps_a_function_that_has_run_before(training: Training, tmp_path: Path) -> None:
    fast = compiled()
    training.run(fast, 2)
    with rose_compiler.knobs(dump=tmp_path):
        training.run(fast, 1)
    assert (tmp_path / "iteration.00-captured.py").exists()
    fast.close()


def test_schedules_that_are_tried_dump_into_folders_of_their_own(
    training: Training, tmp_path: Path
) -> None:
    fast = compiled(tune=True, numerics="close")
    with rose_compiler.knobs(dump=tmp_path):
        training.run(fast, 2)
        fast._last.unit.build(rose_compiler.Decision(groups=2))
        fast._last.unit.build(rose_compiler.Decision(groups=2, defer=True))
    folders = {p.name for p in tmp_path.iterdir()}
    assert {"groups-2", "groups-2_defer-True"} <= folders
    assert (tmp_path / "groups-2" / "iteration.00-captured.py").exists()
    fast.close()


def test_facts_put_lines_and_passes_into_dumps(training: Training, tmp_path: Path) -> None:
    fast = compiled()
    with rose_compiler.knobs(dump=tmp_path / "plain"):
        training.run(fast, 2)
    with rose_compiler.knobs(dump=tmp_path / "facts", facts=True):
        training.run(fast, 1)
    plain, told = (
        next((tmp_path / folder).glob("*-tile_batch.py")).read_text()
        for folder in ("plain", "facts")
    )
    assert "loops.py:" not in plain
    assert "loops.py:" in told
    assert "by tile_batch" in told
    fast.close()


def test_remarks_are_printed_as_passes_make_them(
    training: Training, capsys: pytest.CaptureFixture[str]
) -> None:
    fast = compiled()
    with rose_compiler.knobs(remarks=True):
        training.run(fast, 2)
    err = capsys.readouterr().err
    assert "tile_batch [tile_batch]" in err
    training.run(fast, 1)
    assert capsys.readouterr().err == ""
    fast.close()


# -- settings of the runtime


def test_serial_in_a_block_holds_for_a_function_that_has_run_before(training: Training) -> None:
    fast = compiled()
    training.run(fast, 2)
    with rose_compiler.knobs(serial=True):
        training.run(fast, 1)
        assert fast.runtime.serial
    training.run(fast, 1)
    assert not fast.runtime.serial
    assert differing(training.bits(), eager_bits(4)) == []
    fast.close()


# -- ROSE_TRACE


def events(path: Path) -> list[dict[str, Any]]:
    data = json.loads(path.read_text())
    assert data["displayTimeUnit"] == "ms"
    return list(data["traceEvents"])


def check_trace(found: list[dict[str, Any]]) -> None:
    """Lanes as threads, operations that name the user's lines, nothing that crosses another."""
    names = {e["tid"]: e["args"]["name"] for e in found if e["name"] == "thread_name"}
    assert list(names.values()) == ["coordinator", "shard:0", "shard:1"]
    spans = [e for e in found if e["ph"] == "X"]
    assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in spans)
    lines, first = inspect.getsourcelines(iteration)
    step = next(first + k for k, line in enumerate(lines) if "envs.step" in line)
    steps = [e for e in spans if names[e["tid"]].startswith("shard")]
    assert len(steps) == 8
    assert {e["args"]["line"].rpartition(":")[2] for e in steps} == {str(step)}
    assert all(e["args"]["line"].startswith("tests/api/loops.py") for e in steps)
    own = [e for e in spans if names[e["tid"]] == "coordinator"]
    assert any(e["name"] == "for t" for e in own)
    update = next(first + k for k, line in enumerate(lines) if "loss =" in line)
    assert any(e["args"].get("line", "").endswith(f":{update}") for e in own)
    for tid in names:
        ordered = sorted((e for e in spans if e["tid"] == tid), key=lambda e: (e["ts"], -e["dur"]))
        open_ends: list[float] = []
        for event in ordered:
            while open_ends and open_ends[-1] <= event["ts"]:
                open_ends.pop()
            end = event["ts"] + event["dur"]
            assert not open_ends or end <= open_ends[-1] + 1e-3, "spans of one lane cross"
            open_ends.append(end)


def test_a_trace_has_lanes_as_threads_and_the_users_lines(
    training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROSE_TRACE", str(tmp_path / "trace.json"))
    fast = compiled()
    training.run(fast, 1)
    assert not (tmp_path / "trace.json").exists(), "the first iteration runs no schedule"
    training.run(fast, 2)
    check_trace(events(tmp_path / "trace.json"))
    assert differing(training.bits(), eager_bits(3)) == []
    assert [p.name for p in tmp_path.iterdir()] == ["trace.json"]
    fast.close()


def test_trace_writes_the_next_iteration_and_then_stops(training: Training, tmp_path: Path) -> None:
    fast = compiled()
    fast.trace(tmp_path / "trace.json")
    training.run(fast, 2)
    check_trace(events(tmp_path / "trace.json"))
    (tmp_path / "trace.json").unlink()
    training.run(fast, 1)
    assert not list(tmp_path.iterdir())
    with rose_compiler.knobs(trace=tmp_path / "block.json"):
        training.run(fast, 1)
    check_trace(events(tmp_path / "block.json"))
    fast.close()


def test_a_traced_iteration_that_raises_leaves_its_trace_and_shows_the_users_line(
    training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = compiled()
    training.run(fast, 2)
    fast.trace(tmp_path / "trace.json")
    broken = LookupError("broken")
    monkeypatch.setattr(Drift, "broken", broken)
    with pytest.raises(LookupError, match="broken") as caught:
        training.run(fast, 1)
    assert caught.value is broken
    assert any("raised by env_step" in note for note in broken.__notes__)
    assert events(tmp_path / "trace.json")
    fast.close()


def test_a_trace_that_can_not_be_written_is_refused_before_anything_runs(
    training: Training, tmp_path: Path
) -> None:
    fast = compiled()
    with pytest.raises(ConfigError, match="config-argument"):
        fast.trace(tmp_path)
    (tmp_path / "file").write_text("")
    fast.trace(tmp_path / "file" / "trace.json")
    training.run(fast, 1)
    with pytest.warns(UserWarning, match="no trace was written"):
        training.run(fast, 1)


# -- ROSE_EDIT


def test_an_edited_copy_runs_in_place_of_the_emitted_code(
    training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "copy.py"
    monkeypatch.setenv("ROSE_EDIT", str(path))
    fast = compiled()
    training.run(fast, 2)
    text = path.read_text()
    assert text == fast.source
    path.write_text(edited(text))
    again = compiled()
    training.run(again, 2)
    assert training.buffer.edited  # type: ignore[attr-defined]
    assert again.source == path.read_text()
    fast.close()
    again.close()


def test_an_edited_copy_is_run_in_a_block_too_and_only_there(
    training: Training, tmp_path: Path
) -> None:
    fast = compiled()
    training.run(fast, 2)
    path = tmp_path / "copy.py"
    path.write_text(edited(fast.source))
    with rose_compiler.knobs(edit=path):
        training.run(fast, 1)
    assert training.buffer.edited == 1  # type: ignore[attr-defined]
    training.buffer.edited = 2  # type: ignore[attr-defined]
    training.run(fast, 1)
    assert training.buffer.edited == 2  # type: ignore[attr-defined]
    fast.close()


def edited(source: str) -> str:
    lines = source.splitlines()
    at = next(k for k, line in enumerate(lines) if line.strip().startswith("return obs"))
    indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
    lines.insert(at, f"{indent}buffer.edited = 1")
    return "\n".join(lines) + "\n"


def test_an_edit_stops_tuning_and_says_so(training: Training, tmp_path: Path) -> None:
    with rose_compiler.knobs(edit=tmp_path / "copy.py"):
        fast = compiled(tune=True)
        training.run(fast, 2)
        assert fast.settled
        assert "ROSE_EDIT" in fast.explain()
    fast.close()


def test_a_copy_of_another_function_is_left_alone(training: Training, tmp_path: Path) -> None:
    path = tmp_path / "copy.py"
    text = (
        "# other, scheduled. An edited copy runs with ROSE_EDIT=<file>.\ndef run(rt):\n    pass\n"
    )
    path.write_text(text)
    with rose_compiler.knobs(edit=path):
        fast = compiled()
        training.run(fast, 2)
        assert "is a copy of 'other'" in fast.explain()
    assert path.read_text() == text
    fast.close()


def test_a_copy_that_names_what_the_program_does_not_have_is_refused(
    training: Training, tmp_path: Path
) -> None:
    path = tmp_path / "copy.py"
    fast = compiled()
    training.run(fast, 2)
    path.write_text(edited(fast.source).replace("buffer.edited = 1", "stale_name(buffer)"))
    with (
        rose_compiler.knobs(edit=path),
        pytest.raises(ConfigError, match="config-knob") as caught,
    ):
        training.run(fast, 1)
    assert "stale_name" in str(caught.value)
    fast.close()
