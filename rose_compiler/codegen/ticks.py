"""Where an instrumented function calls ``tick``, and what each call stands for."""

from __future__ import annotations

from collections.abc import Callable

import torch.fx as fx

from rose_compiler.base.marks import Mark, MarkKind, key_of
from rose_compiler.codegen.schedule import Action, Schedule, aside
from rose_compiler.ir import facts
from rose_compiler.ir.ops import BRANCH, LOOP
from rose_compiler.ir.program import LoopView, is_call, is_exit, op_of

#: Letters of a block's first statement in its label.
_TEXT = 40
_KINDS: dict[str, MarkKind] = {"run": "run", "submit": "submit", "await": "wait"}


class Ticks:
    """Numbers the marks of one function; without ``call`` there are none."""

    def __init__(self, plan: Schedule, call: Callable[[int], object] | None) -> None:
        self.plan, self.call = plan, call
        self.marks: list[Mark] = []
        self._paths: dict[fx.Graph, tuple[str, ...]] = {}

    def path(self, graph: fx.Graph) -> tuple[str, ...]:
        """The names of the loops around a body, outermost first."""
        found = self._paths.get(graph)
        if found is None:
            owner = self.plan.deps.scope.owner[graph]
            found = () if owner is None else self.path(owner.graph)
            if owner is not None and is_call(owner, LOOP):
                found = (*found, owner.name)
            self._paths[graph] = found
        return found

    def of(self, action: Action) -> int | None:
        """The mark behind an action that is not merged; a loop's own stands behind the loop."""
        if action.what == "copy" or is_exit(action.node):
            return None
        if aside(action) and self.call is not None:
            return self._add(action.node, _KINDS[action.what], action.stage, action.lane)
        return self.node(action.node, _KINDS[action.what], action.stage, action.lane)

    def node(
        self, node: fx.Node, kind: MarkKind = "run", stage: int = 0, lane: str = ""
    ) -> int | None:
        """The mark behind what a node does; ``None`` for what takes no time of its own."""
        if self.call is None or not is_call(node) or is_call(node, BRANCH):
            return None
        return self._add(node, "leave" if is_call(node, LOOP) else kind, stage, lane)

    def trip(self, loop: fx.Node) -> int | None:
        """The mark at the beginning of a trip."""
        return None if self.call is None else self._add(loop, "trip")

    def _add(self, node: fx.Node, kind: MarkKind, stage: int = 0, lane: str = "") -> int:
        path = self.path(node.graph)
        key = key_of(path, node.name)
        where = facts.get(node).origin.where
        self.marks.append(Mark(kind, key, label_of(node), path, lane, stage, where))
        return len(self.marks) - 1


def label_of(node: fx.Node) -> str:
    """What people call a node: a loop's label, an operation's name, a block's line and text."""
    if is_call(node, LOOP):
        return LoopView(node).label
    if is_call(node, BRANCH):
        where = facts.get(node).origin.where
        return node.name if where is None else f"line {where.line}"
    op = op_of(node)
    if op.kind == "block" and op.attributes.get("stmts"):
        where = facts.get(node).origin.where
        if where is not None:
            text = " ".join(op.source[0].split()) if op.source else ""
            short = text if len(text) <= _TEXT else text[: _TEXT - 2] + " …"
            return f"{where.line}: {short}" if short else f"line {where.line}"
    return op.name
