"""Which operations that record gradients have to keep their order, and that a dump says so."""

from __future__ import annotations

import pytest
import torch.fx as fx

from rose_compiler.base.errors import VerifyError
from rose_compiler.ir import facts
from rose_compiler.ir.deps import Dependences, why
from rose_compiler.ir.dump import dump
from rose_compiler.ir.facts import Slot, Spec
from rose_compiler.ir.parse import parse
from rose_compiler.ir.program import Program, is_call, op_of
from rose_compiler.ir.recorded import records
from rose_compiler.ir.verify import verify

TEXT = """
@op(reads=["w"], writes=[], records=["x", "w"])
def actor(x, w): ...

@op(reads=["w"], writes=[], records=["w.weight"])
def bias(w): ...

@op(reads=["v"], writes=[], records=["v"])
def critic(v): ...

@op(reads=[], writes=[], records=["h"])
def head(h): ...

@op(reads=[], writes=[], records=["h"])
def other(h): ...

@op(reads=[], writes=[], records=["*"])
def anything(x): ...

@op(reads=["w"], writes=[])
def looks(w): ...

def program(x, *, w, v):
    for t, carried in loop(0, 4, 1, carried=x):
        h = actor(x, w)
        b = bias(w)
        c = critic(v)
        y = head(h)
        z = other(h)
        k = looks(w)
        q = anything(c)
        yield y
    return loop.carried
"""


@pytest.fixture(scope="module")
def program() -> Program:
    return parse(TEXT)


def node(program: Program, name: str) -> fx.Node:
    return next(n for n in program.nodes() if is_call(n) and op_of(n).name == name)


def held(program: Program, a: str, b: str, distance: int = 0) -> str | None:
    edges = Dependences(program).between(node(program, a), node(program, b), distance)
    return next((e.state for e in edges if e.kind == "record"), None)


def test_users_of_one_tensor_keep_their_order(program: Program) -> None:
    assert held(program, "actor", "bias") == "w.weight"
    assert held(program, "head", "other") == "%h"
    blocker = why(program, node(program, "head"), node(program, "other"))
    assert blocker is not None
    assert blocker.code == "grad-graph"
    blocker = why(program, node(program, "bias"), node(program, "actor"), distance=1)
    assert blocker is not None
    assert "w" in blocker.why


def test_others_are_free(program: Program) -> None:
    assert why(program, node(program, "bias"), node(program, "looks")) is None
    free = parse(TEXT.replace("        q = anything(c)\n", ""))
    for a, b in (("actor", "critic"), ("bias", "head"), ("critic", "other")):
        assert why(free, node(free, a), node(free, b)) is None


def test_what_may_use_anything_is_ordered_with_all_that_record(program: Program) -> None:
    for name in ("bias", "other"):
        assert held(program, name, "anything") == "*"
    assert why(program, node(program, "looks"), node(program, "anything")) is None


def test_a_value_of_each_trip_orders_within_the_trip_only() -> None:
    program = parse(TEXT.replace("        q = anything(c)\n", ""))
    assert held(program, "other", "head", 1) is None
    # what a trip hands on is the next one's too
    text = TEXT.replace("        q = anything(c)\n", "").replace("other(h)\n", "other(carried)\n")
    program = parse(text.replace("yield y", "yield h"))
    chain = why(program, node(program, "head"), node(program, "other"), distance=1)
    assert chain is not None


def test_a_dump_holds_the_order(program: Program) -> None:
    again = parse(dump(program))
    assert held(again, "head", "other") == "%h"
    assert dump(again) == dump(program)


def test_without_a_word_the_type_of_the_result_tells() -> None:
    program = parse(TEXT.replace(', records=["h"]', ""))
    assert held(program, "head", "other") is None
    for name in ("head", "other"):
        facts.put(node(program, name), spec=Spec("tensor", requires_grad=True))
        assert records(node(program, name))
    assert held(program, "head", "other") == "*"


def test_nothing_that_records_runs_on_a_lane() -> None:
    scheduled = parse(TEXT)
    for k, each in enumerate(
        n for n in scheduled.nodes() if is_call(n) and op_of(n).kind == "block"
    ):
        facts.put(each, slot=Slot("thread:a" if op_of(each).name == "critic" else "", 0, k))
    scheduled.stage = "scheduled"
    with pytest.raises(VerifyError, match="records gradients on a lane"):
        verify(scheduled)
