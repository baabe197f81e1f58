"""Programs as text with operations to run, and their emitted code beside the reference executor."""

from __future__ import annotations

import textwrap
from typing import Any

from rose_compiler.codegen import emit, load
from rose_compiler.ir import interp
from rose_compiler.ir.parse import parse
from rose_compiler.ir.program import Program
from rose_compiler.runtime.support import Runtime

OPS = """
@op(reads=[], writes=[])
def f(x): ...

@op(reads=[], writes=[])
def g(x, y): ...

@op(reads=[], writes=[])
def odd(x): ...

@op(reads=[], writes=["buf"])
def put(buf, v): ...

@op(reads=["buf"], writes=[])
def total(buf): ...
"""

BIND = {
    "f": lambda x: x + 1,
    "g": lambda x, y: 2 * x + y,
    "odd": lambda x: x % 2 == 1,
    "put": lambda buf, v: buf.append(v),
    "total": sum,
}


def program(text: str, **more: Any) -> Program:
    return parse(OPS + textwrap.dedent(text), {**BIND, **more})


def emitted_run(p: Program) -> str:
    """The text of the function, without its head."""
    source = emit(p).source
    return source[source.index("def run(") :].rstrip()


def check(p: Program, values: tuple[Any, ...], **states: Any) -> Any:
    """Run emitted code and the reference executor on equal states; both agree."""
    copies = {name: list(s) if isinstance(s, list) else s for name, s in states.items()}
    want = interp.run(p, values, copies)
    got = load(emit(p))(Runtime(), *values, *states.values())
    assert got == want
    assert states == copies
    return got
