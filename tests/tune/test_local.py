"""Measured points of operations: read off, carried to the costs of schedules, told as figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rose_compiler.base.errors import SourceLocation
from rose_compiler.base.profile import LoopTime, OpTime, Profile
from rose_compiler.ir import facts
from rose_compiler.ir.keys import nodes_by_key
from rose_compiler.ir.parse import parse
from rose_compiler.ir.program import LoopView, Program
from rose_compiler.tune.figures import figures
from rose_compiler.tune.local import Local, Point
from rose_compiler.tune.transfer import scaled, transfer, uses

SIGNATURES = """
@op(kind="graph", reads=[], writes=[])
def act(x):
    a = torch.tanh(x)
    return a

@op(reads=[], writes=[])
def other(x): ...
"""
PLAIN = """
def ppo(obs0):
    for t, obs in roll(0, 4, 1, obs=obs0):
        a = act(obs)
        b = other(a)
        yield a
    return roll.obs
"""
TILED = """
def ppo(obs0):
    for t, obs in roll(0, 4, 1, obs=obs0):
        a_0 = act(obs)
        a_1 = act(obs)
        b = other(a_1)
        yield a_0
    return roll.obs
"""
WHERE = {name: SourceLocation("user.py", line, 0) for line, name in enumerate("abr", 1)}
ACT = "act", str(WHERE["a"])
PROFILE = Profile(
    "m",
    (0.02,),
    (
        OpTime("roll/a", 4, 4e-3, 4e-3, mean_s=4e-3, work_s=8e-3),
        OpTime("roll/b", 4, 1e-4, 1e-4, mean_s=1e-4, work_s=1e-4),
    ),
    loops=(LoopTime("roll", 1.0, 4.0, 0.0164),),
)


def program(text: str, threads: int = 0) -> Program:
    made = parse(SIGNATURES + text)
    for node in nodes_by_key(made).values():
        facts.put(node, origin=facts.Origin(WHERE[node.name[0]]))
    loop = nodes_by_key(made)["roll"]
    facts.put(loop, loop=replace(LoopView(loop).facts, threads=threads))
    return made


def local(*points: tuple[float, int, float], noise: float = 0.02) -> Local:
    made = [Point(r, n, s, s * (1 - noise), s * (1 + noise)) for r, n, s in points]
    return Local(2, {ACT: made}, {ACT: 8})


def test_seconds_are_read_off_between_the_points_and_beyond_them() -> None:
    known = local((0.5, 2, 3.0), (1.0, 2, 4.0), (8.0, 2, 18.0), (1.0, 1, 7.0))
    assert known.seconds(ACT) == 4.0
    assert known.seconds(ACT, 0.5, 2) == 3.0
    assert known.seconds(ACT, 1.0, 1) == 7.0
    assert known.seconds(ACT, 4.5) == pytest.approx(11.0)
    assert known.seconds(ACT, 64.0) == pytest.approx(130.0)
    assert known.seconds(ACT, 0.25) == pytest.approx(2.5)
    assert known.seconds(ACT, 0.5, 1) is None, "on one thread only the whole batch is known"
    assert known.seconds(("late", "")) is None
    # fewer rows never take less than their share, more rows never less than fewer
    steep = local((0.5, 2, 1.0), (1.0, 2, 4.0))
    assert steep.seconds(ACT, 0.25) == pytest.approx(0.5)
    falling = local((1.0, 2, 4.0), (2.0, 2, 3.0))
    assert falling.seconds(ACT, 4.0) == 3.0


def test_a_tile_costs_what_was_measured_on_as_many_rows() -> None:
    # all weights are read whatever the rows: a call on half of them takes as long
    costs, _ = transfer(PROFILE, program(PLAIN), program(TILED), local=local((1.0, 2, 2e-3)))
    guessed, _ = transfer(PROFILE, program(PLAIN), program(TILED))
    assert costs["roll/a_0"] == guessed["roll/a_0"], "nothing was measured on half of the rows"
    known = local((0.5, 2, 1.9e-3), (1.0, 2, 2e-3))
    costs, _ = transfer(PROFILE, program(PLAIN), program(TILED), local=known)
    # in proportion: alone it is twice as fast as in the iteration that was profiled
    assert costs["roll/a_0"].run_s == pytest.approx(3.8e-3)
    assert costs["roll/a_0"].demand == pytest.approx(2.0)
    assert costs["roll/b"] == guessed["roll/b"]


def test_another_thread_count_costs_what_was_measured_with_it() -> None:
    known = local((1.0, 2, 2e-3), (1.0, 1, 3e-3))
    costs, _ = transfer(PROFILE, program(PLAIN), program(PLAIN, threads=1), local=known)
    assert costs["roll/a"].run_s == pytest.approx(6e-3)
    assert costs["roll/a"].work_s == pytest.approx(6e-3), "one thread keeps one core busy"
    same, _ = transfer(PROFILE, program(PLAIN), program(PLAIN), local=known)
    assert same["roll/a"].run_s == pytest.approx(4e-3)
    # both at once: rows that were not measured on one thread are guessed from those that were
    both, _ = transfer(PROFILE, program(PLAIN), program(TILED, threads=1), local=known)
    assert both["roll/a_0"] == scaled(costs["roll/a"], 0.5, 1)


def test_figures_name_what_changes_and_whether_it_is_slower_beyond_noise() -> None:
    def told(known: Local, text: str = TILED, threads: int = 0) -> tuple[str, bool]:
        found = figures(uses(PROFILE, program(PLAIN), program(text, threads)), known)
        said = found.removesuffix("; slower beyond noise")
        return said, said != found

    text, slower = told(local((0.5, 2, 1.9e-3), (1.0, 2, 2e-3)))
    assert text == "`act` alone takes 15.2 ms an iteration in calls of 4 rows, 8 in calls of 8"
    assert slower
    assert not told(local((0.5, 2, 1.9e-3), (1.0, 2, 2e-3), noise=0.4))[1]
    assert not told(local((0.5, 2, 0.9e-3), (1.0, 2, 2e-3)))[1]
    one = local((1.0, 1, 3e-3), (1.0, 2, 2e-3))
    text, slower = told(one, PLAIN, 1)
    assert text == "`act` alone takes 12 ms an iteration with 1 thread, 8 with 2"
    assert slower
    same = uses(PROFILE, program(PLAIN), program(PLAIN))
    assert figures(same, one) == "", "the same calls on the same rows"
