"""Which runs of operations become one graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.fx as fx

from rose_compiler.base.errors import SourceLocation
from rose_compiler.frontend.holding import written_in
from rose_compiler.frontend.module_modes import stays
from rose_compiler.frontend.record import Record
from rose_compiler.frontend.varying import why_varying
from rose_compiler.ir import facts
from rose_compiler.ir.deps import Dependences
from rose_compiler.ir.effects import RNG_TORCH, related
from rose_compiler.ir.ops import STATE
from rose_compiler.ir.program import is_call, is_item, op_of

#: Where simulators made of tensors live; their steps are inlined.
INLINED_SIMULATOR = "rose_compiler/sim/torch_envs.py"
#: Fewer statements than this are not worth a graph, unless they call a module.
WORTH = 4
_NO_GRAD = ("no_grad", "inference_mode")


@dataclass
class Run:
    """Neighbouring operations that can be one traced graph."""

    nodes: list[fx.Node]

    @property
    def members(self) -> set[fx.Node]:
        return set(self.nodes)


def is_step(node: fx.Node) -> bool:
    """Whether an operation is a simulator's step, or part of one made of tensors."""
    if op_of(node).kind == "step":
        return True
    return any(INLINED_SIMULATOR in w.file for w in _places(node))


def _places(node: fx.Node) -> list[SourceLocation]:
    where = facts.get(node).origin.where
    return [] if where is None else [where]


def find_runs(
    graph: fx.Graph, record: Record, deps: Dependences, *, varying: bool = False
) -> list[Run]:
    """Maximal runs of traceable operations; items in between belong to what they pick from. With
    ``varying``, as if no argument's type changed from trip to trip."""
    runs: list[Run] = []
    written = written_in(graph, deps)

    def fits(node: fx.Node) -> bool:
        # what a state holds is rebound while the loop runs, so a graph can't be handed it once
        if not traceable(node, record, varying=varying) or not stays(node, deps):
            return False
        return not any(
            related(e.state, w) for e in deps.effects(node) for w in written if not e.write
        )

    current: list[fx.Node] = []
    context: Any = None
    for node in graph.nodes:
        if is_item(node) or node.op in ("placeholder", "get_attr") or is_call(node, STATE):
            continue
        if fits(node) and (not current or facts.get(node).context == context):
            current.append(node)
            context = facts.get(node).context
            continue
        if current:
            runs.append(Run(current))
        current = [node] if fits(node) else []
        context = facts.get(node).context
    if current:
        runs.append(Run(current))
    return [r for r in runs if worth(r.nodes)]


def worth(nodes: Sequence[fx.Node]) -> bool:
    """Whether so many statements, or a call of a module among them, are worth a graph."""
    if len(nodes) >= WORTH:
        return True
    return any("module" in op_of(n).attributes.get("calls", ()) for n in nodes)


def traceable(node: fx.Node, record: Record, *, varying: bool = False) -> bool:
    """Whether one operation may be part of a graph: torch only, nothing written but the
    generator, arguments of one type (or, if ``varying``, of any).
    """
    if not is_call(node) or node not in record.examples:
        return False
    if not varying and why_varying(node, record) is not None:
        return False
    op = op_of(node)
    signature = op.signature
    if op.kind != "block" or signature.reads is None or signature.writes is None:
        return False
    if any(w != RNG_TORCH for w in signature.writes) or "host" in signature.reads:
        return False
    if any(r.startswith("rng:") and r != RNG_TORCH for r in signature.reads):
        return False
    spec = facts.get(node).spec
    if spec is None:
        return False
    results = spec.items if op.signature.results > 1 else (spec,)
    no_grad = any(c.kind in _NO_GRAD for c in facts.get(node).context)
    if not no_grad and any(s.requires_grad or s.kind != "tensor" for s in results):
        return False
    return all(s.kind == "tensor" or s.type_name.startswith("torch.distributions") for s in results)


def is_tensor_item(node: fx.Node) -> bool:
    """Whether a node picks a tensor out of a result."""
    if not is_item(node):
        return False
    spec = facts.get(node.args[0]).spec  # type: ignore[arg-type]
    position = node.args[1]
    return (
        spec is not None
        and isinstance(position, int)
        and position < len(spec.items)
        and spec.items[position].kind == "tensor"
    )
