"""The profiler: ticks to spans, CPU times to activity, iterations to medians."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from rose_compiler.base.machine import Machine
from rose_compiler.base.marks import Mark
from rose_compiler.base.profile import Activity, Profile, Span, Timeline
from rose_compiler.runtime import activity
from rose_compiler.runtime.activity import busy_cores, refined, share_of
from rose_compiler.runtime.clocks import LEAST_S, SHARE, Clocks, children, clock_of, parse_stat
from rose_compiler.runtime.profiler import summarize, timeline
from rose_compiler.runtime.recorder import Raw, Recorder, record
from rose_compiler.runtime.support import Runtime

TWO = Machine("two cores", 2)
MARKS = (
    Mark("trip", "loop", "loop"),  # 0
    Mark("run", "loop/act", "act", ("loop",)),  # 1
    Mark("submit", "loop/step", "step", ("loop",), "shard:0"),  # 2
    Mark("wait", "loop/step", "step", ("loop",), "shard:0", stage=1),  # 3
    Mark("run", "loop/late", "late", ("loop",), stage=1),  # 4
    Mark("leave", "loop", "loop"),  # 5
    Mark("run", "update", "update"),  # 6
)


def recorded(*ticks: tuple[int, float], begin: float = 10.0) -> Raw:
    """What a recorder holds behind these ticks; nothing ran on the cores but this thread."""
    return Raw(
        tuple(k for k, _ in ticks),
        (begin, *(t for _, t in ticks), ticks[-1][1]),
        ((begin, 0.0, 0.0, 0.0), (ticks[-1][1], 3.0, 3.0, 1.5)),
    )


# two trips: step of trip 0 is awaited in emitted trip 1, that of trip 1 behind the loop
TICKS = (
    (0, 10.0),
    (1, 11.0),
    (2, 11.25),
    (0, 11.25),
    (1, 12.25),
    (3, 13.0),
    (4, 13.5),
    (2, 13.75),
    (0, 13.75),
    (3, 15.0),
    (4, 15.5),
    (5, 15.5),
    (6, 16.0),
)
LANES = (
    # a process says when it began and ended; of the other only what the caller saw is known
    Span("step", "shard:0", 11.0, 13.0, cpu_s=1.5, ran_s=(11.125, 12.75)),
    Span("step", "shard:0", 13.75, 14.5, cpu_s=0.75),
)


def test_ticks_become_spans_with_trips() -> None:
    found = timeline(MARKS, recorded(*TICKS), LANES, TWO)
    runs = [(s.op, s.lane, s.trip, s.start_s, s.end_s) for s in found.spans]
    assert runs == [
        ("loop/act", "", (0,), 0.0, 1.0),
        ("loop/act", "", (1,), 1.25, 2.25),
        ("loop/late", "", (0,), 3.0, 3.5),
        ("loop/late", "", (1,), 5.0, 5.5),
        ("update", "", (), 5.5, 6.0),
        ("loop/step", "shard:0", (0,), 1.125, 2.75),
        ("loop/step", "shard:0", (1,), 3.75, 4.5),
    ]
    assert [(w.op, w.trip, w.duration_s) for w in found.waits] == [
        ("loop/step", (0,), 0.75),
        ("loop/step", (1,), 1.25),
    ]
    assert [h.duration_s for h in found.handoffs] == [0.25, 0.25]
    # the last one is the epilogue
    assert [(trip.op, trip.trip, trip.path) for trip in found.loops] == [
        ("loop", (0,), ("loop",)),
        ("loop", (1,), ("loop",)),
        ("loop", (2,), ("loop",)),
    ]
    assert found.overlap_s("", "shard:0") == pytest.approx(1.0)
    assert Timeline.from_dict(found.to_dict()) == found


def test_an_inner_loop_counts_its_trips_anew_on_each_trip_of_the_outer() -> None:
    marks = (
        Mark("trip", "a", "a"),
        Mark("trip", "a/b", "b", ("a",)),
        Mark("run", "a/b/x", "x", ("a", "b")),
        Mark("leave", "a/b", "b", ("a",)),
        Mark("leave", "a", "a"),
    )
    ticks = [0, 1, 2, 1, 2, 3, 0, 1, 2, 3, 4]
    made = recorded(*((k, 10.0 + 0.5 * i) for i, k in enumerate(ticks)))
    found = timeline(marks, made, (), TWO)
    assert [s.trip for s in found.spans] == [(0, 0), (0, 1), (1, 0)]
    inner = [s.trip for s in found.loops if s.op == "a/b"]
    assert inner == [(0, 0), (0, 1), (1, 0)]
    assert [s.trip for s in found.loops if s.op == "a"] == [(0,), (1,)]


def test_cpu_time_goes_to_what_ran_between_samples() -> None:
    samples = ((10.0, 0.0, 0.0, 0.0), (12.0, 1.5, 1.5, 0.0), (14.0, 2.0, 2.5, 1.0))
    made = replace(recorded((1, 11.0), (1, 12.0), (6, 14.0)), samples=samples)
    found = timeline(MARKS, made, (), TWO)
    assert [s.cpu_s for s in found.spans] == pytest.approx([0.75, 0.75, 0.5])
    assert [(a.start_s, a.end_s, a.share) for a in found.activity] == [
        (0.0, 2.0, pytest.approx(0.375)),
        (2.0, 4.0, pytest.approx(0.5)),
    ]
    assert [s.activity for s in found.spans] == pytest.approx([0.375, 0.375, 0.5])


def test_how_busy_operations_are_is_told_from_intervals_that_hold_several() -> None:
    # step keeps two cores busy and act one; only one interval has one of them alone
    pieces, samples, used, at = [], [(0.0, 0.0, 0.0, 0.0)], [0.0, 0.0, 0.0], 0.0
    for trip in range(6):
        for name, seconds, theirs in (("act", 0.004, 0.0), ("step", 0.008, 2.0)):
            pieces.append((at, at + seconds, name))
            at += seconds
            used = [used[0] + seconds * (theirs == 0), used[0], used[2] + seconds * theirs]
            if (trip, name) in ((0, "step"), (2, "act"), (2, "step"), (4, "act"), (5, "step")):
                samples.append((at, used[0], used[0], used[2]))
    found = refined(samples, pieces)
    assert set(samples) <= set(found)
    shares = {a.start_s: a.share for a in busy_cores(found, TWO)}
    for start, _, name in pieces:
        assert shares[start] == pytest.approx(0.5 if name == "act" else 1.0, abs=0.05)


class Counted(list):  # type: ignore[type-arg]
    """Counts the items that are taken out of it."""

    taken = 0

    def __getitem__(self, at):  # type: ignore[no-untyped-def]
        found = super().__getitem__(at)
        self.taken += len(found) if isinstance(at, slice) else 1
        return found


def test_pieces_are_gone_through_once_for_all_intervals(monkeypatch) -> None:
    pieces = Counted((k, k + 1.0, "ab"[k % 2]) for k in range(200))
    monkeypatch.setattr(activity, "_one_by_one", lambda *_: pieces)
    samples = [(4.5 * k, 4.0 * k, 4.0 * k, 0.0) for k in range(45)]
    refined(samples, pieces)
    assert pieces.taken <= 6 * (len(pieces) + len(samples))


def test_what_is_short_is_not_told_apart() -> None:
    samples = [(0.0, 0.0, 0.0, 0.0), (1.0, 1.0, 1.0, 0.0), (2.0, 1.5, 1.5, 0.0)]
    assert refined(samples, [(0.5, 0.5001, "blink")]) == samples
    assert refined(samples[:2], [(0.0, 0.4, "a"), (0.4, 1.0, "b")]) == samples[:2]


def test_samples_come_in_pairs_at_ticks_that_are_not_always_the_same(monkeypatch) -> None:
    recorder = Recorder()
    monkeypatch.setattr(recorder, "_sample", lambda time: recorder.samples.append((time,)) or time)
    recorder.begin()
    for _ in range(2000):
        recorder.tick(0)
    taken = [s[0] for s in recorder.samples[1:]]
    places = [recorder.times.index(t) for t in taken if t in recorder.times]
    assert len(places) > 40
    assert all(b - a == 1 for a, b in zip(places[::2], places[1::2], strict=False))
    assert len({place % 16 for place in places[::2]}) > 8


def test_an_accelerator_s_activity_is_the_spans_own() -> None:
    device = [Activity(10.0, 11.0, "cuda:0", 0.25), Activity(11.0, 16.0, "cuda:0", 0.75)]
    found = timeline(MARKS, recorded(*TICKS), LANES, TWO, device)
    assert found.spans[0].activity == 0.25
    assert found.spans[1].activity == 0.75
    assert {a.device for a in found.activity} == {"cuda:0", "cpu"}
    assert found.activity[0].start_s == 0.0


def test_medians_over_iterations() -> None:
    one = timeline(MARKS, recorded(*TICKS), LANES, TWO)
    profile = summarize([one, one], [6.0, 6.5], TWO)
    assert profile.iteration_s == (6.0, 6.5)
    step, act = profile.op("loop/step"), profile.op("loop/act")
    assert (act.count, act.median_s, act.lane, act.path) == (4, 1.0, "", ("loop",))
    assert (step.count, step.lane, step.label) == (4, "shard:0", "step")
    assert step.median_s == pytest.approx((1.625 + 0.75) / 2)
    assert step.launch_s == pytest.approx((0.125 + 0.25) / 2)
    assert step.wait_s == pytest.approx(1.0)
    assert step.submit_s == 0.25
    # 0.25 s from the end of each step to the end of its wait, 0.5 s in the second trip
    assert step.receive_s == pytest.approx((0.25 + 0.5) / 2)
    assert Profile.from_dict(profile.to_dict()) == profile


def test_a_recorder_takes_ticks_of_one_iteration_at_a_time() -> None:
    recorder, runtime = Recorder(), Runtime()

    def work() -> int:
        lane = runtime.lane("thread:0")
        task = lane.submit(3, sum, (1, 2))
        recorder.tick(1)
        found: int = task.wait()
        recorder.tick(0)
        return found

    try:
        for _ in range(2):
            result, spans = record(recorder, runtime, work)
            assert result == 3
            assert recorder.marks == [1, 0]
            assert len(recorder.times) == 4
            assert recorder.times == sorted(recorder.times)
            assert len(recorder.samples) >= 2
            (span,) = spans
            assert span.site == 3
            assert span.issue_s is not None
            assert span.issue_s <= span.start_s
            assert span.cpu_s is not None
        assert runtime.timeline == Timeline()
    finally:
        runtime.close()


def test_activity_is_cpu_time_over_cores() -> None:
    samples = [(0.0, 0.0, 0.0, 0.0), (1.0, 1.0, 1.0, 0.5), (2.0, 1.0, 1.0, 0.5), (3.0, 4, 9.0, 9.0)]
    found = busy_cores(samples, TWO)
    assert found == [
        Activity(0.0, 1.0, "cpu", 0.75),
        Activity(1.0, 2.0, "cpu", 0.0, resident=False),
        Activity(2.0, 3.0, "cpu", 1.0),
    ]
    assert share_of([(0.5, 1.5), (2.0, 3.0), (7.0, 8.0)], found) == [0.375, 1.0, 1.0]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_cpu_time_of_a_child_is_seen() -> None:
    code = "import time\nwhile time.process_time() < 0.2: pass\nprint(flush=True)\ninput()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert child.pid in children()
        clock = clock_of(child.pid)
        assert clock is not None
        assert clock() >= 0.2
        assert Clocks([child.pid]).read()[2] >= 0.2
        child.communicate("\n")
    assert clock() == 0.0, "a process that is gone has no time"


def test_reading_clocks_takes_a_small_share_of_the_time() -> None:
    clocks = Clocks([])
    assert clocks.pause(0.0) == LEAST_S
    assert clocks.pause(30e-6) == pytest.approx(30e-6 / SHARE)


def test_a_command_with_brackets_does_not_confuse_the_stat_line() -> None:
    line = "12 (a (b) c) S 1 2 3 4 5 6 7 8 9 10 314 86 0 0 20 0 1 0 100"
    assert parse_stat(line) == 400


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_stat_line_agrees_with_the_clock() -> None:
    start = time.process_time()
    while time.process_time() < start + 0.05:
        pass
    with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
        ticks = parse_stat(file.read())
    assert ticks / os.sysconf("SC_CLK_TCK") == pytest.approx(time.process_time(), abs=0.1)
