"""Gradients that nobody reads are not computed.

An actor's loss goes through the critic, so its ``backward`` also adds to the gradients of the
critic's parameters. The critic's own update begins with ``zero_grad``, which drops them: of every
``backward`` of the actor a part is computed for nothing (dead code elimination, applied to what
``backward`` accumulates). Who writes such a loop by hand freezes the critic around the actor's
loss.

What a ``backward`` leaves in the last trip of a loop is seen by whoever looks behind the loop, so
there everything is computed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.fx as fx

from rose_compiler.base.remarks import Blocker
from rose_compiler.ir import bodies
from rose_compiler.ir.deps import title
from rose_compiler.ir.effects import related
from rose_compiler.ir.interp import resolve
from rose_compiler.ir.ops import BRANCH, DROPPED, LOOP, Op
from rose_compiler.ir.program import (
    LoopView,
    Program,
    Value,
    is_call,
    is_exit,
    is_item,
    op_of,
)
from rose_compiler.ir.rewriter import Rewriter
from rose_compiler.ir.state_node import state_node
from rose_compiler.ir.unread import backward_without
from rose_compiler.passes.base import Pass, context_of
from rose_compiler.passes.fuse_losses import dropping

#: Elements of parameters below which walking through the graph costs what it saves.
LEAST = 16_384

_BACKWARD = re.compile(r"\w+\.backward\(\)")
_ZERO = re.compile(r"[\w.\[\]]+\.zero_grad\((set_to_none=True)?\)")


@dataclass(frozen=True)
class Dead:
    """A ``backward`` and the ``zero_grad`` in front of which nobody reads what it adds to the
    gradients of one optimizer's parameters: of the same trip of ``loop``, or of the next one."""

    backward: fx.Node
    zero: fx.Node
    optimizer: str
    loop: fx.Node | None


@dataclass(frozen=True)
class DropGradients(Pass):
    """Leave gradients out of a ``backward`` that are dropped before anybody reads them."""

    name: ClassVar[str] = "drop_gradients"

    def run_program(self, program: Program, rewrite: Rewriter) -> None:
        for node in [n for n in program.nodes() if _adds(n) and not _left_out(n)]:
            found = list(_dead(node, program, rewrite))
            if not found:
                continue
            if not context_of(rewrite).run_ahead:
                why = f"if an operation behind {title(node)} raises, gradients would be missing"
                rewrite.missed(node, Blocker("may-raise", why, "run_ahead=True"))
            elif rewrite.spend():
                _leave_out(node, found, rewrite)


def _dead(node: fx.Node, program: Program, rewrite: Rewriter) -> Iterator[Dead]:
    """What of a ``backward`` is dropped, one for each optimizer."""
    written = {e.state for e in rewrite.deps.effects(node) if e.write}
    for state in context_of(rewrite).optimizers:
        optimizer = _object(program, state)
        if not isinstance(optimizer, torch.optim.Optimizer):
            continue
        if getattr(optimizer.zero_grad, "__func__", None) is not torch.optim.Optimizer.zero_grad:
            continue
        found = _dropped_at(node, state, written, program, rewrite)
        if found is None:
            continue
        size = sum(p.numel() for g in optimizer.param_groups for p in g["params"])
        if size >= LEAST:
            yield found


def _dropped_at(
    node: fx.Node, state: str, written: set[str], program: Program, rewrite: Rewriter
) -> Dead | None:
    """The ``zero_grad`` of an optimizer that comes before anybody reads."""
    path = [node]  # what holds the backward, innermost first
    while (owner := bodies.owner(program, path[-1].graph)) is not None and is_call(owner, BRANCH):
        path.append(owner)
    around = path[-1].graph
    behind = [n for at in path for n in _behind(at)]
    ahead = [n for n in around.nodes if n.op == "call_function"]
    ahead = ahead[: ahead.index(path[-1])]
    places: list[tuple[fx.Node | None, list[fx.Node]]] = [(None, behind)]
    if owner is not None:  # without a loop nothing comes again before the program's end
        places.append((owner, [*behind, *ahead]))
    for loop, nodes in places:
        found = next((n for n in nodes if n.graph is around and _zeroes(n, state, rewrite)), None)
        if found is None:
            continue
        gradients = {e.state for e in rewrite.deps.effects(found) if e.write}
        between = nodes[: nodes.index(found)]
        if not any(related(a, b) for a in gradients for b in written):
            return None
        if any(_leaves(n) or _looks(n, state, gradients, rewrite) for n in between):
            return None
        return Dead(node, found, state, loop) if loop is None or _counted(loop) else None
    return None


def _behind(node: fx.Node) -> list[fx.Node]:
    nodes = [n for n in node.graph.nodes if n.op == "call_function"]
    return nodes[nodes.index(node) + 1 :]


def _counted(loop: fx.Node) -> bool:
    """Whether the last trip of a loop is known when it begins."""
    view = LoopView(loop)
    return view.facts.kind == "range" and not view.facts.wrapper and not bodies.exits(view.graph)


def _zeroes(node: fx.Node, state: str, rewrite: Rewriter) -> bool:
    """Whether an operation drops the gradients of all parameters of an optimizer, and that only."""
    if not _is(node, "optimizer", _ZERO):
        return False
    return any(e.state == state and not e.write for e in rewrite.deps.effects(node))


def _leaves(node: fx.Node) -> bool:
    """Whether a trip may end at a node."""
    if is_call(node, BRANCH):
        return any(bodies.exits(arm) for arm in bodies.graphs_of(node))
    return is_exit(node)


def _looks(node: fx.Node, state: str, gradients: set[str], rewrite: Rewriter) -> bool:
    """Whether a node may look at gradients, but to add to them, or change which parameters the
    optimizer has. A loop or branch is asked for all that it holds."""
    if is_item(node) or _adds(node):
        return False
    read = (e.state for e in rewrite.deps.effects(node))
    return any(related(s, g) for s in read for g in gradients) or _changes(node, state, rewrite)


def _adds(node: fx.Node) -> bool:
    """Whether an operation does nothing with gradients but add to them."""
    return _is_loss(node) or _is(node, "backward", _BACKWARD)


def _is_loss(node: fx.Node) -> bool:
    """Whether an operation is a loss and its backward in one."""
    return is_call(node) and op_of(node).kind == "loss"


def _left_out(node: fx.Node) -> bool:
    """Whether something is left out of a backward already."""
    return DROPPED in op_of(node).attributes if _is_loss(node) else len(node.args) != 1


def _changes(node: fx.Node, state: str, rewrite: Rewriter) -> bool:
    """Whether a node may change an optimizer otherwise than by its step."""
    if is_call(node, LOOP) or is_call(node, BRANCH):
        inside = (n for g in bodies.graphs_of(node) for n in g.nodes)
        return any(_changes(n, state, rewrite) for n in inside)
    if not any(e.write and related(e.state, state) for e in rewrite.deps.effects(node)):
        return False
    return not is_call(node) or "optimizer" not in op_of(node).attributes.get("calls", ())


def _is(node: fx.Node, call: str, text: re.Pattern[str]) -> bool:
    """Whether a node is one statement of the user's that makes this call and nothing else."""
    if not is_call(node) or is_call(node, LOOP) or is_call(node, BRANCH):
        return False
    op = op_of(node)
    calls = tuple(op.attributes.get("calls", ()))
    return calls == (call,) and len(op.source) == 1 and bool(text.fullmatch(op.source[0].strip()))


def _object(program: Program, state: str) -> Any:
    root, _, path = state.partition(".")
    try:
        found = program.objects[root]
        return resolve(found, path) if path else found
    except (AttributeError, LookupError, TypeError):
        return None


def _leave_out(node: fx.Node, found: Sequence[Dead], rewrite: Rewriter) -> None:
    """Let a ``backward`` compute the rest: an optimizer whose parameters it leaves out, and the
    trip with the one behind the last, for each."""
    old = op_of(node)
    extra: list[Value] = []
    for dead in found:
        extra.append(state_node(dead.optimizer, rewrite))
        extra += _trip(dead)
    names = [f"{n}_{k}" for k in range(len(found)) for n in ("optimizer", "trip", "stop", "step")]
    name = rewrite.program.ops.fresh(old.name)
    if _is_loss(node):
        op = dropping(old, name, names, old.attributes)
    else:
        params = (*old.signature.params, *names)
        signature = old.with_signature(name=name, params=params).signature
        op = Op(signature, backward_without, kind="component", attributes=old.attributes)
    rewrite.retarget(node, op, *node.args, *extra)
    whose = ", ".join(f"{d.optimizer}'s" for d in found)
    text = f"the gradients of {whose} parameters are left out where {title(found[0].zero)} drops "
    rewrite.applied(node, text + "them")


def _trip(dead: Dead) -> tuple[Value, Value, Value]:
    """The trip, where the loop stops and its step; within one trip anything but a last one."""
    if dead.loop is None:
        return 0, 2, 1
    loop = LoopView(dead.loop)
    bounds = loop.bounds
    _, stop, step = (0, *bounds, 1) if len(bounds) == 1 else (*bounds, 1)[:3]
    return loop.index, stop, step
