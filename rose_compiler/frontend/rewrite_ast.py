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
    """The statements with every ``return`` turned into an assignment of ``RETURN_NAME`` where its
    way ends; ``None`` when a ``return`` stands where that is impossible (in a loop, a ``try``, or a
    ``with`` that has statements behind it)."""
    if not has_return(statements):
        last = statements[-1] if statements else ast.Pass(lineno=1, col_offset=0)
        return [*statements, assign(RETURN_NAME, constant(None, last), last)]
    result: list[ast.stmt] = []
    for position, statement in enumerate(statements):
        rest = list(statements[position + 1 :])
        if isinstance(statement, ast.Return):
            value = statement.value or constant(None, statement)
            return [*result, assign(RETURN_NAME, value, statement)]
        if not has_return([statement]):
            result.append(statement)
            continue
        made = copy.copy(statement)
        arms: list[list[ast.stmt]] = []
        if isinstance(statement, ast.If):
            arms = [statement.body, statement.orelse]
        elif isinstance(statement, ast.Match):
            made.cases = list(statement.cases)  # type: ignore[attr-defined]
            if not any(_catches_all(c) for c in statement.cases):
                wild = ast.match_case(ast.MatchAs(), None, [ast.Pass()])
                made.cases.append(_at(wild, statement))  # type: ignore[attr-defined]
            arms = [c.body for c in made.cases]  # type: ignore[attr-defined]
        elif isinstance(statement, ast.With) and _ends(statement.body):
            arms, rest = [statement.body], []
        if not arms:
            return None
        ended = [single_exit([*arm, *([] if _ends(arm) else rest)]) for arm in arms]
        if any(e is None for e in ended):
            return None
        if isinstance(made, ast.If):
            made.body, made.orelse = ended  # type: ignore[assignment]
        elif isinstance(made, ast.Match):
            made.cases = [
                _at(ast.match_case(c.pattern, c.guard, e), statement)  # type: ignore[arg-type]
                for c, e in zip(made.cases, ended, strict=True)
            ]
        else:
            made.body = ended[0]  # type: ignore[attr-defined]
        return [*result, made]
    return result


def _catches_all(case: ast.match_case) -> bool:
    return isinstance(case.pattern, ast.MatchAs) and case.pattern.pattern is None and not case.guard


def _at(node: ast.match_case, like: ast.AST) -> ast.match_case:
    """A case with places for the parts that have none."""
    for part in ast.walk(node):
        if isinstance(part, (ast.expr, ast.stmt, ast.pattern)) and not hasattr(part, "lineno"):
            ast.copy_location(part, like)
    return node


def _ends(statements: Sequence[ast.stmt]) -> bool:
    """Whether control never runs off the end of the statements."""
    if not statements:
        return False
    last = statements[-1]
    if isinstance(last, (ast.Return, ast.Raise)):
        return True
    if isinstance(last, ast.If):
        return bool(last.orelse) and _ends(last.body) and _ends(last.orelse)
    if isinstance(last, ast.Match):
        return any(_catches_all(c) for c in last.cases) and all(_ends(c.body) for c in last.cases)
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


class _Free(ast.NodeTransformer):
    """Spells out what a function's closure holds, so that its statements can stand elsewhere."""

    def __init__(self, cells: dict[str, str], first: str | None) -> None:
        self.cells = cells
        self.first = first

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id not in self.cells or not isinstance(node.ctx, ast.Load):
            return node
        made = ast.Attribute(ast.Name(self.cells[node.id], ast.Load()), "cell_contents", ast.Load())
        return ast.fix_missing_locations(ast.copy_location(made, node))

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        is_super = isinstance(node.func, ast.Name) and node.func.id == "super"
        if is_super and not node.args and self.first is not None:
            node.args = [name("__class__", node), name(self.first, node)]
        return node


def spelled_out(node: ast.FunctionDef, cells: dict[str, str]) -> ast.FunctionDef:
    """A function with ``super()`` given its arguments, and with each closure variable of ``cells``
    read from the cell that a variable of the name given there holds."""
    uses_super = any(isinstance(n, ast.Name) and n.id == "super" for n in ast.walk(node))
    if not cells and not uses_super:
        return node
    spec = (*node.args.posonlyargs, *node.args.args)
    made = copy.deepcopy(node)
    _Free(cells, spec[0].arg if spec else None).visit(made)
    return made
