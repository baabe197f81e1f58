"""Generators whose items are taken after the statement that makes them."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from rose_compiler.frontend import liveness

#: Methods that put what they are given into a container, and functions that hand on what they are
#: given item by item.
_KEEPERS = frozenset(("append", "appendleft", "add", "insert", "put", "setdefault"))
_LAZY = frozenset(("zip", "enumerate", "map", "filter", "iter", "chain", "islice"))


def kept(function: ast.FunctionDef) -> Iterable[tuple[ast.GeneratorExp, set[str]]]:
    """The generators whose items are not taken by the statement that makes them, each with the
    variables that may be bound anew until they are."""
    rebound = _rebound(function)
    for node in ast.walk(function):
        given: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if not all(isinstance(t, ast.Tuple | ast.List) for t in targets):  # that takes all
                given = [node.value]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in _KEEPERS:
            given = [*node.args, *(k.value for k in node.keywords)]
        for found in (g for value in given for g in _handed_on(value)):
            yield found, rebound
        if isinstance(node, ast.For):
            for found in _handed_on(node.iter):
                yield found, set(liveness.assigned(node))


def _handed_on(value: ast.expr) -> Iterable[ast.GeneratorExp]:
    """The generators that a value is, holds, or takes items from when it is asked for its own."""
    if isinstance(value, ast.GeneratorExp):
        yield value
    elif isinstance(value, ast.Tuple | ast.List | ast.Set):
        for item in value.elts:
            yield from _handed_on(item)
    elif isinstance(value, ast.Dict):
        for item in value.values:
            yield from _handed_on(item)
    elif isinstance(value, ast.IfExp):
        yield from _handed_on(value.body)
        yield from _handed_on(value.orelse)
    elif isinstance(value, ast.Call) and _called(value) in _LAZY:
        for item in value.args:
            yield from _handed_on(item)


def _called(call: ast.Call) -> str:
    return str(getattr(call.func, "attr", getattr(call.func, "id", "")))


def seen_later(node: ast.GeneratorExp) -> set[str]:
    """The variables that a generator reads when its items are taken."""
    return liveness.reads(node) - (
        liveness.reads(node.generators[0].iter) - liveness.reads([node.elt, *_inner(node)])
    )


def _inner(node: ast.GeneratorExp) -> list[ast.expr]:
    first, *rest = node.generators
    return [*first.ifs, *(part for g in rest for part in (g.iter, *g.ifs))]


def _rebound(function: ast.FunctionDef) -> set[str]:
    """The variables that are bound more than once: by several statements, or in a loop."""
    found: set[str] = set()
    once = {a.arg for a in ast.walk(function.args) if isinstance(a, ast.arg)}
    todo: list[tuple[ast.AST, bool]] = [(s, False) for s in function.body]
    while todo:
        node, again = todo.pop()
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            (found if again or node.id in once else once).add(node.id)
        if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            continue  # variables of its own
        inner = again or isinstance(node, ast.For | ast.While)
        todo += [(child, inner) for child in ast.iter_child_nodes(node)]
    return found
