"""A loss and its ``backward`` as one operation, for the fuse pass: Inductor compiles it, or
TorchScript runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch.fx as fx

from rose_compiler.base.remarks import Blocker
from rose_compiler.ir import facts
from rose_compiler.ir.deps import title
from rose_compiler.ir.effects import RNG_TORCH
from rose_compiler.ir.losses import (
    Found,
    Loss,
    graph_leaving,
    in_front_of_the_loss,
    locate,
    with_backward,
)
from rose_compiler.ir.ops import DROPPED, STATE, Op, Signature
from rose_compiler.ir.program import Program, is_call, is_item, op_of
from rose_compiler.ir.rewriter import Rewriter
from rose_compiler.ir.sizes import SIZES, Shape, Sizes, Whole, refused
from rose_compiler.ir.state_node import state_node
from rose_compiler.passes.base import PassContext, context_of
from rose_compiler.passes.hoist_draws import draw_before


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
    if not context.options.compile and not context.options.script:
        return Blocker("switched-off", "the decision leaves it to torch's own kernels")
    if context.options.compile and context.numerics == "bitwise":
        return Blocker(
            "probe-bits-differ",
            "compiled kernels round otherwise than one operation after the other",
            'numerics="close"',
        )
    found = locate(program, loss)
    if isinstance(found, Blocker):
        return found
    if found.behind and not context.run_ahead:
        why = f"{title(found.behind[0])} would come behind the backward"
        return Blocker("may-raise", why, "run_ahead=True")
    for position, result in enumerate(found.results):
        leaving = graph_leaving(program, found, result)
        if leaving is not None and not in_front_of_the_loss(loss, position):
            why = f"`{leaving.name}` goes on with `{result.name}` and its graph"
            return Blocker("grad-graph", why)
    return found


def fuse_loss(program: Program, loss: Loss, found: Found, rewrite: Rewriter) -> fx.Node:
    """Replace the statements of a loss and its ``backward`` by one operation."""
    last = found.backward
    for node in reversed(found.behind):
        rewrite.move(node, after=last)
        for item in filter(is_item, list(node.users)):
            rewrite.item(node, item.args[1])  # type: ignore[arg-type]  # it follows
    opened = dict.fromkeys(node for node, item in found.inputs if item is not None)
    told = {node: _told(node, loss, found) for node in opened}
    stop = loss.op.attributes[SIZES].stop if SIZES in loss.op.attributes else refused
    tell = {node: stop if param is None else None for node, param in told.items()}
    counted = {node: _counted(node, tell[node], last, rewrite) for node in opened}
    given = [
        node if item is None else rewrite.item(counted[node], item) for node, item in found.inputs
    ]
    states = [state_node(path, rewrite) for path in loss.states]
    drawn = [draw_before(noise, last, rewrite) for noise in loss.noises]
    recorded = [
        k for k, r in enumerate(found.results) if graph_leaving(program, found, r) is not None
    ]
    name = program.ops.fresh(loss.op.name)
    compiled = context_of(rewrite).options.compile
    tiles = 0 if compiled else _tiles(last, rewrite)
    made = rewrite.call(
        _recording(
            loss,
            name,
            recorded,
            [p for p in told.values() if p is not None],
            script=not compiled,
            tiles=tiles,
        ),
        *given,
        *states,
        *drawn,
        before=last,
        like=last,
        name=name,
    )
    facts.put(made, alias=())
    for position, old in enumerate(found.results):
        new = made if len(found.results) == 1 else rewrite.item(made, position)
        spec = facts.get(old).spec if position in recorded else _detached(old)
        facts.put(new, spec=spec, alias=())
        rewrite.replace(old, new)
    rewrite.erase(last)
    for node in reversed(found.nodes):
        for item in list(filter(is_item, node.users)):
            rewrite.erase(item)
        rewrite.erase(node)
    count = len(found.nodes) + 1
    whose = "Inductor" if compiled else "TorchScript"
    cut = f", in {tiles} tiles of its rows where they add up" if tiles > 1 else ""
    rewrite.applied(made, f"{count} statements up to its backward are one graph for {whose}{cut}")
    return made


def _tiles(backward: fx.Node, rewrite: Rewriter) -> int:
    """In how many tiles of rows a loss may be computed; whether it is a sum over rows is seen when
    it first runs."""
    context = context_of(rewrite)
    if context.options.tiles > 1 and context.numerics == "bitwise":
        why = "sums of tiles round otherwise than sums over all rows"
        rewrite.missed(backward, Blocker("probe-bits-differ", why, 'numerics="close"'))
        return 0
    return context.options.tiles


def _told(node: fx.Node, loss: Loss, found: Found) -> str | None:
    """The parameter that is an item of a tuple, and a tensor: where it is none, the tuple has more
    or fewer items. None where no such item is taken."""
    spec = facts.get(node).spec
    if spec is None or SIZES not in loss.op.attributes:
        return None
    for param, (of, item) in zip(loss.op.signature.params, found.inputs, strict=False):
        if of is node and item is not None and spec.items[item].kind == "tensor":
            return param
    return None


def _counted(
    node: fx.Node, stop: Callable[..., Any] | None, before: fx.Node, rewrite: Rewriter
) -> fx.Node:
    """The same tuple, with as many items as it had when the loss was traced: its graph takes some
    of them, and would pass over any more. Otherwise ``stop``, or tell who takes them."""
    spec = facts.get(node).spec
    assert spec is not None
    count = len(spec.items)

    def all_items(parts: tuple[Any, ...]) -> tuple[Any, ...]:
        if len(parts) == count:
            return parts
        return (Whole(parts),) * count if stop is None else stop(*parts)

    name = rewrite.program.ops.fresh(f"all_of_{node.name.lstrip('_')}")
    signature = Signature(name, ("parts",), (), (), results=count, may_raise=True)
    op = Op(signature, all_items, kind="component")
    made = rewrite.call(op, node, before=before, like=before, name=name, spec=spec)
    known = facts.get(node)
    facts.put(made, alias=known.alias, borrowed=known.borrowed)
    return made


def _recording(
    loss: Loss, name: str, recorded: list[int], told: list[str], *, script: bool, tiles: int
) -> Op:
    """The operation under a name, which hands out results that look as if their graph were there:
    to go backward from them once more raises what it raises after a backward. Parameters are
    ``told`` to be tensors."""
    op = loss.op
    attributes = {**op.attributes, "recorded": tuple(recorded)}
    if script:
        attributes["script"] = True
        if tiles > 1:
            attributes["tiles"] = tiles
    signature = op.signature
    sizes: Sizes | None = op.attributes.get(SIZES)
    if sizes is not None and (sizes.known or told):
        known = {**dict.fromkeys(told, Shape(None)), **sizes.known}
        attributes[SIZES] = replace(sizes, known=known)
        attributes["as_written"] = sizes.instead
        if loss.noises:  # for other sizes it draws others: nobody draws in between
            reads, writes = signature.reads or (), signature.writes or ()
            rng = (RNG_TORCH,)
            signature = replace(signature, reads=(*reads, *rng), writes=(*writes, *rng))
            attributes["noises"] = op.signature.params[-len(loss.noises) :]
    whole = Op(signature, op.impl, kind=op.kind, body=op.body, source=op.source)
    return dropping(whole, name, (), attributes)


def dropping(op: Op, name: str, extra: Sequence[str], attributes: Mapping[str, Any]) -> Op:
    """The operation under a name, handed what says which gradients are left out, by the parameters
    ``extra`` (:class:`~rose_compiler.ir.unread.Dropped`)."""
    assert op.body is not None
    recorded = attributes["recorded"]
    made = {**attributes, DROPPED: len(extra)} if extra else dict(attributes)
    if (written := attributes.get("as_written")) is not None:
        instead = with_backward(written, recorded, len(extra))
        made[SIZES] = replace(attributes[SIZES], instead=instead)
    return Op(
        replace(op.signature, name=name, params=(*op.signature.params, *extra)),
        with_backward(op.body.forward, recorded, len(extra)),
        kind=op.kind,
        body=op.body,
        source=op.source,
        attributes=made,
    )


def _detached(node: fx.Node) -> facts.Spec | None:
    spec = facts.get(node).spec
    return None if spec is None else replace(spec, requires_grad=False)


def _is_call_of(node: fx.Node, name: str) -> bool:
    return is_call(node) and not is_call(node, STATE) and op_of(node).name == name
