"""The order in which Python evaluates the parts of an expression."""

from __future__ import annotations

import ast

_LAZY = (
    ast.ListComp,
    ast.SetComp,
    ast.DictComp,
    ast.GeneratorExp,
    ast.BoolOp,
    ast.IfExp,
    ast.Lambda,
    ast.JoinedStr,
)


def splits(expression: ast.expr) -> bool:
    """Whether parts of an expression may be evaluated in front of it, in the same order."""
    return not any(isinstance(p, (ast.NamedExpr, ast.Starred)) for p in ast.walk(expression))


def children(expression: ast.expr) -> list[tuple[str, int | None, ast.expr]]:
    """Direct subexpressions that are surely evaluated, in order, with the place to put another."""
    if isinstance(expression, _LAZY):
        return []
    found: list[tuple[str, int | None, ast.expr]] = []
    if isinstance(expression, ast.Dict):
        for i, (key, value) in enumerate(zip(expression.keys, expression.values, strict=True)):
            if key is not None:
                found.append(("keys", i, key))
            found.append(("values", i, value))
        return found
    if isinstance(expression, ast.Compare):
        # later operands are skipped when an earlier comparison fails
        return [("left", None, expression.left), ("comparators", 0, expression.comparators[0])]
    if isinstance(expression, ast.Subscript):
        whole: list[tuple[str, int | None, ast.expr]] = [("value", None, expression.value)]
        has_slice = any(isinstance(p, ast.Slice) for p in ast.walk(expression.slice))
        return whole if has_slice else [*whole, ("slice", None, expression.slice)]
    for field, value in ast.iter_fields(expression):
        if isinstance(value, ast.expr):
            found.append((field, None, value))
        elif isinstance(value, list):
            for i, item in enumerate(value):
                if isinstance(item, ast.expr):
                    found.append((field, i, item))
                elif isinstance(item, ast.keyword):
                    found.append((field, i, item.value))
    return found


def eager_parts(expression: ast.expr) -> list[ast.expr]:
    """The expression and all its parts that are surely evaluated, once."""
    parts = [expression]
    for _, _, child in children(expression):
        parts.extend(eager_parts(child))
    return parts
