"""Costs carried from the profile of one schedule to another one."""

from __future__ import annotations

import pytest

from rose_compiler.base.errors import SourceLocation
from rose_compiler.base.profile import LoopTime, OpTime, Profile
from rose_compiler.ir import facts
from rose_compiler.ir.keys import nodes_by_key
from rose_compiler.ir.parse import parse
from rose_compiler.ir.program import Program
from rose_compiler.tune.nest import Cost
from rose_compiler.tune.transfer import CALL_S, LAUNCH_S, SMALL_S, scaled, transfer

SIGNATURES = """
@op(kind="graph", reads=[], writes=[])
def act(x):
    a = torch.tanh(x)
    b = torch.exp(a)
    return b

@op(kind="step", reads=["env"], writes=["env"])
def step(action, env): ...

@op(reads=[], writes=[])
def late(x): ...

@op(reads=["log"], writes=["log"])
def note(log): ...
"""

PLAIN = """
def ppo(obs0, *, env, log):
    for t, obs in roll(0, 4, 1, obs=obs0):
        a = act(obs)
        v = late(obs)
        r = step(a, env)
        if v:
            note(log)
        yield r
    return roll.obs
"""

TILED = """
def ppo(obs0, *, env, log):
    for t, obs in roll(0, 4, 1, obs=obs0):
        a_0 = act(obs)
        r_0 = step(a_0, env)
        a_1 = act(obs)
        r_1 = step(a_1, env)
        both = concat(r_0, r_1)
        if both:
            note(log)
        yield both
    v = late(roll.obs)
    return v
"""


def program(text: str) -> Program:
    made = parse(SIGNATURES + text)
    lines = {"a": 1, "v": 2, "r": 3, "n": 4, "b": 5}
    for node in nodes_by_key(made).values():
        line = lines.get(node.name[0], 9)
        facts.put(node, origin=facts.Origin(SourceLocation("user.py", line, 0)))
    return made


def op(key: str, count: int, mean: float, **more: float) -> OpTime:
    return OpTime(key, count, mean, mean, mean_s=mean, **{"work_s": mean, **more})  # type: ignore[arg-type]


PROFILE = Profile(
    "m",
    (1.0, 1.0),
    (
        op("roll/a", 8, 1e-3),
        op("roll/v", 8, 2e-3),
        # two processes compute 4 ms each, beside 0.5 ms of the caller's own
        op("roll/r", 8, 4.5e-3, work_s=8.5e-3, cpu_s=0.5e-3),
        op("roll/note", 2, 3e-4),
    ),
    loops=(LoopTime("roll", 1.0, 4.0, 0.1),),
)


def test_the_same_program_costs_the_same() -> None:
    costs, times = transfer(PROFILE, program(PLAIN), program(PLAIN), shards=2)
    assert costs["roll/a"] == Cost(1e-3, 1e-3)
    assert costs["roll/r"].run_s == pytest.approx(4.5e-3)
    assert times["roll/a"] == 1.0
    assert times["roll/note"] == 0.25, "its branch is taken on one trip of four"


def test_tiles_keep_the_cost_of_their_calls() -> None:
    costs, _ = transfer(PROFILE, program(PLAIN), program(TILED), shards=2)
    fixed = 2 * CALL_S
    expected = fixed + (1e-3 - fixed) / 2
    assert costs["roll/a_0"].run_s == pytest.approx(expected)
    assert costs["roll/a_1"] == costs["roll/a_0"]
    assert costs["roll/a_0"].work_s == pytest.approx(expected)
    assert costs["roll/both"] == Cost(SMALL_S, SMALL_S)


def test_a_whole_step_is_taken_apart_into_its_shards() -> None:
    costs, _ = transfer(PROFILE, program(PLAIN), program(TILED), shards=2)
    step = costs["roll/r_0"]
    assert step.run_s == pytest.approx(4e-3)
    assert step.work_s == pytest.approx(4e-3)
    assert step.receive_s == pytest.approx(0.25e-3)
    assert step.launch_s == LAUNCH_S
    # two groups of two shards each: two cores for half the time
    four, _ = transfer(PROFILE, program(PLAIN), program(TILED), shards=4)
    assert four["roll/r_0"].run_s == pytest.approx(2e-3)
    assert four["roll/r_0"].demand == pytest.approx(2.0)


def test_a_simulator_that_sleeps_takes_as_long_in_parts() -> None:
    asleep = op("roll/r", 8, 4.5e-3, work_s=0.6e-3, cpu_s=0.5e-3)
    profile = Profile("m", (1.0, 1.0), (asleep,), loops=PROFILE.loops)
    costs, _ = transfer(profile, program(PLAIN), program(TILED), shards=2)
    assert costs["roll/r_0"].run_s == pytest.approx(4e-3)


def test_work_collected_over_a_loop_grows_with_its_trips() -> None:
    made = program(TILED)
    late = nodes_by_key(made)["v"]
    facts.put(late, origin=facts.get(late).origin.stamped("defer"))
    costs, times = transfer(PROFILE, program(PLAIN), made, shards=2)
    assert costs["v"].run_s == pytest.approx(CALL_S + 4 * (2e-3 - CALL_S))
    assert times["v"] == 1.0
    # what a loop does not need is done once and costs what it did
    costs, _ = transfer(PROFILE, program(PLAIN), program(TILED), shards=2)
    assert costs["v"].run_s == pytest.approx(2e-3)


def test_scaling_keeps_the_cores_that_are_busy() -> None:
    two_threads = Cost(1e-3, 2e-3)
    assert scaled(two_threads, 0.5, 10).demand == pytest.approx(2.0)
    assert scaled(two_threads, 1.0, 10) is two_threads
    assert scaled(Cost(5 * CALL_S, 5 * CALL_S), 0.25, 10).run_s == pytest.approx(5 * CALL_S)


SPLIT = """
def ppo(obs0, *, env, log):
    for t, obs in roll(0, 4, 1, obs=obs0):
        a = act(obs)
        r = step(a, env)
        yield r
    for t_2, seen in roll_late(0, 4, 1, seen=obs0):
        v = late(seen)
        yield v
    return roll.obs
"""


def test_a_loop_split_off_another_one_has_its_trips() -> None:
    made = program(SPLIT)
    nodes = nodes_by_key(made)
    for key in ("roll_late", "roll_late/v"):
        node = nodes[key]
        facts.put(node, origin=facts.get(node).origin.stamped("defer"))
    plain = program(PLAIN)
    for of in (made, plain):
        roll = nodes_by_key(of)
        for key in ("roll", "roll_late"):
            if key in roll:
                facts.put(roll[key], origin=facts.Origin(SourceLocation("user.py", 7, 0)))
    costs, times = transfer(PROFILE, plain, made, shards=2)
    assert times["roll_late/v"] == 1.0
    assert costs["roll_late/v"].run_s == pytest.approx(2e-3), "not the work of all trips, each trip"
