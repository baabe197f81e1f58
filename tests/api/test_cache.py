"""A second run starts with the schedule that the first one settled on."""

from __future__ import annotations

import json
import os
import pwd
import random
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rose_compiler
from rose_compiler.api import cache
from rose_compiler.base import knobs
from rose_compiler.base.decision import Decision
from tests.api.loops import Training, differing, iteration


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROSE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def training() -> Iterator[Training]:
    made = Training()
    yield made
    made.close()


def tune(training: Training, **options: Any) -> Any:
    """Tune with trials of one iteration, until a schedule is settled on."""
    fast = rose_compiler.compile(iteration, **{"numerics": "bitwise", **options})
    training.run(fast)
    fast._last.unit.tuning()._chooser.trial_s = 0.0
    for _ in range(300):
        if fast.settled:
            break
        training.run(fast)
    assert fast.settled
    fast.close()
    return fast


def settle(training: Training, **options: Any) -> Any:
    """Leave an entry as tuning does, without tuning."""
    fast = begin(training, **options)
    tuning = fast._last.unit.tuning()
    if tuning._entry is not None:
        tuning._entry.store(None, "nothing was faster")
    fast.close()
    return fast


def begin(training: Training, **options: Any) -> Any:
    """What a second run finds before its second iteration."""
    fast = rose_compiler.compile(iteration, **{"numerics": "bitwise", **options})
    training.run(fast)
    return fast


def entry(kept: Path) -> Path:
    (path,) = kept.iterdir()
    return path


def put(path: Path, decision: Decision | None) -> None:
    """Have the entry say something else, as tuning could have found it."""
    data = json.loads(path.read_text())
    data["decision"] = None if decision is None else decision.to_dict()
    path.write_text(json.dumps(data))


def notes(fast: Any) -> list[str]:
    return [r.why for r in fast._log if r.code == "decision-cache"]


def test_what_was_settled_on_is_there_at_once(training: Training, kept: Path) -> None:
    found = tune(training)
    assert begin(training)._last.unit.tuning().chosen == found._last.unit.tuning().chosen
    wanted = Decision(groups=2, late="shadow", defer=False)
    put(entry(kept), wanted)
    fast = begin(training)
    assert fast.settled
    assert fast.decision == wanted
    assert "an earlier run settled on it" in fast.explain()
    training.run(fast, 2)
    assert {"tile_batch", "late"} <= {name for name, _ in fast.history}
    fast.close()


def test_a_run_from_the_cache_has_eagers_bits(kept: Path) -> None:
    other = Training()
    settle(other)
    other.close()
    training = Training()
    put(entry(kept), Decision(groups=2, late="shadow", defer=True))
    fast = begin(training)
    training.run(fast, 3)
    plain = Training()
    plain.run(iteration, 4)
    assert differing(training.bits(), plain.bits()) == []
    plain.close()
    training.close()
    fast.close()


def test_eager_is_kept_too(training: Training, kept: Path) -> None:
    settle(training)
    put(entry(kept), None)
    fast = begin(training)
    assert fast.settled
    assert "the user's own statements" in fast.explain()
    fast.close()


def test_files_are_private_and_nothing_else_is_left(training: Training, kept: Path) -> None:
    settle(training)
    assert stat.S_IMODE(kept.stat().st_mode) == 0o700
    assert stat.S_IMODE(entry(kept).stat().st_mode) == 0o600
    data = json.loads(entry(kept).read_text())
    assert set(data) == {"format", "key", "decision", "verdict"}


def test_an_interrupted_write_leaves_the_whole_of_what_was_there(
    training: Training, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle(training)
    before = entry(kept).read_bytes()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        begin(training)._last.unit.tuning()._entry.store(Decision(groups=2), "faster")
    assert entry(kept).read_bytes() == before  # and no other file
    assert begin(training).settled


def test_another_make_machine_or_version_is_another_entry(
    training: Training, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle(training)
    assert not begin(training, numerics="close").settled
    assert not begin(training, run_ahead=False).settled
    wider = Training(shards=4)
    assert not begin(wider).settled
    wider.close()
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert not begin(training).settled
    finally:
        torch.set_num_threads(threads)
    assert begin(training).settled
    monkeypatch.setattr(rose_compiler, "__version__", "99.0")
    assert not begin(training).settled


def test_other_statements_are_another_entry(training: Training, kept: Path) -> None:
    settle(training)
    fast = rose_compiler.compile(shifted, numerics="bitwise")
    training.run(fast)
    assert not fast.settled
    fast.close()


def shifted(agent: Any, optimizer: Any, envs: Any, buffer: Any, obs: Any) -> Any:
    return iteration(agent, optimizer, envs, buffer, obs + 1)


CORRUPT = {
    "empty": b"",
    "cut": b'{"format": 1, "key"',
    "no object": b"[1, 2]",
    "deep": b"[" * 50000,
    "binary": bytes(range(256)),
    "another field": b'{"format": 1, "key": "KEY", "decision": {"groups": 2, "evil": "os.system"}}',
    "another value": b'{"format": 1, "key": "KEY", "decision": {"groups": "2"}}',
    "another key": b'{"format": 1, "key": "0", "decision": null}',
    "another format": b'{"format": 2, "key": "KEY", "decision": null}',
    "no candidate": b'{"format": 1, "key": "KEY", "decision": {"groups": 77}}',
}


@pytest.mark.parametrize("how", CORRUPT)
def test_a_corrupted_entry_is_deleted_with_a_remark(
    how: str, training: Training, kept: Path
) -> None:
    settle(training)
    path = entry(kept)
    key = json.loads(path.read_text())["key"]
    path.write_bytes(CORRUPT[how].replace(b"KEY", key.encode()))
    fast = begin(training)
    assert not fast.settled
    assert not path.exists()
    assert len(notes(fast)) == 1
    assert "tuning begins anew" in notes(fast)[0]
    training.run(fast)
    fast.close()


def test_an_entry_that_others_may_write_is_not_trusted(training: Training, kept: Path) -> None:
    settle(training)
    entry(kept).chmod(0o666)
    fast = begin(training)
    assert not fast.settled
    assert "others may have written it" in notes(fast)[0]
    assert entry(kept).exists()
    fast.close()


def test_mutated_entries_never_stop_a_run(training: Training, kept: Path) -> None:
    fast = settle(training)
    tuning = fast._last.unit.tuning()
    space, place = tuning._chooser.candidates, tuning._entry
    good, draw, used = entry(kept).read_bytes(), random.Random(0), 0
    for _ in range(300):
        data = bytearray(good)
        for _ in range(draw.randrange(1, 4)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        place.path.write_bytes(bytes(data))
        place.path.chmod(0o600)
        found = place.load(space)
        assert found is None or found in range(len(space))
        used += found is not None
    assert used < 300


def test_an_entry_whose_schedule_can_not_be_built_is_deleted(
    training: Training, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle(training)
    path = entry(kept)
    put(path, Decision(groups=2, late="shadow", defer=False))
    fast = begin(training)
    assert fast.settled
    unit, real = fast._last.unit, type(fast._last.unit).build

    def build(self: Any, decision: Decision) -> Any:
        if decision.groups:
            raise ZeroDivisionError("in a pass")
        return real(self, decision)

    monkeypatch.setattr(type(unit), "build", build)
    training.run(fast, 2)
    assert not path.exists()
    assert "failed" in notes(fast)[0]
    fast.close()


def test_it_can_be_switched_off(
    training: Training, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROSE_CACHE", "0")
    settle(training)
    assert not kept.exists()
    with rose_compiler.knobs(cache=kept):
        settle(training)
    assert entry(kept)
    with rose_compiler.knobs(cache=False):
        assert not begin(training).settled


@pytest.mark.parametrize(
    "settings", [{"passes": "-late"}, {"fuel": 3}, {"serial": True}, {"interp": True}]
)
def test_a_hunt_for_a_fault_keeps_nothing(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROSE_CACHE", "1")
    with rose_compiler.knobs(**settings) as now:
        assert cache.folder(now) is None


def test_the_users_folder_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROSE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.folder(knobs.current()) == tmp_path / "rose_compiler"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.folder(knobs.current()) == Path.home() / ".cache" / "rose_compiler"


def test_a_user_without_a_home_trains_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_CACHE_HOME", "ROSE_CACHE"):
        monkeypatch.delenv(name, raising=False)

    def unknown(uid: int) -> Any:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with knobs.knobs(cache=knobs.AUTO):
        assert cache.folder(knobs.current()) is None


def test_a_folder_that_can_not_be_written_is_a_remark(training: Training, kept: Path) -> None:
    kept.write_text("a file in its place")
    fast = settle(training)
    assert any("could not be kept" in note for note in notes(fast))


def test_the_tests_keep_nothing() -> None:
    assert os.environ["ROSE_CACHE"] == "0"
    assert cache.folder(knobs.current()) is None
