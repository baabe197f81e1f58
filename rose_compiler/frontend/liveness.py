"""Which local names statements read and assign, and which are live between them."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence


def reads(node: ast.AST | Iterable[ast.AST]) -> set[str]:
    """Names loaded anywhere below a node."""
    return {
        n.id
        for part in _parts(node)
        for n in ast.walk(part)
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)
    } | {
        n.target.id
        for part in _parts(node)
        for n in ast.walk(part)
        if isinstance(n, ast.AugAssign) and isinstance(n.target, ast.Name)
    }


def assigned(node: ast.AST | Iterable[ast.AST]) -> list[str]:
    """Names stored anywhere below a node, comprehension variables left out, in order of appearance."""
    found: dict[str, None] = {}
    for part in _parts(node):
        _assigned(part, found)
    return list(found)


def _assigned(node: ast.AST, found: dict[str, None]) -> None:
    if isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
        # only a walrus leaks out of a comprehension
        for inner in ast.walk(node):
            if isinstance(inner, ast.NamedExpr):
                found.setdefault(inner.target.id)
        return
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        found.setdefault(node.name)
        return
    if isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)):
        found.setdefault(node.id)
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        for alias in node.names:
            found.setdefault((alias.asname or alias.name).split(".")[0])
    if isinstance(node, ast.ExceptHandler) and node.name:
        found.setdefault(node.name)
    for child in ast.iter_child_nodes(node):
        _assigned(child, found)


def definitely_assigned(statement: ast.stmt) -> set[str]:
    """Names that are bound whenever control leaves the statement at its end."""
    if isinstance(statement, ast.If):
        return _all(statement.body) & _all(statement.orelse) if statement.orelse else set()
    if isinstance(statement, (ast.For, ast.While, ast.Try, ast.Match)):
        return set()
    if isinstance(statement, ast.With):
        # a context manager may swallow an exception half-way
        return {
            n
            for item in statement.items
            if item.optional_vars
            for n in assigned(item.optional_vars)
        }
    return set(assigned(statement))


def _all(statements: Sequence[ast.stmt]) -> set[str]:
    found: set[str] = set()
    for statement in statements:
        found |= definitely_assigned(statement)
        if isinstance(statement, (ast.Break, ast.Continue, ast.Return, ast.Raise)):
            break
    return found


def live_in(statements: Sequence[ast.stmt], live_out: set[str]) -> set[str]:
    """Names that must hold a value before ``statements`` for what they and their successors read."""
    live = set(live_out)
    for statement in reversed(statements):
        live = _before(statement, live)
    return live


def live_between(statements: Sequence[ast.stmt], live_out: set[str]) -> list[set[str]]:
    """``live_out`` of each statement of a list."""
    result: list[set[str]] = []
    live = set(live_out)
    for statement in reversed(statements):
        result.append(live)
        live = _before(statement, live)
    result.reverse()
    return result


def _before(statement: ast.stmt, live: set[str]) -> set[str]:
    if isinstance(statement, ast.If):
        return (
            live_in(statement.body, live) | live_in(statement.orelse, live) | reads(statement.test)
        )
    if isinstance(statement, (ast.For, ast.While)):
        head = reads(statement.iter if isinstance(statement, ast.For) else statement.test)
        after = live | live_in(statement.orelse, live)
        around = set(after)
        for _ in range(2):
            inside = live_in(statement.body, around | head)
            if isinstance(statement, ast.For):
                inside -= set(assigned(statement.target))
            around |= inside
        if isinstance(statement, ast.While):
            return around | head
        # a loop that never runs leaves its variable as it was
        return around | head
    if isinstance(statement, ast.With):
        return live_in(statement.body, live) | {
            n for i in statement.items for n in reads(i.context_expr)
        }
    return (live - definitely_assigned(statement)) | reads(statement)


def _parts(node: ast.AST | Iterable[ast.AST]) -> Iterable[ast.AST]:
    return [node] if isinstance(node, ast.AST) else node
