"""Paired timing on data made up for it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from bench import measure, quiet
from bench.measure import Estimate, abba, bootstrap, bounds, fastest, ratio, room_used


def test_bootstrap_covers_the_median_and_narrows_with_more_data() -> None:
    rng = np.random.default_rng(1)
    few = bootstrap(rng.normal(3.0, 1.0, 15).tolist())
    many = bootstrap(rng.normal(3.0, 1.0, 1500).tolist())
    for estimate in (few, many):
        assert estimate.low <= estimate.median <= estimate.high
    assert many.low < 3.0 < many.high
    assert many.high - many.low < (few.high - few.low) / 3


def test_bootstrap_of_equal_values_is_a_point() -> None:
    assert bootstrap([2.0] * 15) == Estimate(2.0, 2.0, 2.0)


def test_ratio_pairs_neighbours_so_that_common_drift_cancels() -> None:
    drift = np.linspace(1.0, 10.0, 15)
    slow, fast = (1.5 * drift).tolist(), drift.tolist()
    assert ratio(slow, fast) == Estimate(1.5, 1.5, 1.5)
    assert ratio(slow, fast[::-1]).high > 3


def test_ratio_refuses_scores_that_are_not_paired() -> None:
    with pytest.raises(ValueError, match="shorter"):
        ratio([1.0, 2.0], [1.0])


def test_bound_is_the_larger_of_critical_path_and_shared_work() -> None:
    assert bounds([1.0, 2.0, 4.0], capacity=2.0, critical_path=0.9) == [0.9, 1.0, 2.0]
    assert bounds([4.0], capacity=2.3, critical_path=0.9) == [2.0]


def test_room_used_is_the_share_of_the_way_to_the_bound() -> None:
    used = room_used([2.0] * 9, [1.25] * 9, [1.0] * 9)
    assert (used.median, used.low, used.high) == (0.75, 0.75, 0.75)
    assert room_used([2.0] * 9, [2.5] * 9, [1.0] * 9).median == -0.5


def test_room_used_of_noisy_scores_has_an_interval_around_it() -> None:
    rng = np.random.default_rng(2)
    noise = rng.normal(0, 0.02, (3, 15))
    used = room_used(*(m + n for m, n in zip((2.0, 1.5, 1.0), noise, strict=True)))
    assert used.low < 0.5 < used.high
    assert used.high - used.low < 0.2


def test_abba_turns_the_order_of_every_other_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "NOISE", 2.0)
    ran: list[str] = []
    steps = {"a": lambda: ran.append("a"), "b": lambda: ran.append("b")}
    scores = abba(steps, pairs=3, min_seconds=0.0)
    assert "".join(ran) == "abbaab"
    assert {name: len(s) for name, s in scores.seconds.items()} == {"a": 3, "b": 3}
    assert scores.noisy == 0


def test_abba_repeats_trials_beside_other_load_and_counts_those_that_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measure, "NOISE", -1.0)  # every trial counts as loud
    ran: list[str] = []
    scores = abba({"a": lambda: ran.append("a")}, pairs=4, min_seconds=0.0)
    assert len(ran) == 4 + 2
    assert len(scores.seconds["a"]) == scores.noisy == 4


class FakeTime:
    """A clock that stands still unless a step advances it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.steps = 0
        monkeypatch.setattr(measure, "perf_counter", lambda: self.now)
        monkeypatch.setattr(measure, "NOISE", 2.0)

    def step(self, seconds: float) -> None:
        self.now += seconds
        self.steps += 1


def test_a_trial_runs_whole_steps_until_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeTime(monkeypatch)
    assert measure.trial(lambda: clock.step(0.25), min_seconds=0.6) == 0.25
    assert clock.steps == 3
    assert measure.trial(lambda: clock.step(4.0), min_seconds=0.6) == 4.0
    assert clock.steps == 4


def test_the_fastest_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeTime(monkeypatch)
    durations = {"slow": iter([9.0, 2.0, 2.0, 2.0]), "fast": iter([99.0, 1.0, 8.0, 1.0])}
    steps = {name: lambda d=d: clock.step(next(d)) for name, d in durations.items()}
    # the first step of each only warms up; one bad trial of three does not decide
    assert fastest(steps, pairs=3, min_seconds=0.5) == "fast"
    assert fastest({"only": lambda: pytest.fail("no need to run it")}, 1, 0.5) == "only"


def test_capacity_counts_calls_of_copies_in_processes() -> None:
    found = measure.rates(["import time\ndef f(): time.sleep(0.02)"] * 2, seconds=0.3)
    # sleeping takes no core, so that both copies run at the full rate
    assert len(found) == 2
    assert all(0 < rate < 50 for rate in found)


def test_a_copy_that_fails_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="did not start"):
        measure.rates(["raise SystemExit(3)"])


NEEDS_PROC = pytest.mark.skipif(not os.path.exists("/proc/stat"), reason="needs /proc")


@NEEDS_PROC
def test_work_of_a_child_is_not_taken_for_a_bystander() -> None:
    code = "import time\nwhile time.process_time() < 0.4: pass\nprint('done', flush=True); input()"
    before = quiet._Used.now().own
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    child.stdout.readline()
    alive = quiet._Used.now().own - before
    child.communicate(b"\n")
    reaped = quiet._Used.now().own - before
    # in ticks of 10 ms
    assert alive >= 35
    assert reaped >= 35


@NEEDS_PROC
def test_work_outside_the_tree_is_seen() -> None:
    # the shell leaves its child to somebody else, and ends; run() waits for the pipe to close
    code = "import time\nwhile time.process_time() < 0.3: pass"
    before = quiet._Used.now()
    subprocess.run(
        ["sh", "-c", f'"{sys.executable}" -c "{code}" & exit'], stdout=subprocess.PIPE, check=True
    )
    time.sleep(0.05)
    assert quiet._Used.now().others_since(before) >= 20


class Machine:
    """A `/proc` of made-up processes: number -> (parent, ran, reaped), in ticks."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.now = 0.0
        monkeypatch.setattr(quiet, "_PROC", folder)
        monkeypatch.setattr(quiet, "perf_counter", lambda: self.now)
        monkeypatch.setattr(quiet.os, "cpu_count", lambda: 2)
        monkeypatch.setattr(quiet.os, "sysconf", lambda name: 100)
        monkeypatch.setattr(quiet.os, "getpid", lambda: 7)

    def at(
        self, second: float, busy: int, processes: dict[int, tuple[int, int, int]], stolen: int = 0
    ) -> None:
        self.now = second
        for entry in self.folder.glob("[0-9]*"):
            shutil.rmtree(entry)
        (self.folder / "stat").write_text(f"cpu  {busy - stolen} 0 0 0 0 0 0 {stolen} 0 0\n")
        for pid, (parent, ran, reaped) in processes.items():
            (self.folder / str(pid)).mkdir()
            fields = [parent, *[0] * 9, ran, 0, reaped, 0, *[0] * 4, pid]
            text = f"{pid} (a (name) of it) S {' '.join(map(str, fields))}\n"
            (self.folder / str(pid) / "stat").write_text(text)


def test_bystanders_are_seen_beside_a_tree_that_the_kernel_counts_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(tmp_path, monkeypatch)
    machine.at(0.0, 1000, {1: (0, 5, 0), 7: (1, 100, 0), 8: (7, 50, 0), 9: (1, 300, 0)})
    watch = quiet.Bystanders()
    # 150 ticks of the cores were seen: 40 another's, 110 of the tree's, which really were 150
    machine.at(1.0, 1150, {1: (0, 5, 0), 7: (1, 200, 0), 8: (7, 100, 0), 9: (1, 340, 0)})
    assert watch.share() == pytest.approx(40 / 200)


def test_what_only_the_cores_tell_of_counts_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(tmp_path, monkeypatch)
    machine.at(0.0, 1000, {7: (1, 100, 0)})
    watch = quiet.Bystanders()
    machine.at(1.0, 1150, {7: (1, 200, 0)}, stolen=10)
    assert watch.share() == pytest.approx(50 / 200)


def test_processes_that_begin_and_end_meanwhile_are_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(tmp_path, monkeypatch)
    machine.at(0.0, 0, {2: (1, 10, 100), 3: (2, 400, 0), 7: (1, 9, 30), 8: (7, 200, 0)})
    watch = quiet.Bystanders()
    # 3 has run 20 more and ended; 4 has begun; 8, of the tree, has ended
    machine.at(1.0, 0, {2: (1, 11, 520), 4: (2, 5, 0), 7: (1, 19, 260)})
    assert watch.share() == pytest.approx((1 + 20 + 5) / 200)


def test_the_share_of_bystanders_is_a_share() -> None:
    watch = quiet.Bystanders()
    time.sleep(0.05)
    assert 0.0 <= watch.share() <= 1.0


def test_the_machine_line_names_cores_and_versions() -> None:
    line = measure.machine()
    assert "cores of" in line
    assert "torch" in line
