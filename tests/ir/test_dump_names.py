"""Names that differ in case, what dumps leave out, and what a parsed operation gives back."""

from __future__ import annotations

import torch

from rose_compiler.ir import interp
from rose_compiler.ir.dump import dump
from rose_compiler.ir.parse import parse
from rose_compiler.ir.program import is_call, op_of

CAPITALS = """\
# rose ir | fn | captured

@op(reads=[], writes=[])
def f(x): ...

def fn(X, x, *, M, m):
    t = f(x)
    for T, A in Loop(0, 3, 1, A=x):
        a = f(A)
        yield a
    a = Loop.A
    for n, N in loop(0, 3, 1, N=a) @ loop(label="M"):
        yield n
    N = loop.N
    return t, N
"""


def test_names_that_differ_in_case_stay_apart() -> None:
    assert dump(parse(CAPITALS)) == CAPITALS


def test_what_an_operation_calls_has_a_word_of_its_own() -> None:
    text = CAPITALS.replace("writes=[])", 'writes=[], calls=["backward", "module"])')
    program = parse(text)
    op = next(op_of(n) for n in program.nodes() if is_call(n) and op_of(n).name == "f")
    assert op.attributes == {"calls": frozenset(["backward", "module"])}
    assert dump(program) == text
    op.attributes["calls"] = frozenset([""])
    assert dump(program) == CAPITALS


GRAPH = """\
# rose ir | fn | captured

@op(kind="graph", reads=[], writes=[])
def one(x):
    relu = torch.relu(x)
    return (relu,)

@op(kind="graph", reads=[], writes=[], results=2)
def two(x):
    neg = torch.neg(x)
    return neg, x

def fn(x):
    y = one(x)
    a, b = two(y)
    return a, b, y
"""


def test_a_traced_operation_with_one_result_gives_that_result() -> None:
    program = parse(GRAPH)
    a, b, y = interp.run(program, [torch.tensor([-1.0, 2.0])])
    assert torch.equal(y, torch.tensor([0.0, 2.0]))
    assert torch.equal(b, y)
    assert torch.equal(a, -y)
    assert dump(program) == GRAPH
