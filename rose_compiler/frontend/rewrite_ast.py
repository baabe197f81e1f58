"""Rewrites of the user's tree that keep its meaning and give it one entry and one exit."""

from __future__ import annotations

import ast
import copy
from collections.abc import Sequence

RETURN_NAME = "_rose_return"


def name(identifier: str, like: ast.AST, *, store: bool = False) -> ast.Name:
    """A name at the place of another node."""
    return ast.copy_location(ast.Name(identifier, ast.Store() if store else ast.Load()), like)


def assign(identifier: str, value: ast.expr, like: ast.AST) -> ast.Assign:
    """``identifier = value`` at the place of another node."""
    made = ast.Assign([name(identifier, like, store=True)], value)
    return ast.fix_missing_locations(ast.copy_location(made, like))


def constant(value: object, like: ast.AST) -> ast.Constant:
    return ast.copy_location(ast.Constant(value), like)  # type: ignore[arg-type]


def has_return(statements: Sequence[ast.stmt]) -> bool:
    return any(isinstance(n, ast.Return) for s in statements for n in ast.walk(s))


def single_exit(statements: Sequence[ast.stmt]) -> list[ast.stmt] | None:
    """The statements with every ``return`` turned into an assignment of ``RETURN_NAME`` that control
    falls out of the end of; ``None`` when a ``return`` stands where that is impossible (in a loop,
    ``try`` or ``with`` that has statements behind it)."""
    result: list[ast.stmt] = []
    for position, statement in enumerate(statements):
        rest = list(statements[position + 1 :])
        if isinstance(statement, ast.Return):
            value = statement.value or constant(None, statement)
            return [*result, assign(RETURN_NAME, value, statement)]
        if not has_return([statement]):
            result.append(statement)
            continue
        if isinstance(statement, ast.If):
            body = single_exit([*statement.body, *([] if _ends(statement.body) else rest)])
            orelse = single_exit([*statement.orelse, *([] if _ends(statement.orelse) else rest)])
            if body is None or orelse is None:
                return None
            made = ast.If(statement.test, body or [ast.Pass()], orelse)
            return [*result, ast.fix_missing_locations(ast.copy_location(made, statement))]
        if isinstance(statement, ast.With) and _ends(statement.body):
            body = single_exit(statement.body)
            if body is None:
                return None
            return [*result, ast.copy_location(ast.With(statement.items, body), statement)]
        return None
    return result


def _ends(statements: Sequence[ast.stmt]) -> bool:
    """Whether control never runs off the end of the statements."""
    if not statements:
        return False
    last = statements[-1]
    if isinstance(last, (ast.Return, ast.Raise)):
        return True
    if isinstance(last, ast.If):
        return bool(last.orelse) and _ends(last.body) and _ends(last.orelse)
    return isinstance(last, ast.With) and _ends(last.body)


def exits(statement: ast.AST) -> bool:
    """Whether a ``break`` or ``continue`` of the enclosing loop stands in the statement."""
    if isinstance(statement, (ast.Break, ast.Continue)):
        return True
    if isinstance(statement, (ast.For, ast.While)):
        return any(exits(s) for s in statement.orelse)
    return any(exits(child) for child in ast.iter_child_nodes(statement))


def flag_exits(statements: Sequence[ast.stmt], broke: str, continued: str) -> list[ast.stmt] | None:
    """The statements with ``break`` and ``continue`` turned into flags that keep the rest from
    running; ``None`` where one stands in a construct that can't be split."""
    result: list[ast.stmt] = []
    for position, statement in enumerate(statements):
        if isinstance(statement, (ast.Break, ast.Continue)):
            flag = broke if isinstance(statement, ast.Break) else continued
            return [*result, assign(flag, constant(True, statement), statement)]
        if not exits(statement):
            result.append(statement)
            continue
        if not isinstance(statement, (ast.If, ast.With)):
            return None
        made = copy.copy(statement)
        body = flag_exits(statement.body, broke, continued)
        if body is None:
            return None
        made.body = body
        if isinstance(made, ast.If):
            orelse = flag_exits(made.orelse, broke, continued)
            if orelse is None:
                return None
            made.orelse = orelse
        result.append(made)
        rest = flag_exits(statements[position + 1 :], broke, continued)
        if rest is None:
            return None
        if rest:
            stopped = ast.BoolOp(ast.Or(), [name(broke, statement), name(continued, statement)])
            guard = ast.If(ast.UnaryOp(ast.Not(), stopped), rest, [])
            result.append(ast.fix_missing_locations(ast.copy_location(guard, statement)))
        return result
    return result
