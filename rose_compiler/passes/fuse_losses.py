"""A loss and its ``backward`` as one operation, for the fuse pass: Inductor compiles it."""

from __future__ import annotations

from dataclasses import replace

import torch.fx as fx

from rose_compiler.base.remarks import Blocker
from rose_compiler.ir import facts
from rose_compiler.ir.losses import Found, Loss, graph_leaving, locate
from rose_compiler.ir.ops import STATE
from rose_compiler.ir.program import Program, is_call, is_item, op_of
from rose_compiler.ir.rewriter import Rewriter
from rose_compiler.ir.state_node import state_node
from rose_compiler.passes.base import PassContext, context_of


def fuse_losses(program: Program, rewrite: Rewriter) -> None:
    """Fuse each loss with its ``backward`` where that is known to be the same training."""
    context = context_of(rewrite)
    for name, loss in context.losses.items():
        node = next((n for n in program.nodes() if _is_call_of(n, name)), None)
        if node is None:
            continue
        if isinstance(loss, Blocker):
            rewrite.missed(node, loss)
            continue
        found = why_not(program, loss, context)
        if isinstance(found, Blocker):
            rewrite.missed(node, found)
        elif rewrite.spend():
            fuse_loss(program, loss, found, rewrite)


def why_not(program: Program, loss: Loss, context: PassContext) -> Found | Blocker:
    """Where a loss stands that can be fused with its ``backward``, or why it can't."""
    if context.numerics == "bitwise":
        return Blocker(
            "probe-bits-differ",
            "compiled kernels round otherwise than one operation after the other",
            'numerics="close"',
        )
    if not context.options.compile:
        return Blocker("switched-off", "the decision leaves it to torch's own kernels")
    found = locate(program, loss)
    if isinstance(found, Blocker):
        return found
    leaving = graph_leaving(program, found)
    if leaving is not None:
        return Blocker("grad-graph", f"`{leaving.name}` uses a result with its graph")
    return found


def fuse_loss(program: Program, loss: Loss, found: Found, rewrite: Rewriter) -> fx.Node:
    """Replace the statements of a loss and its ``backward`` by one operation."""
    states = [state_node(path, rewrite) for path in loss.states]
    last = found.backward
    name = program.ops.fresh(loss.op.name)
    op = loss.op if name == loss.op.name else loss.op.with_signature(name=name)
    made = rewrite.call(op, *found.inputs, *states, before=last, like=last, name=name)
    facts.put(made, alias=())
    for position, old in enumerate(found.results):
        new = made if len(found.results) == 1 else rewrite.item(made, position)
        facts.put(new, spec=_detached(old), alias=())
        rewrite.replace(old, new)
    rewrite.erase(last)
    for node in reversed(found.nodes):
        for item in list(filter(is_item, node.users)):
            rewrite.erase(item)
        rewrite.erase(node)
    count = len(found.nodes) + 1
    rewrite.applied(made, f"{count} statements up to its backward are one graph for Inductor")
    return made


def _detached(node: fx.Node) -> facts.Spec | None:
    spec = facts.get(node).spec
    return None if spec is None else replace(spec, requires_grad=False)


def _is_call_of(node: fx.Node, name: str) -> bool:
    return is_call(node) and not is_call(node, STATE) and op_of(node).name == name
