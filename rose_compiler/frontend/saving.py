"""Files that a program writes of its objects: what is saved, and the writing, as two operations.

The first reads parameters where it stands; the second needs only what the first has made, and so
may be handed that as it was then, and go on while the parameters are trained.
"""

from __future__ import annotations

import ast
from typing import Any

import torch

from rose_compiler.frontend import liveness, rewrite_ast
from rose_compiler.frontend.scope import Scope
from rose_compiler.ir.ops import SAVES


def writes_out(statement: ast.stmt, scope: Scope) -> bool:
    """Whether a statement is a call of ``torch.save``."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(call, ast.Call) and scope.resolve(call.func) is torch.save


def in_two(statement: ast.stmt, scope: Scope, *, named: bool = False) -> list[ast.stmt]:
    """``torch.save(made(), path)`` as ``saved = made()`` and ``torch.save(saved, path)``: the same
    order. Any other statement by itself; with ``named``, what has a name is given another one."""
    if not writes_out(statement, scope):
        return [statement]
    call: ast.Call = statement.value  # type: ignore[attr-defined]
    if not _plain(call) or isinstance(call.args[0], ast.Constant):
        return [statement]
    if isinstance(call.args[0], ast.Name) and not named:
        return [statement]
    name = scope.fresh("saved")
    scope.locals.add(name)
    made = rewrite_ast.assign(name, call.args[0], statement)
    arguments = [rewrite_ast.name(name, call.args[0]), *call.args[1:]]
    put = ast.copy_location(ast.Call(call.func, arguments, call.keywords), call)
    return [made, ast.copy_location(ast.Expr(put), statement)]


def marks(statement: ast.stmt, scope: Scope) -> dict[str, Any]:
    """The attributes of the operation that a statement is: of which of its inputs it does nothing
    but write a file."""
    if not writes_out(statement, scope):
        return {}
    call: ast.Call = statement.value  # type: ignore[attr-defined]
    if not _plain(call) or not isinstance(call.args[0], ast.Name):
        return {}
    name = call.args[0].id
    others = [call.func, *call.args[1:], *(k.value for k in call.keywords)]
    if any(name in liveness.reads(other) for other in others):
        return {}
    return {SAVES: name}


def _plain(call: ast.Call) -> bool:
    """Whether a call has nothing but what to save and where, and pickles as torch does."""
    given = [len(call.args), *(k.arg for k in call.keywords)]
    starred = any(isinstance(a, ast.Starred) for a in call.args)
    return not starred and given in ([2], [1, "f"])
