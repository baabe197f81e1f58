"""The modes and guards that emitted lines stand under.

Neighbours under the same modes share one ``with``, neighbours of the same stage one ``if``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch.fx as fx

from rose_compiler.codegen.expressions import Printer
from rose_compiler.codegen.schedule import Action
from rose_compiler.ir import facts
from rose_compiler.ir.casts import indifferent
from rose_compiler.ir.contexts import ALIKE, UNVERSIONED
from rose_compiler.ir.facts import Context
from rose_compiler.ir.ops import BRANCH, LOOP
from rose_compiler.ir.program import BranchView, LoopView, is_call

if TYPE_CHECKING:
    from rose_compiler.codegen.emitter import Emitter

Modes = tuple[Context, ...]


def modes_of(node: fx.Node) -> Modes:
    """The modes of a node; names of stretches are none."""
    return tuple(c for c in facts.get(node).context if c.kind != "phase")


def context_of(action: Action) -> Modes | None:
    """The modes that an action's lines stand under; None where that makes no difference."""
    return None if action.what in ("await", "copy") else action_modes(action.node)


def action_modes(node: fx.Node) -> Modes | None:
    """The modes that a node runs under; None where that makes no difference."""
    if indifferent(node):
        return None
    if is_call(node, LOOP):
        return loop_modes(node)
    if is_call(node, BRANCH):
        view = BranchView(node)
        inside = [*_inside(view.then.graph), *_inside(view.orelse.graph), modes_of(node)]
        return _common(inside)
    return modes_of(node)


def common_modes(nodes: Iterable[fx.Node]) -> Modes:
    """The modes that some nodes share."""
    found = [m for n in nodes if (m := action_modes(n)) is not None]
    return _common(found) if found else ()


def loop_modes(node: fx.Node) -> Modes:
    """The modes around a loop: its own, and those that all of its body shares.

    A mode that does more than hold for its body stays inside, and an iterator is advanced under
    the loop's own modes.
    """
    own, view = modes_of(node), LoopView(node)
    inside = _inside(view.graph)
    if not inside:
        return own
    shared = _common(inside)
    if shared[: len(own)] != own:
        return _common([shared, own])
    extra = shared[len(own) :]
    if view.facts.kind != "range" or any(c.kind not in ALIKE for c in extra):
        return own
    return shared


def _inside(graph: fx.Graph) -> list[Modes]:
    found: list[Modes] = []
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method") or indifferent(node):
            continue
        if is_call(node, LOOP):
            found.append(loop_modes(node))
        elif is_call(node, BRANCH):
            view = BranchView(node)
            found += [*_inside(view.then.graph), *_inside(view.orelse.graph)]
        else:
            found.append(modes_of(node))
    return found


def _common(all_modes: list[Modes]) -> Modes:
    first, *rest = all_modes
    size = len(first)
    for other in rest:
        while first[:size] != other[:size]:
            size -= 1
    return first[:size]


def text(context: Context, printer: Printer) -> str:
    """What enters a mode."""
    if context.kind == UNVERSIONED:
        return "rt.unversioned()"
    words: dict[str, Any] = {a[0]: a[1] for a in context.args if isinstance(a, tuple)}
    args = tuple(a for a in context.args if not isinstance(a, tuple))
    return f"torch.{context.kind}({printer.arguments(args, words, {})})"


class Suite:
    """One level of indentation whose lines may stand under further guards and modes."""

    def __init__(self, emitter: Emitter) -> None:
        self.emitter = emitter
        self.base = len(emitter.open)
        self.trips = 0

    def enter(self, trips: int, modes: Modes | None) -> None:
        """Bring the next line under its modes, and under a guard that so many trips have begun."""
        emitter = self.emitter
        if trips != self.trips:
            self.leave()
            if trips:
                started = emitter.started()
                emitter.writer.open(f"if {started}:" if trips == 1 else f"if {started} >= {trips}:")
                self.trips = trips
        if modes is None:
            return
        shared = 0
        while shared < min(len(emitter.open), len(modes)) and (
            emitter.open[shared] == modes[shared]
        ):
            shared += 1
        # modes of the text around can't be left from inside
        assert shared >= self.base, f"{modes} inside {emitter.open[: self.base]}"
        self._close(shared)
        for context in modes[len(emitter.open) :]:
            emitter.writer.open(f"with {text(context, emitter.module.printer)}:")
            emitter.open.append(context)

    def _close(self, size: int) -> None:
        while len(self.emitter.open) > size:
            self.emitter.open.pop()
            self.emitter.writer.close()

    def leave(self) -> None:
        """End all guards and modes of this level."""
        self._close(self.base)
        if self.trips:
            self.emitter.writer.close()
            self.trips = 0
