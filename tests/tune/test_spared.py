"""What a part of a graph that stands in front of a loop would take on every trip."""

from __future__ import annotations

import pytest

from rose_compiler.base.profile import LoopTime, OpTime, Profile
from rose_compiler.ir.keys import nodes_by_key
from rose_compiler.ir.parse import parse
from rose_compiler.ir.program import is_call, op_of
from rose_compiler.passes.base import PassContext
from rose_compiler.passes.hoist import HoistInvariant
from rose_compiler.passes.manager import PassManager
from rose_compiler.tune.spared import spared

TEXT = """
@op(kind="graph", reads=["w"], writes=[], may_raise=False)
def act(obs, w):
    a = torch.tanh(w)
    b = a * 2.0
    c = torch.exp(b)
    d = c + 1.0
    e = torch.nn.functional.linear(obs, d)
    return e

def f(obs0, T, *, agent):
    w = state(agent, "w")
    for n in outer(0, T, 1):
        for t, obs in inner(0, T, 1, obs=obs0):
            x = act(obs, w)
            yield x
        yield ()
    return T
"""


def test_the_gain_is_the_time_of_the_trips_that_are_spared() -> None:
    program = parse(TEXT)
    PassManager([HoistInvariant()]).run(program, PassContext())
    (key,) = (k for k, n in nodes_by_key(program).items() if op_of(n).attributes.get("once"))
    loops = {
        k: n for k, n in nodes_by_key(program).items() if is_call(n) and op_of(n).name == "loop"
    }
    assert sorted(loops) == ["outer", "outer/inner"]
    profile = Profile(
        "here",
        (0.1, 0.1, 0.1),
        ops=(OpTime(key, 6, 0.002, 0.002, mean_s=0.002),),
        loops=(LoopTime("outer", 1, 3, 0.1), LoopTime("outer/inner", 3, 5, 0.1)),
    )
    (remark,) = spared(program, profile)
    # twice an iteration, and 3 times 5 trips each time
    assert remark.gain == pytest.approx(2 * 0.002 * 14)
    assert "used on 15 trips" in remark.why


def test_nothing_is_told_of_what_was_not_seen() -> None:
    program = parse(TEXT)
    PassManager([HoistInvariant()]).run(program, PassContext())
    assert list(spared(program, Profile("here", ()))) == []
