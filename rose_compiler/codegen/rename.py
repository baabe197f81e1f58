"""Gives the variables of the user's statements other names."""

from __future__ import annotations

import ast
import copy
from collections.abc import Mapping


class CannotMerge(Exception):
    """Statements that can't stand in one function with others."""


class Renamer(ast.NodeTransformer):
    """Replaces names by other names, and names that are only read by expressions.

    A comprehension's own variables are renamed along with the others: within it they mean the same
    thing everywhere. What binds names in ways of its own is refused.
    """

    def __init__(self, names: Mapping[str, str | ast.expr]) -> None:
        self.names = names

    def visit_Name(self, node: ast.Name) -> ast.expr:
        new = self.names.get(node.id)
        if new is None or new == node.id:
            return node
        if isinstance(new, str):
            return ast.copy_location(ast.Name(new, node.ctx), node)
        if not isinstance(node.ctx, ast.Load):
            raise CannotMerge(f"a constant is assigned to {node.id}")
        return ast.copy_location(copy.copy(new), node)

    def visit_Lambda(self, node: ast.Lambda) -> ast.expr:
        parts = node.args
        bound = [*parts.posonlyargs, *parts.args, *parts.kwonlyargs, parts.vararg, parts.kwarg]
        self._keep(a.arg for a in bound if a is not None)
        self.generic_visit(node)
        return node

    def visit_ListComp(self, node: ast.ListComp) -> ast.expr:
        return self._comprehension(node)

    def visit_SetComp(self, node: ast.SetComp) -> ast.expr:
        return self._comprehension(node)

    def visit_DictComp(self, node: ast.DictComp) -> ast.expr:
        return self._comprehension(node)

    def visit_GeneratorExp(self, node: ast.GeneratorExp) -> ast.expr:
        return self._comprehension(node)

    def _comprehension(
        self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
    ) -> ast.expr:
        for part in node.generators:
            for name in ast.walk(part.target):
                if isinstance(name, ast.Name):
                    # an expression can't be a target, and a new name must not hide another one
                    self._keep([name.id])
        self.generic_visit(node)
        return node

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.ExceptHandler:
        self._keep([node.name] if node.name else [])
        self.generic_visit(node)
        return node

    def visit_alias(self, node: ast.alias) -> ast.alias:
        self._keep([node.asname or node.name.split(".")[0]])
        return node

    def visit_Match(self, node: ast.Match) -> ast.stmt:
        raise CannotMerge("a match statement")

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.stmt:
        raise CannotMerge("a nested function")

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.stmt:
        raise CannotMerge("a nested class")

    def _keep(self, names: object) -> None:
        for name in names:  # type: ignore[attr-defined]
            if self.names.get(name, name) != name:
                raise CannotMerge(f"{name} is bound inside an expression")
