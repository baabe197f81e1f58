"""Windows say which schedules are tried and in which order; what wins today is among the first.

The recorded evidence is that of the trainings of ``bench.workloads`` at full size, one iteration
each in program order, written by ``python -m bench.search --record``.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rose_compiler.base.decision import Decision, Pipelined
from rose_compiler.base.profile import Window
from rose_compiler.tune.chooser import Chooser
from rose_compiler.tune.search import Evidence, LeftOut, Proposal, Region, Room, propose, rooms
from rose_compiler.tune.space import candidates
from rose_compiler.tune.windows import Windows

RECORDED = Path(__file__).parent / "recorded"
#: Schedules tried beside eager of which one has to be what wins.
FIRST = 4

ROLLOUT = Room(("steps",), "cpu", False, 64, 0.3, 0.5, ("env_step",), ("late",))
UPDATE = Room(("epochs",), "cpu", False, 16, 0.1, 0.5, ("backward",))
REGIONS = (
    Region(("steps",), "steps", 1.6, 1e-3),
    Region(("steps",), "rollout", 1.6, 1e-3),
    Region(("epochs",), "update", 1.6, 1e-3),
)
SPACE = [
    one
    for one in candidates(2, close=True, threads=2, asynchronous=True, eager=True)
    if one is not None
]


def seen(**changes: object) -> Evidence:
    known = Evidence(1.0, 1.0, (ROLLOUT, UPDATE), REGIONS, dict.fromkeys(SPACE, 1.0), {})
    return replace(known, **changes)  # type: ignore[arg-type]


def left_out(found: tuple[LeftOut, ...], part: str) -> dict[Decision, str]:
    return {one.decision: one.blocker.code for one in found if part in one.blocker.why}


def test_each_candidate_names_the_windows_it_is_meant_for() -> None:
    tried, left = propose(SPACE, seen())
    assert not left
    assert [one.decision for one in tried] == SPACE
    both = next(p for p in tried if p.decision.defer and p.decision.update_threads == 1)
    assert dict(both.aims)["2 groups in turn"] == ROLLOUT
    assert dict(both.aims)["1 thread in updates"] == UPDATE
    assert "windows in steps: 64 x 4.69 ms, 50% active, while env_step runs" in str(both)
    assert "windows in epochs: 16 x 6.25 ms" in str(both)
    assert "predicted +0 ms an iteration" in str(both)


def test_what_no_window_and_no_prediction_speaks_for_is_left_out_with_the_figure() -> None:
    small = replace(ROLLOUT, total_s=0.01)
    tried, left = propose(SPACE, seen(rooms=(UPDATE, small)))
    cut = [d for d in SPACE if d.groups == 2]
    assert left_out(left, "windows in steps leave 5 of 1000 ms unused") == dict.fromkeys(
        cut, "no-window"
    )
    assert [p.decision for p in tried] == [d for d in SPACE if d not in cut]
    # a predicted gain speaks for them all the same
    seconds = {d: 0.9 if d.groups else 1.0 for d in SPACE}
    tried, left = propose(SPACE, seen(rooms=(UPDATE, small), seconds=seconds))
    assert not left
    assert dict(tried[0].aims)["2 groups in turn"] == "its prediction"
    assert tried[0].gain_s == pytest.approx(0.1)


def test_the_greatest_predicted_gain_is_tried_first_and_what_is_alike_keeps_its_order() -> None:
    seconds = dict.fromkeys(SPACE, 0.99)
    seconds[SPACE[2]] = 0.8
    seconds[SPACE[3]] = 0.802
    tried, _ = propose(SPACE, seen(seconds=seconds))
    assert [SPACE.index(p.decision) for p in tried] == [2, 3, 0, 1, 4, 5, 6]
    del seconds[SPACE[0]]  # not predicted
    tried, _ = propose(SPACE, seen(seconds=seconds))
    assert tried[-1].decision == SPACE[0]
    assert tried[-1].gain_s is None


def test_what_is_predicted_much_slower_than_program_order_is_not_tried() -> None:
    _, left = propose(SPACE, seen(seconds={SPACE[0]: 1.3, SPACE[1]: 1.2}))
    (only,) = left
    assert only.decision == SPACE[0]
    assert only.blocker.code == "predicted-slower"
    assert "predicted 1300 ms an iteration, 1000 ms in program order" in only.blocker.why
    assert only.gain_s == pytest.approx(-0.3)


def test_what_was_measured_of_a_schedule_is_told_with_it() -> None:
    text = "`act` alone takes 600 ms an iteration in calls of 4 rows, 310 in calls of 8"
    told = dict.fromkeys((SPACE[0], SPACE[3]), text)
    tried, left = propose(SPACE, seen(seconds={SPACE[0]: 1.3, SPACE[3]: 0.7}, local=told))
    (only,) = left
    assert only.decision == SPACE[0]
    assert only.blocker.code == "predicted-slower"
    assert f"predicted 1300 ms an iteration, 1000 ms in program order: {text}" in only.blocker.why
    # what windows make up for is tried all the same
    assert tried[0].decision == SPACE[3]
    assert str(tried[0]).endswith(text)


def test_one_of_those_that_come_out_as_the_same_code_is_tried() -> None:
    tried, left = propose(SPACE, seen(same={SPACE[1]: SPACE[0], SPACE[3]: SPACE[0]}))
    assert SPACE[0] in [p.decision for p in tried]
    assert set(left_out(left, "comes out as the same code")) == {SPACE[1], SPACE[3]}
    # the first of them is left out for a move that another one does not make
    calm = (replace(REGIONS[2], threads=1.0),)
    space = [SPACE[2], SPACE[0], SPACE[1]]
    same = {SPACE[0]: SPACE[2], SPACE[1]: SPACE[2]}
    tried, left = propose(space, seen(regions=(*REGIONS[:2], *calm), same=same))
    assert [p.decision for p in tried] == [SPACE[0]]
    assert set(left_out(left, "the same code")) == {SPACE[1]}
    # program order says what runs
    plain = Decision()
    tried, left = propose([*SPACE[:2], plain], seen(same={plain: SPACE[0]}))
    assert [p.decision for p in tried] == [SPACE[1], plain]
    assert set(left_out(left, "the same code as [program order]")) == {SPACE[0]}


@pytest.mark.parametrize(
    ("threads", "each_s", "active", "tried"),
    [
        (1.0, 1e-3, False, False),  # nothing runs on a second thread
        (1.9, 1e-3, True, False),  # long operations on two threads, both busy
        (1.9, 1e-3, False, True),  # two threads, and windows all the same
        (1.9, 1e-4, True, True),  # threads of short operations spin
    ],
)
def test_threads_of_updates_need_threads_that_wait(
    threads: float, each_s: float, active: bool, tried: bool
) -> None:
    update = replace(REGIONS[2], threads=threads, each_s=each_s)
    found = (ROLLOUT,) if active else (ROLLOUT, UPDATE)
    proposals, _ = propose(SPACE, seen(rooms=found, regions=(*REGIONS[:2], update)))
    assert any(p.decision.update_threads for p in proposals) is tried
    assert any(p.decision.rollout_threads for p in proposals)


def test_trips_overlap_only_in_a_loop_with_windows() -> None:
    inner, outer = (
        Decision(pipeline=(Pipelined(loop, 1),)) for loop in ("epochs/batches", "epochs")
    )
    tried, left = propose([inner, outer], seen(seconds={}))
    assert [p.decision for p in tried] == [outer]
    assert left_out(left, "windows in epochs > batches leave 0 of") == {inner: "no-window"}


def test_windows_alike_are_one_room() -> None:
    found = [
        Window(k, k + 0.5, "cpu", 0.5, "steps", 1, path=("steps",), trip=(k,), running=("step",))
        for k in range(3)
    ]
    other = Window(4.0, 6.0, "cpu", 0.1, path=(), idle=True)
    first, second = rooms(Windows([*found, other], 7.0))
    assert (first.idle, first.path, first.unused_s) == (True, (), pytest.approx(1.8))
    assert (second.count, second.total_s, second.running) == (3, 1.5, ("step",))
    assert str(first) == "outside loops: 1 x 2e+03 ms, nothing is resident"


def test_the_search_goes_by_the_order_and_leaves_out_what_it_is_told_to() -> None:
    chooser = Chooser([None, *SPACE])
    chooser.arrange([SPACE[3], SPACE[1]], {SPACE[0]: "left out: no window"})
    tried = []
    while not chooser.settled:
        if not tried or tried[-1] != chooser.current:
            tried.append(chooser.current)
        chooser.record(chooser.current, 1.0)
    assert tried[:6] == [0, 4, 2, 3, 5, 6]
    assert 1 not in tried
    assert chooser.reports()[1].verdict == "left out: no window"
    with pytest.raises(ValueError, match="under way"):
        chooser.arrange([], {})


#: What wins today, as docs/workloads.md has it; what tuning adds later (compile) apart.
WINNERS = {
    "ppo-a-close": Decision(groups=1, defer=True, lanes="inline", rollout_threads=1, fuse=True),
    "ppo-a-bitwise": Decision(groups=1, lanes="inline"),
    "ppo-b-close": Decision(groups=4, late="shadow", defer=True, rollout_threads=1, fuse=True),
    "ppo-c-close": Decision(groups=2, late="shadow", defer=True, rollout_threads=1, fuse=True),
    "ppo-d-close": Decision(groups=2, late="shadow", defer=True, rollout_threads=1, fuse=True),
    "ppo-d-bitwise": Decision(groups=2, late="shadow"),
    # no loop of it only trains, so the same with update_threads=1 is the same code
    "sac-close": Decision(groups=1, late="shadow", defer=True, rollout_threads=1, fuse=True),
    "ppo-torch-close": Decision(rollout_threads=1, fuse=True),
    "dppo-close": Decision(groups=2, late="shadow", defer=True, rollout_threads=1, fuse=True),
    "ppo-random-close": Decision(groups=2, late="shadow", defer=True, rollout_threads=1, fuse=True),
}


def recorded(name: str) -> tuple[list[Decision], Evidence]:
    data = json.loads((RECORDED / f"{name}.json").read_text(encoding="utf-8"))
    return [Decision.from_dict(d) for d in data["space"]], Evidence.from_dict(data["evidence"])


@pytest.mark.parametrize("name", WINNERS)
def test_what_wins_today_is_among_the_first_that_are_tried(name: str) -> None:
    space, known = recorded(name)
    tried, left = propose(space, known)
    winner = WINNERS[name]
    assert winner in space
    code = known.same.get(winner, winner)
    first = [known.same.get(p.decision, p.decision) for p in tried[:FIRST]]
    assert code in first, [str(p.decision) for p in tried]
    assert len(tried) + len(left) == len(space)
    assert all(isinstance(p, Proposal) and p.aims for p in tried)


def test_recorded_evidence_survives_json() -> None:
    _, known = recorded("ppo-c-close")
    known = replace(known, local={SPACE[0]: "act"})
    assert Evidence.from_dict(json.loads(json.dumps(known.to_dict()))) == known
