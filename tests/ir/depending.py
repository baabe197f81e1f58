"""Operations of every kind of effect, and the dependences of a body as lines."""

from __future__ import annotations

from rose_compiler.ir.deps import Dependences, Edge
from rose_compiler.ir.parse import parse
from rose_compiler.ir.program import LoopView, Program


def edges(program: Program, loop: str | None = None) -> set[str]:
    """The edges of a body, as ``src -> dst kind state distance``; state edges once a pair."""
    graph = program.graph if loop is None else LoopView(program.find(loop)).graph
    return {short(e) for e in Dependences(program).edges(graph)}


def short(e: Edge) -> str:
    far = f"{e.least}.." if e.distance is None else str(e.distance)
    return " ".join(filter(None, [f"{e.src}->{e.dst}", e.kind, e.state, far]))


def program(ops: str, body: str) -> Program:
    return parse(ops + "\n" + body)


OPS = """
@op(reads=[], writes=[])
def pure(x): ...
@op(reads=["s"], writes=[])
def read(s): ...
@op(reads=[], writes=["s"])
def write(s): ...
@op(reads=["s[t]"], writes=[])
def read_t(s, t): ...
@op(reads=["s[t + 1]"], writes=[])
def read_next(s, t): ...
@op(reads=["s[t - 1]"], writes=[])
def read_last(s, t): ...
@op(reads=[], writes=["s[t]"])
def write_t(s, t): ...
@op(kind="step", reads=["env"], writes=["env"], attributes={"step": {"env": "env", "action": "a"}})
def step(a, env): ...
@op()
def opaque(x): ...
@op(reads=["rng:torch"], writes=["rng:torch"])
def sample(): ...
@op(reads=[], writes=["host"])
def log(x): ...
@op(reads=[], writes=[])
def alloc(): ...
@op(reads=["x"], writes=["x"])
def inplace(x): ...
"""
