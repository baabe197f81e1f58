"""Which local names statements read and assign, and which are live between them."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence

from rose_compiler.ir import block

_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def reads(node: ast.AST | Iterable[ast.AST]) -> set[str]:
    """Names that must be bound for what is loaded or deleted below a node.

    Variables of comprehensions and parameters of lambdas are names of their own.
    """
    found: set[str] = set()
    for part in _parts(node):
        _reads(part, frozenset(), found)
    return found


def _reads(node: ast.AST, hidden: frozenset[str], found: set[str]) -> None:
    if isinstance(node, ast.Name):
        if not isinstance(node.ctx, ast.Store) and node.id not in hidden:
            found.add(node.id)
        return
    if isinstance(node, _COMPREHENSIONS):
        inner = hidden
        for number, generator in enumerate(node.generators):
            _reads(generator.iter, hidden if number == 0 else inner, found)
            inner = inner | {
                n.id
                for n in ast.walk(generator.target)
                if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
            }
            for part in (generator.target, *generator.ifs):
                _reads(part, inner, found)
        parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        for part in parts:
            _reads(part, inner, found)
        return
    if isinstance(node, ast.Lambda):
        spec = node.args
        for default in (*spec.defaults, *(d for d in spec.kw_defaults if d is not None)):
            _reads(default, hidden, found)
        every = (*spec.posonlyargs, *spec.args, *spec.kwonlyargs, spec.vararg, spec.kwarg)
        _reads(node.body, hidden | {a.arg for a in every if a is not None}, found)
        return
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        found.add(node.target.id)
    for child in ast.iter_child_nodes(node):
        _reads(child, hidden, found)


def assigned(node: ast.AST | Iterable[ast.AST]) -> list[str]:
    """Names bound or deleted below a node, in order; comprehension variables are left out."""
    found: dict[str, None] = {}
    for part in _parts(node):
        _assigned(part, found)
    return list(found)


def _assigned(node: ast.AST, found: dict[str, None]) -> None:
    if isinstance(node, _COMPREHENSIONS):
        # only a walrus leaks out of a comprehension
        for inner in ast.walk(node):
            if isinstance(inner, ast.NamedExpr):
                found.setdefault(inner.target.id)
        return
    if isinstance(node, ast.Lambda):
        return
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        found.setdefault(node.name)
        return
    if isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)):
        found.setdefault(node.id)
    elif isinstance(node, ast.alias):
        found.setdefault((node.asname or node.name).split(".")[0])
    elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name:
        found.setdefault(node.name)
    elif isinstance(node, ast.MatchMapping) and node.rest:
        found.setdefault(node.rest)
    for child in ast.iter_child_nodes(node):
        _assigned(child, found)


def deleted(statements: Iterable[ast.stmt]) -> set[str]:
    """Names that statements may leave unbound: by ``del``, or as the name of an exception."""
    found: set[str] = set()
    for statement in statements:
        for part in ast.walk(statement):
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Del):
                found.add(part.id)
            elif isinstance(part, ast.ExceptHandler) and part.name:
                found.add(part.name)
    return found


def definitely_assigned(statement: ast.stmt) -> set[str]:
    """Names that are bound whenever control leaves the statement at its end."""
    return block.definitely_assigned([statement])


def live_in(
    statements: Sequence[ast.stmt], live_out: set[str], exits: set[str] | None = None
) -> set[str]:
    """Names that must hold a value before ``statements`` for what they and what follows read.

    ``exits`` is what ``break`` and ``continue`` lead to, ``live_out`` where nothing is given: what
    is live behind a loop is also live behind its body.
    """
    live, exits = set(live_out), live_out if exits is None else exits
    for statement in reversed(statements):
        live = _before(statement, live, exits)
    return live


def live_between(statements: Sequence[ast.stmt], live_out: set[str]) -> list[set[str]]:
    """``live_out`` of each statement of a list."""
    result: list[set[str]] = []
    live = set(live_out)
    for statement in reversed(statements):
        result.append(live)
        live = _before(statement, live, live_out)
    result.reverse()
    return result


def _before(statement: ast.stmt, live: set[str], exits: set[str]) -> set[str]:
    if isinstance(statement, (ast.Break, ast.Continue)):
        return live | exits
    if isinstance(statement, ast.If):
        arms = (live_in(arm, live, exits) for arm in (statement.body, statement.orelse))
        return set().union(*arms) | reads(statement.test)
    if isinstance(statement, (ast.For, ast.While)):
        head = reads(statement.iter if isinstance(statement, ast.For) else statement.test)
        # a loop that never runs leaves its variables as they were
        around = live | live_in(statement.orelse, live, exits)
        for _ in range(2):
            inside = live_in(statement.body, around | head)
            if isinstance(statement, ast.For):
                inside -= set(assigned(statement.target))
                inside |= reads(statement.target)
            around |= inside
        return around | head
    if isinstance(statement, ast.With):
        inside = live_in(statement.body, live, exits)
        if not all(_swallows_nothing(item.context_expr) for item in statement.items):
            inside |= live
        for item in reversed(statement.items):
            if item.optional_vars is not None:
                inside |= reads(item.optional_vars)
            inside |= reads(item.context_expr)
        return inside
    # a statement of another kind may leave a loop anywhere inside, before it assigns anything
    held = (
        exits
        if any(isinstance(n, (ast.Break, ast.Continue)) for n in ast.walk(statement))
        else set()
    )
    return (live - definitely_assigned(statement)) | reads(statement) | held


_MODES = frozenset(
    ("no_grad", "enable_grad", "inference_mode", "set_grad_enabled", "autocast", "phase")
)


def _swallows_nothing(manager: ast.expr) -> bool:
    """Whether a context manager surely lets exceptions of its body through."""
    function = manager.func if isinstance(manager, ast.Call) else manager
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in _MODES


def _parts(node: ast.AST | Iterable[ast.AST]) -> Iterable[ast.AST]:
    return [node] if isinstance(node, ast.AST) else node
