"""``for ... else`` and ``while ... else`` as a flag and a test behind the loop."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Sequence

from rose_compiler.frontend import rewrite_ast


def spelled_out(statements: Sequence[ast.stmt], fresh: Callable[[str], str]) -> list[ast.stmt]:
    """The statements, and those inside them, without ``else`` of loops.

    A ``break`` sets a flag first; what stood behind ``else`` runs where no ``break`` did. ``fresh``
    gives names that the function does not use.
    """
    return [made for statement in statements for made in _one(statement, fresh)]


def _one(statement: ast.stmt, fresh: Callable[[str], str]) -> list[ast.stmt]:
    if not any(isinstance(p, (ast.For, ast.While)) and p.orelse for p in ast.walk(statement)):
        return [statement]
    made = copy.copy(statement)
    for field in ("body", "orelse", "finalbody"):
        inner = getattr(made, field, None)
        if isinstance(inner, list) and inner and isinstance(inner[0], ast.stmt):
            setattr(made, field, spelled_out(inner, fresh))
    for field in ("handlers", "cases"):
        parts = []
        for part in getattr(made, field, ()):
            part = copy.copy(part)
            part.body = spelled_out(part.body, fresh)
            parts.append(part)
        if parts:
            setattr(made, field, parts)
    if not isinstance(made, (ast.For, ast.While)) or not made.orelse:
        return [made]
    orelse, made.orelse = made.orelse, []
    flag = fresh("left")
    body = _flagged(made.body, flag)
    if body == made.body:  # it can't be left early
        return [made, *orelse]
    made.body = body
    test = ast.UnaryOp(ast.Not(), rewrite_ast.name(flag, orelse[0]))
    check = ast.copy_location(ast.If(test, orelse, []), orelse[0])
    start = rewrite_ast.assign(flag, rewrite_ast.constant(False, statement), statement)
    return [start, made, ast.fix_missing_locations(check)]


def _flagged(statements: list[ast.stmt], flag: str) -> list[ast.stmt]:
    """The statements, each ``break`` of the loop around them with an assignment in front; the same
    list where there is none."""
    result: list[ast.stmt] = []
    changed = False
    for statement in statements:
        if isinstance(statement, ast.Break):
            yes = rewrite_ast.constant(True, statement)
            result.append(rewrite_ast.assign(flag, yes, statement))
            changed = True
        elif any(isinstance(p, ast.Break) for p in ast.walk(statement)):
            made = _inside(statement, flag)
            changed |= made is not statement
            statement = made
        result.append(statement)
    return result if changed else statements


def _inside(statement: ast.stmt, flag: str) -> ast.stmt:
    # a loop's own breaks are its own; what stood behind its `else` stands behind it by now
    if isinstance(statement, (ast.For, ast.While, ast.FunctionDef, ast.ClassDef)):
        return statement
    made = copy.copy(statement)
    changed = False
    for field in ("body", "orelse", "finalbody"):
        inner = getattr(made, field, None)
        if isinstance(inner, list):
            flagged = _flagged(inner, flag)
            changed |= flagged is not inner
            setattr(made, field, flagged)
    for field in ("handlers", "cases"):
        parts = []
        for part in getattr(made, field, ()):
            flagged = _flagged(part.body, flag)
            changed |= flagged is not part.body
            part = copy.copy(part)
            part.body = flagged
            parts.append(part)
        if parts:
            setattr(made, field, parts)
    return made if changed else statement
