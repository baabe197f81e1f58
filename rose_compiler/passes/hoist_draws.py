"""Random draws taken out of operations, so that a batch can be cut after its numbers are drawn."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.fx as fx

from rose_compiler.base.remarks import Blocker
from rose_compiler.ir import facts
from rose_compiler.ir.deps import title
from rose_compiler.ir.draws import Hoisted, Noise, differs, take_draws
from rose_compiler.ir.facts import Spec
from rose_compiler.ir.ops import DRAW, RANDN
from rose_compiler.ir.program import LoopView, is_call, is_item, op_of, placeholders
from rose_compiler.ir.recorded import records
from rose_compiler.ir.rewriter import Rewriter
from rose_compiler.ir.sizes import sizes_of
from rose_compiler.ir.slice import draws_random
from rose_compiler.passes.base import PassContext, context_of
from rose_compiler.passes.graphs import named_axes, part, retire
from rose_compiler.passes.recurrence import Recurrence, env_state, recurrence


def hoist_draws(loop: LoopView, rewrite: Rewriter) -> None:
    """Draw in front of each operation on the way to a step, where its batch is to be cut."""
    found = recurrence(loop)
    context = context_of(rewrite)
    if isinstance(found, Blocker) or not _wanted(found, context):
        return
    for node in found.before:
        if is_item(node) or not is_call(node) or not drawing(node):
            continue
        taken = without_draws(node)
        if isinstance(taken, Blocker):
            rewrite.missed(node, taken)
        elif rewrite.spend():
            rewrite.applied(
                node, f"{title(node)} is handed its {len(taken.noises)} whole-batch draws"
            )
            replace_draws(node, taken, rewrite)


def _wanted(found: Recurrence, context: PassContext) -> bool:
    return context.options.groups > 1 and len(context.shards.get(env_state(found), ())) > 1


def drawing(node: fx.Node) -> tuple[str, ...]:
    """The nodes of a traced operation's graph that draw from torch's generator, in order."""
    body = op_of(node).body
    if body is None:
        return ()
    return tuple(n.name for n in body.graph.nodes if draws_random(n))


#: What was found out about a graph: every decision that is tried asks again.
_KNOWN: WeakKeyDictionary[fx.GraphModule, Hoisted | Blocker] = WeakKeyDictionary()


def without_draws(node: fx.Node) -> Hoisted | Blocker:
    """A traced operation's graph with its draws as inputs, or why they stay inside."""
    body = op_of(node).body
    assert body is not None
    if records(node):
        return Blocker(
            "grad-graph", f"{title(node)} records gradients, and is left as it was captured"
        )
    if body not in _KNOWN:
        _KNOWN[body] = _without_draws(node, body)
    return _KNOWN[body]


def _without_draws(node: fx.Node, body: fx.GraphModule) -> Hoisted | Blocker:
    names = drawing(node)
    for inner in body.graph.nodes:
        if inner.name in names and facts.get(inner).spec is None:
            return Blocker(
                "draw-shape-unknown", f"the shape of `{inner.name}` in {title(node)} is not known"
            )
    taken = take_draws(body, names)
    if isinstance(taken, Blocker):
        return taken
    given = [_value(facts.get(n).spec, k) for k, n in enumerate(placeholders(body.graph))]
    if any(v is None for v in given):
        return Blocker("not-probed", f"no values to try {title(node)} on")
    try:
        reason = differs(body, taken, given, facts.get(node).context)
    except (ValueError, RuntimeError) as error:
        return Blocker("not-probed", f"{title(node)} raises on values made up for a try: {error}")
    return reason or taken


def _value(spec: Spec | None, seed: int) -> Any:
    """A value of this type to compute with; None where none can be made up."""
    if spec is None:
        return None
    if spec.keys:
        entries = {k: _value(s, seed) for k, s in zip(spec.keys, spec.items, strict=True)}
        return None if any(v is None for v in entries.values()) else entries
    if spec.kind == "scalar":
        return 1 if spec.type_name == "int" else 1.0
    if spec.kind not in ("tensor", "array") or not spec.dtype:
        return None
    dtype = getattr(torch, spec.dtype)
    generator = torch.Generator().manual_seed(seed)
    made = (
        torch.randn(spec.shape, generator=generator, device="cpu")
        .abs()
        .to(dtype)
        .to(spec.device or "cpu")
    )
    return made if spec.kind == "tensor" else made.numpy()


def replace_draws(node: fx.Node, taken: Hoisted, rewrite: Rewriter, *, alone: bool = False) -> None:
    """Draw in front of a node, and let it call an operation that takes the numbers. ``alone``: if
    sizes may turn out to be others, nobody draws in between, so that it can still draw itself; for
    the others see :func:`~rose_compiler.passes.graphs.draw_alone`."""
    op = op_of(node)
    drawn = [draw_before(noise, node, rewrite) for noise in taken.noises]
    axes = named_axes(node)
    axes |= {noise.name: 0 for noise in taken.noises if noise.shape}
    retire(rewrite.program, node)
    noises = () if sizes_of(op) is None else [n.name for n in taken.noises]
    made = part(rewrite.program, op, taken.gm, op.name, axes, noises=noises, alone=alone)
    rewrite.retarget(node, made, *node.args, *drawn)


def draw_before(noise: Noise, node: fx.Node, rewrite: Rewriter) -> fx.Node:
    """Draw random numbers in front of a node."""
    spec = Spec("tensor", "Tensor", noise.shape, noise.dtype, noise.device)
    dtype, device = getattr(torch, noise.dtype), noise.device
    if noise.standard:
        op, args = RANDN, (*noise.shape, dtype, device)
    else:
        op, args = DRAW, (noise.kind, noise.shape, noise.parameters, dtype, device)
    return rewrite.call(op, *args, before=node, like=node, name=noise.name, spec=spec)
