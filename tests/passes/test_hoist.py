"""hoist: what is the same on every trip goes in front of the loop; a test per reason to refuse."""

from __future__ import annotations

import pytest

from rose_compiler.ir.parse import parse
from rose_compiler.passes.base import PassContext
from rose_compiler.passes.hoist import HoistInvariant
from rose_compiler.passes.manager import PassManager


def test_out_of_two_loops(golden) -> None:
    golden("invariants", [HoistInvariant()])


REFUSED = {
    "reads-loop-state": (
        """
@op(reads=["agent.w"], writes=[], may_raise=False)
def cast(agent): ...

@op(reads=["agent"], writes=["agent"], results=0)
def train(agent, h): ...

def f(T, *, agent):
    for t in trips(0, T, 1):
        h = cast(agent)
        train(agent, h)
        yield ()
    return T
"""
    ),
    "may-not-run": (
        """
@op(reads=[], writes=[])
def encode(x): ...

@op(reads=["log"], writes=["log"], results=0)
def note(log, h): ...

def f(x, T, *, log):
    for t in trips(0, T, 1):
        h = encode(x)
        note(log, h)
        yield ()
    return T
"""
    ),
    "unknown-effects": (
        """
@op()
def mystery(x): ...

def f(x):
    for t in trips(0, 3, 1):
        h = mystery(x)
        yield ()
    return x
"""
    ),
    "may-alias": (
        """
@op(reads=[], writes=[], may_raise=False)
def fresh(x): ...

@op(reads=["h"], writes=["h"], results=0)
def add_one(h): ...

def f(x):
    for t in trips(0, 3, 1):
        h = fresh(x)
        add_one(h)
        yield ()
    return x
"""
    ),
    "retained-instance": (
        """
@op(reads=[], writes=[], may_raise=False)
def fresh(x): ...

@op()
def keep(h): ...

def f(x):
    for t in trips(0, 3, 1):
        h = fresh(x)
        k = keep(h)
        yield ()
    return x
"""
    ),
}


@pytest.mark.parametrize("code", REFUSED)
def test_refused(blocked, code: str) -> None:
    assert code in blocked(REFUSED[code], HoistInvariant())


def test_an_exit_in_front_may_keep_it_from_running(blocked) -> None:
    text = """
@op(reads=[], writes=[])
def encode(x): ...

@op(reads=["log"], writes=["log"], results=0)
def note(log, h): ...

def f(x, flag, *, log):
    for t in trips(0, 3, 1):
        break_if(flag, ())
        h = encode(x)
        note(log, h)
        yield ()
    return x
"""
    assert blocked(text, HoistInvariant()) == ["may-not-run"]


def test_known_trips_allow_what_may_raise() -> None:
    program = parse(REFUSED["may-not-run"])
    history = PassManager([HoistInvariant()]).run(program, PassContext(trips={"trips": 5}))
    assert len(history.remarks.applied()) == 1
    program = parse(REFUSED["may-not-run"])
    history = PassManager([HoistInvariant()]).run(program, PassContext(trips={"trips": 0}))
    assert not history.remarks.applied()


def test_a_mutable_local_stays() -> None:
    text = """
@op(reads=[], writes=[], may_raise=False)
def make(x): ...

@op(reads=["s"], writes=["s"], results=0)
def push(s, t): ...

def f(x):
    for t in trips(0, 3, 1):
        s: state = make(x)
        push(s, t)
        yield ()
    return x
"""
    program = parse(text)
    history = PassManager([HoistInvariant()], verify=2).run(program)
    assert not history.remarks.applied()
