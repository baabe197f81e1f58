"""Calls that train, or step a simulator, and were not entered: they stay one operation."""

from __future__ import annotations

import ast

import torch.fx as fx

from rose_compiler.base.remarks import Remark, RemarkLog
from rose_compiler.ir import facts
from rose_compiler.ir.deps import title
from rose_compiler.ir.program import Program, is_call, op_of

PASS = "capture"
_PARTS = frozenset({"step", "backward", "optimizer"})
_DIRECT = frozenset({"step", "backward"})


def tell_closed(program: Program, log: RemarkLog) -> None:
    """A remark for each statement that does several parts of an iteration inside a function which
    is not looked into, so that no pass finds anything to do there."""
    for node in program.nodes():
        if is_call(node) and op_of(node).kind == "block" and _hides(node):
            where = facts.get(node).origin.where
            starred = any(map(_is_starred, _calls(node)))
            why = f"{title(node)} stays one operation with all that it calls, which is not entered"
            if starred:
                why += ": the call passes `*` or `**`"
            log.add(
                Remark(
                    kind="missed",
                    pass_name=PASS,
                    where=() if where is None else (where,),
                    code="opaque-call",
                    why=why,
                    allow="pass arguments by position or name to a function of yours that takes no "
                    "`*args` and has one `return`, at its end",
                    verdict="unknown",
                )
            )


def _calls(node: fx.Node) -> list[ast.Call]:
    statements: tuple[ast.stmt, ...] = op_of(node).attributes.get("stmts", ())
    return [part for s in statements for part in ast.walk(s) if isinstance(part, ast.Call)]


def _hides(node: fx.Node) -> bool:
    """Whether an operation does at least two of stepping, going backward and updating parameters,
    none of them in the statement itself."""
    parts = op_of(node).attributes.get("calls", frozenset()) & _PARTS
    calls = _calls(node)
    names = {c.func.attr for c in calls if isinstance(c.func, ast.Attribute)}
    return len(parts) > 1 and bool(calls) and names.isdisjoint(_DIRECT)


def _is_starred(call: ast.Call) -> bool:
    return any(isinstance(a, ast.Starred) for a in call.args) or any(
        k.arg is None for k in call.keywords
    )
