"""A loop with a branch and an exit, for the tests of the rewriter: what it leaves, run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rose_compiler.base.remarks import RemarkLog
from rose_compiler.ir import interp
from rose_compiler.ir.dump import dump
from rose_compiler.ir.parse import parse
from rose_compiler.ir.program import Program
from rose_compiler.ir.rewriter import Rewriter
from rose_compiler.ir.verify import verify

OPS = """
@op(reads=[], writes=[])
def double(x): ...
@op(reads=[], writes=[])
def add(x, y): ...
@op(reads=["s"], writes=[])
def read(s): ...
@op(reads=[], writes=["s"])
def push(s, x): ...
@op(reads=[], writes=[])
def alloc(): ...
@op(reads=[], writes=[], results=2)
def two(x): ...
"""
BIND: Mapping[str, Any] = {
    "double": lambda x: 2 * x,
    "add": lambda x, y: x + y,
    "read": lambda s: sum(s),
    "push": lambda s, x: s.append(x),
    "alloc": list,
    "two": lambda x: (x, x + 1),
}
LOOP = """
def f(x0, k, *, s):
    c = double(k)
    for t, x in L(0, 5, 1, x=x0):
        a = add(x, t)
        h = double(c)
        b = add(a, h)
        w = push(s, a)
        if t:
            p = add(b, c)
            n = p
        else:
            q = double(b)
            n = q
        stop = t == 3
        break_if(stop, (b,))
        z = add(n, h)
        yield z
    last = L.x
    return last
"""


def program(body: str = LOOP) -> Program:
    return parse(OPS + body, bind=dict(BIND))


def rewriter(p: Program, **known: Any) -> Rewriter:
    return Rewriter(p, RemarkLog(), "demo", **known)


def outcome(p: Program, *args: int) -> tuple[Any, list[int]]:
    verify(p)
    assert dump(parse(dump(p))) == dump(p)
    state: list[int] = [1]
    return interp.run(p, list(args), {"s": state}), state


def the(p: Program, name: str) -> Any:
    """The node of this name that is no placeholder."""
    return next(n for n in p.nodes() if n.name == name and n.op != "placeholder")


EXPECTED = outcome(program(), 1, 2)
