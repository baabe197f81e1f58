"""In which mode, training or evaluation, a module was when an operation ran, and always will be."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.fx as fx

from rose_compiler.ir.deps import Dependences
from rose_compiler.ir.effects import EVERYTHING, related
from rose_compiler.ir.program import is_call, op_of

#: A module and whether it was in training mode.
Flag = tuple[torch.nn.Module, bool]


def flags(modules: Sequence[torch.nn.Module]) -> tuple[Flag, ...]:
    """The mode that each module is in now."""
    return tuple((m, m.training) for m in modules)


@contextmanager
def as_recorded(recorded: Sequence[Flag]) -> Iterator[None]:
    """Modules in the modes that they were in when something ran."""
    changed = [(m, m.training) for m, was in recorded if m.training is not was]
    for module, now in changed:
        module.training = not now
    try:
        yield
    finally:
        for module, now in changed:
            module.training = now


def stays(node: fx.Node, deps: Dependences) -> bool:
    """Whether the modules that an operation calls are in the same mode whenever it runs.

    Who calls the program finds them in the mode that they were captured in, by a guard. What
    switches one inside has to be ``m.eval()`` or ``m.train()``, in front of the loops that the
    operation stands in, and the last that does on the way there.
    """
    modes = {e.state for e in deps.effects(node) if not e.write and _is_mode(e.state)}
    if not modes:
        return True
    graph, at = node.graph, node
    while True:
        writers = [n for n in graph.nodes if n is not at and _switches(n, modes, deps)]
        order = {n: k for k, n in enumerate(graph.nodes)}
        before = [n for n in writers if order[n] < order[at]]
        owner = deps.scope.owner[graph]
        if before:
            return _sets_all(before[-1], modes, deps)
        if owner is None:
            return True
        if writers:
            return False  # by a later statement of an earlier trip, or by the other arm
        graph, at = owner.graph, owner


def _is_mode(state: str) -> bool:
    return state.endswith(".mode") or ".mode." in state


def _switches(node: fx.Node, modes: set[str], deps: Dependences) -> bool:
    return any(
        e.write and e.state != EVERYTHING and any(related(e.state, m) for m in modes)
        for e in deps.effects(node)
        if e.state == EVERYTHING or _is_mode(e.state)
    )


def _sets_all(node: fx.Node, modes: set[str], deps: Dependences) -> bool:
    """Whether a statement is ``m.eval()`` or ``m.train()`` of a module that all modes belong to."""
    known = op_of(node).attributes if is_call(node) else {}
    statements: tuple[ast.stmt, ...] = known.get("stmts", ())
    if len(statements) != 1 or not isinstance(statements[0], ast.Expr):
        return False
    call = statements[0].value
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return False
    if call.func.attr not in ("eval", "train"):
        return False
    if call.keywords or not all(isinstance(a, ast.Constant) for a in call.args):
        return False
    written = [e.state for e in deps.effects(node) if e.write]
    return all(any(m == w or m.startswith(f"{w}.") for w in written) for m in modes)
