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


COLLECTED = """
@op(reads=[], writes=[], records=[])
def zeros(): ...

@op(reads=[], writes=["seen[t]"], results=0, records=[])
def store(seen, t, x):
    # seen[t] = x
    ...

@op(reads=["w"], writes=[], records=["seen", "w"])
def policy(seen, w): ...

@op(reads=["v"], writes=[], records=["seen", "v"])
def model(seen, v): ...

def program(x, *, w, v):
    seen = zeros()
    for t in rollout(0, 4, 1):
        store(seen, t, x)
        yield ()
    a = policy(seen, w)
    b = model(seen, v)
    return a, b
"""


def collected(text: str = COLLECTED, spec: Spec | None = None) -> str | None:
    program = parse(text)
    facts.put(node(program, "zeros"), spec=spec or Spec("tensor", dtype="float32", shape=(4,)))
    return held(program, "policy", "model")


def test_what_no_operation_records_into_orders_nobody() -> None:
    assert collected() is None


@pytest.mark.parametrize(
    ("old", "new"),
    [
        # a write that records, one that nothing is known of, and by code that is not there
        ("results=0, records=[]", 'results=0, records=["x"]'),
        ("results=0, records=[]", "results=0"),
        ('@op(reads=[], writes=["seen[t]"]', '@op(kind="component", reads=[], writes=["seen[t]"]'),
        ('@op(reads=[], writes=["seen[t]"], results=0, records=[])', "@op(results=0)"),
        ("# seen[t] = x", "# seen.requires_grad_()"),
        # memory that a state may lie in
        ("seen = zeros()", 'seen = zeros() @ facts(alias=["w"])'),
    ],
)
def test_what_may_get_a_graph_orders_those_that_record(old: str, new: str) -> None:
    assert old in COLLECTED
    text = COLLECTED.replace(old, new)
    assert collected(text) is not None


def test_a_value_with_a_graph_orders_those_that_record() -> None:
    assert collected(spec=Spec("tensor", dtype="float32", requires_grad=True)) is not None
    program = parse(COLLECTED)  # of no known type
    assert held(program, "policy", "model") is not None
    # memory of the caller's
    text = COLLECTED.replace("    seen = zeros()\n", "").replace("program(x,", "program(x, seen,")
    assert held(parse(text), "policy", "model") is not None
