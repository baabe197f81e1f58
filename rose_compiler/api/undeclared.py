"""The error for an access that a component's declaration leaves out, in the author's own names."""

from __future__ import annotations

import ast
import inspect

import torch.fx as fx

from rose_compiler.base.errors import RoseError, SourceLocation, fail
from rose_compiler.frontend.components import function_of
from rose_compiler.frontend.hidden import OUTSIDE
from rose_compiler.ir import facts
from rose_compiler.ir.program import is_state, op_of

#: Memory that no root of the program and no argument leads to.
HIDDEN = "memory that none of its arguments leads to"


def undeclared(node: fx.Node, word: str, state: str, line: SourceLocation | None) -> RoseError:
    """The error for what the declaration of a component leaves out: ``word`` is "writes" or
    "reads"."""
    op = op_of(node)
    called = facts.get(node).origin.where
    entry = entry_for(node, state)
    known = (op.signature.writes if word == "writes" else op.signature.reads) or ()
    listed = [spelled(node, w) for w in (*known, *([entry] if entry else []))]
    what = f"its argument `{listed[-1]}`" if state.startswith("=") else f"`{state}`"
    if state == HIDDEN:
        what = HIDDEN
    elif state.startswith(OUTSIDE):
        what = f"`{state.removeprefix(OUTSIDE)}`, which none of its arguments leads to"
    help_ = f"declare what it does: {word}={listed!r}"
    if entry is None:
        help_ = "hand the state in as an argument and declare it, or leave `writes` out: unknown"
    return fail(
        "declare-contradicted",
        f"`{op.name}` {word} {what}, which its declaration leaves out",
        where=line or called,
        expected=f"{word}={[spelled(node, w) for w in known]!r}",
        found=f"a {word.rstrip('s')} of {what}"
        + (f", called at {called}" if line and called else ""),
        help=help_,
    )


def entry_for(node: fx.Node, state: str) -> str | None:
    """A state as an entry of the declaration, rooted at a parameter of the operation."""
    if state == HIDDEN or state.startswith(OUTSIDE):
        return None
    if state.startswith("="):
        return state[1:]
    if state.startswith("rng:"):
        return state
    best: tuple[int, str] | None = None
    for param, argument in zip(op_of(node).signature.params, node.args, strict=True):
        if not isinstance(argument, fx.Node) or not is_state(argument):
            continue
        root = facts.get(argument).state
        if root and (state == root or state.startswith(f"{root}.")):
            found = (len(root), param + state[len(root) :])
            best = max(best, found) if best else found
    return best[1] if best else f"@{state}"


def spelled(node: fx.Node, entry: str) -> str:
    """An entry as the author of the component writes it: by the parameters of the function, with
    ``self`` for the object that a method is called on."""
    root, dot, rest = entry.partition(".")
    op = op_of(node)
    function = function_of(op.attributes.get("declared"))
    if function is None:
        return entry
    names = list(inspect.signature(function).parameters)
    for statement in op.attributes.get("stmts", ()):
        for call in (p for p in ast.walk(statement) if isinstance(p, ast.Call)):
            method = isinstance(call.func, ast.Attribute) and names[:1] == ["self"]
            given = dict(zip(names[method:], call.args, strict=False))
            given |= {str(k.arg): k.value for k in call.keywords}
            if method:
                given["self"] = call.func.value  # type: ignore[attr-defined]
            for name, value in given.items():
                if isinstance(value, ast.Name) and value.id == root:
                    return f"{name}{dot}{rest}"
    return entry
