"""Regions of ``autocast``: for how long casts of weights are kept.

Within one ``with torch.autocast(...)`` torch casts a weight once, keeps the cast until the
outermost region is left, and hands it to all that use the weight. So two forwards share the cast
and what is recorded of it, and their gradients for the weight are added up in the lower precision;
a forward behind a step of the optimizer sees the weights as they were. Torch has one such store
for all threads, and whichever thread leaves its own outermost region empties it.

Where that may show, the operations of a region stay together, in order, on the coordinator. Where
nothing in a region records gradients or changes what it casts, each cast is the same however often
it is made, and the region may be left and entered again.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch.fx as fx

from rose_compiler.ir import facts
from rose_compiler.ir.bodies import graphs_of
from rose_compiler.ir.contexts import region_of
from rose_compiler.ir.effects import EVERYTHING, GLOBAL_STATES, related
from rose_compiler.ir.facts import Context
from rose_compiler.ir.ops import APPEND, BRANCH, LOOP, MERGE, NEW_LIST, PIECE, SHARD, STATE
from rose_compiler.ir.program import is_call, is_exit, is_item, op_of
from rose_compiler.ir.recorded import goes_back, records

if TYPE_CHECKING:
    from rose_compiler.ir.program import Program
    from rose_compiler.ir.summary import Summary

#: What dependences name the casts that a region keeps.
CASTS = "autocast"
_INDIFFERENT = (STATE, SHARD, NEW_LIST, APPEND, PIECE, MERGE)
#: Calls of simulators: they change no weights.
_SIMULATES = frozenset({"step", "reset"})


def indifferent(node: fx.Node) -> bool:
    """Whether a node does the same under all modes."""
    if is_exit(node) or is_item(node) or node.target in _INDIFFERENT:
        return True
    return getattr(node.target, "__module__", "") == "_operator" and _on_numbers(node)


def _on_numbers(node: fx.Node) -> bool:
    specs = [facts.get(n).spec for n in node.all_input_nodes]
    return all(s is None or s.kind == "scalar" for s in specs)


def under_autocast(node: fx.Node) -> bool:
    """Whether an operation, or one in its bodies, runs under an ``autocast`` that is on."""
    if is_call(node, LOOP) or is_call(node, BRANCH):
        return any(under_autocast(n) for graph in graphs_of(node) for n in graph.nodes)
    if not is_call(node) or op_of(node).kind == "builtin" or indifferent(node):
        return False
    inner = [c for c in facts.get(node).context if c.kind == "autocast"][-1:]
    return any(map(_on, inner))


def _on(context: Context) -> bool:
    words: dict[str, Any] = dict(a for a in context.args if isinstance(a, tuple))
    given = [a for a in context.args if not isinstance(a, tuple)]  # device, dtype, enabled
    return words.get("enabled", given[2] if len(given) > 2 else True) is not False


def anew(
    contexts: tuple[Context, ...], outer: tuple[Context, ...], numbers: dict[int, int], of: Program
) -> tuple[Context, ...]:
    """The modes of a copy that runs on another trip: each ``with`` inside of the loop, whose own
    modes are ``outer``, is another region there. ``numbers`` has those given to this trip."""
    kept = {c.region for c in outer}
    made = []
    for context in contexts:
        if context.region and context.region not in kept:
            if context.region not in numbers:
                used = (c.region for n in of.nodes() for c in facts.get(n).context)
                numbers[context.region] = 1 + max((*used, *numbers.values()))
            context = Context(context.kind, context.args, numbers[context.region])
        made.append(context)
    return tuple(made)


class Casts:
    """Which operations of a program stay together with the others of their region."""

    def __init__(self, scope: Summary) -> None:
        self.scope = scope
        self._kept: frozenset[int] | None = None

    def keeps(self, node: fx.Node) -> bool:
        """Whether a node lies in a region whose casts several operations share, and that shows."""
        number = region_of(facts.get(node).context)
        if not number or node.op != "call_function" or indifferent(node):
            return False
        if self._kept is None:
            self._kept = self._find()
        return number in self._kept

    def _find(self) -> frozenset[int]:
        regions: dict[int, list[fx.Node]] = {}
        for node in self.scope.program.nodes():
            number = region_of(facts.get(node).context)
            if number and node.op == "call_function" and not indifferent(node):
                regions.setdefault(number, []).append(node)
        return frozenset(
            number
            for number, nodes in regions.items()
            if any(map(under_autocast, nodes)) and _several(nodes) and not self._quiet(nodes)
        )

    def _quiet(self, nodes: Sequence[fx.Node]) -> bool:
        """Whether a cast is the same whenever a region's operations make it."""
        ops = [n for n in nodes if is_call(n) and not _has_bodies(n)]
        if any(records(n) or goes_back(n) for n in ops):
            return False
        ops = [n for n in ops if op_of(n).kind not in _SIMULATES]
        effects = {n: self.scope.effects(n) for n in ops}
        for one, other in itertools.permutations(ops, 2):
            changed = [e.state for e in effects[one] if e.write and _may_be_cast(e.state)]
            if any(related(state, e.state) for state in changed for e in effects[other]):
                return False
        return True


def _has_bodies(node: fx.Node) -> bool:
    return is_call(node, LOOP) or is_call(node, BRANCH)


def _several(nodes: Sequence[fx.Node]) -> bool:
    """Whether a region runs more than one operation."""
    return any(is_call(n, LOOP) for n in nodes) or sum(not _has_bodies(n) for n in nodes) > 1


def _may_be_cast(state: str) -> bool:
    """Whether a state may be, or hold, a weight: what a trip makes itself is none."""
    return state == EVERYTHING or (state not in GLOBAL_STATES and not state.startswith("%"))
