"""Operations that have not run yet and whose source tells everything: printing, logging, counting.

Types of what they are handed are known where some operation that ran was handed the same, or where
the source says them. What trains, calls a module or makes tensors with a history is left out: what
an autograd graph holds is found by looking at it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.fx as fx

from rose_compiler.frontend.effects_val import CONTAINERS, Effects
from rose_compiler.frontend.record import Record
from rose_compiler.ir import facts
from rose_compiler.ir.ops import UNBOUND
from rose_compiler.ir.program import Program, is_item, is_state, op_of
from rose_compiler.ir.scope import Scope

Analyze = Callable[..., Effects]
_NEEDS_WATCHING = frozenset(("module", "backward", "step", "optimizer", "reset", "declared"))
_NO_GRAD = ("no_grad", "inference_mode")
_PLAIN = (int, float, bool, complex, str, bytes, type(None), slice, range)


def understood(
    program: Program,
    unrun: Sequence[fx.Node],
    record: Record,
    found: dict[fx.Node, Effects],
    trained: set[str],
    analyze: Analyze,
) -> Iterator[tuple[fx.Node, Effects]]:
    """The operations of ``unrun`` whose effects follow from their source, with these."""
    scope = Scope(program)
    kinds = _kinds_seen(scope, record)
    wanted = set(unrun)
    for node in (n for graph in reversed(list(program.graphs())) for n in graph.nodes):
        if node not in wanted:
            continue
        op = op_of(node)
        if op.kind != "block" or any("next(" in line for line in op.source):
            continue
        types = tuple(_kind_of(argument, scope, kinds) for argument in node.args)
        effects = analyze(op, node, record, {}, trained, types)
        for k, name in enumerate(op.attributes.get("outputs", ())):
            made = {effects.kinds.get(name)}
            for target in (node, *node.users):
                if _stands_for(target, node, k, op.signature.results):
                    kinds.setdefault(target, made)
        if not effects.unknown and not effects.backward and _harmless(node, effects):
            op.attributes["calls"] = frozenset(effects.calls)
            yield node, effects


def _stands_for(target: fx.Node, node: fx.Node, position: int, results: int) -> bool:
    if results == 1:
        return target is node
    return is_item(target) and target.args[1:] == (position,)


def _harmless(node: fx.Node, effects: Effects) -> bool:
    """Whether nothing of it needs to be watched."""
    if effects.calls & _NEEDS_WATCHING or effects.pending:
        return False
    quiet = any(c.kind in _NO_GRAD for c in facts.get(node).context)
    for kind in effects.kinds.values():
        if kind is None or not issubclass(kind, (*_PLAIN, *CONTAINERS, tuple)):
            tensor = kind is not None and issubclass(kind, torch.Tensor)
            if not (tensor and quiet):
                return False
    return True


def _kinds_seen(scope: Scope, record: Record) -> dict[fx.Node, set[type | None]]:
    """The types that values were seen to have, by the nodes that make them."""
    kinds: dict[fx.Node, set[type | None]] = {}
    for node, combinations in record.types.items():
        for position, argument in enumerate(node.args):
            if isinstance(argument, fx.Node) and not is_state(argument):
                seen = {c[position] for c in combinations}
                kinds.setdefault(argument, set()).update(seen)
                resolved = scope.resolve(argument)
                if isinstance(resolved, fx.Node):
                    kinds.setdefault(resolved, set()).update(seen)
    for node, results in record.results.items():
        kinds.setdefault(node, set()).update(map(type, results))
    return kinds


def _kind_of(argument: Any, scope: Scope, kinds: dict[fx.Node, set[type | None]]) -> type | None:
    if not isinstance(argument, fx.Node):
        return type(argument)
    resolved = scope.resolve(argument)
    for node in (argument, resolved):
        nothing = {type(UNBOUND), type(None)}
        seen = (kinds.get(node) or set()) - nothing if isinstance(node, fx.Node) else set()
        if len(seen) == 1:
            return seen.pop()
    return None
