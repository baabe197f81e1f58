"""Emitted code that also says how long its statements took.

The text stays what it is, line by line: only the syntax tree gets two calls around each statement
that stands for a line of the user's, so tracebacks and the fault map hold for it too.
"""

from __future__ import annotations

import ast
import itertools
import re
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Literal

from rose_compiler.base.errors import SourceLocation
from rose_compiler.codegen.emit import Emitted

Kind = Literal["operation", "issue", "wait", "loop"]
_CLOCK, _DONE = "_rose_clock", "_rose_done"


@dataclass(frozen=True)
class Statement:
    """What one emitted statement is, for a reader: its name, its kind and the user's line."""

    name: str
    kind: Kind
    where: SourceLocation


@dataclass
class Timer:
    """What the statements of one piece of emitted code report to.

    ``statements`` has them by emitted line; ``taken`` holds ``(line, start, end)`` in seconds of
    :func:`time.perf_counter`, in the order in which they ended.
    """

    statements: dict[int, Statement] = field(default_factory=dict)
    taken: list[tuple[int, float, float]] = field(default_factory=list)

    def namespace(self) -> dict[str, Any]:
        """What timed code names beside what it names untimed."""
        return {_CLOCK: perf_counter, _DONE: self._done}

    def _done(self, line: int, start: float) -> None:
        self.taken.append((line, start, perf_counter()))


def timed(emitted: Emitted, timer: Timer) -> ast.Module:
    """The syntax tree of emitted code, each statement of a user's line between two calls.

    Raises:
        SyntaxError: when an edited text is no Python.
    """
    tree = ast.parse(emitted.source, filename=emitted.filename)
    count = itertools.count()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == "run":
            node.body = _timed(node.body, emitted, timer, count)
    return ast.fix_missing_locations(tree)


def _timed(
    body: list[ast.stmt], emitted: Emitted, timer: Timer, count: itertools.count[int]
) -> list[ast.stmt]:
    found: list[ast.stmt] = []
    for statement in body:
        if isinstance(statement, ast.For | ast.While | ast.With | ast.If | ast.Try):
            statement.body = _timed(statement.body, emitted, timer, count)
        if isinstance(statement, ast.For | ast.While | ast.If):
            statement.orelse = _timed(statement.orelse, emitted, timer, count)
        about = _about(statement, emitted)
        if about is None:
            found.append(statement)
            continue
        timer.statements[statement.lineno] = about
        start = f"_rose_start_{next(count)}"
        before = ast.parse(f"{start} = {_CLOCK}()").body[0]
        after = ast.parse(f"{_DONE}({statement.lineno}, {start})").body[0]
        for made in (before, after):
            for node in ast.walk(made):
                if isinstance(node, ast.stmt | ast.expr):
                    ast.copy_location(node, statement)
        found += [before, statement, after]
    return found


def _about(statement: ast.stmt, emitted: Emitted) -> Statement | None:
    """What a statement is; None for one that takes no time of its own."""
    where = emitted.places.get(statement.lineno)
    if where is None and emitted.edited:
        where = SourceLocation(emitted.filename, statement.lineno)
    if where is None:
        return None
    if isinstance(statement, ast.For):
        return Statement(f"for {ast.unparse(statement.target)}", "loop", where)
    if isinstance(statement, ast.While):
        return Statement("while", "loop", where)
    if not isinstance(statement, ast.Assign | ast.AugAssign | ast.Expr):
        return None
    call = next((n for n in ast.walk(statement.value) if isinstance(n, ast.Call)), None)
    if call is None:
        return None
    name = ast.unparse(call.func)
    owner, _, method = name.rpartition(".")
    if owner and method == "wait" and not call.args:
        return Statement(f"wait for {re.sub(r'_task(_[0-9]+)?$', '', owner)}", "wait", where)
    if owner and method in ("submit", "step") and call.args:
        first = call.args[0]
        if isinstance(first, ast.Constant) and isinstance(first.value, int):
            what = ast.unparse(call.args[1]) if method == "submit" else "step"
            return Statement(f"issue {what} to {owner}", "issue", where)
    if not owner and where.source:
        name = where.source  # the user's own statement says more than what the block is called
    return Statement(name, "operation", where)
