"""How much of a state a value lies in, and how much of it the graph behind a loss holds.

A view (``obs = buf.obs[g]``) shares memory with all of ``buf.obs`` as far as its name tells. The
operation that makes it says which part: its attribute ``views`` has the places of its results. What
an autograd graph saved is known by states too; where nothing but the operations of the same trip
can have recorded it (attribute ``through`` of the ``backward``), it holds no more of a state than
what these read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.fx as fx

from rose_compiler.ir import facts, program
from rose_compiler.ir.contexts import UNVERSIONED
from rose_compiler.ir.effects import Region, parse_entry, related
from rose_compiler.ir.facts import Spec
from rose_compiler.ir.ops import BRANCH, LOOP
from rose_compiler.ir.program import is_call, is_item
from rose_compiler.ir.scope import nodes_in

if TYPE_CHECKING:
    from rose_compiler.ir.summary import Summary

#: Attribute of an operation: entries of the memory that its results lie in.
VIEWS = "views"
#: Attribute of a ``backward``: the parameters by which its graph is reached, where only operations
#: that these values come from have recorded it.
THROUGH = "through"


def maker(scope: Summary, value: fx.Node) -> fx.Node | None:
    """The operation that makes a value on the same trip as it is used, if one does."""
    found = scope.resolve(value)
    while isinstance(found, fx.Node) and is_item(found):
        found = scope.resolve(found.args[0])
    if not isinstance(found, fx.Node) or not is_call(found):
        return None
    return None if is_call(found, LOOP) or is_call(found, BRANCH) else found


def within(scope: Summary, value: fx.Node, state: str) -> Region | None:
    """The part of a state that a value which shares memory with it lies in; ``None``: any."""
    node = maker(scope, value)
    if node is None:
        return None
    op = program.op_of(node)
    places = op.attributes.get(VIEWS, ())
    if not places:
        return None
    args = dict(zip(op.signature.params, node.args, strict=False))
    indices = {name: scope.linear(given) for name, given in args.items()}
    found: Region | None = None
    for text in places:
        entry = parse_entry(text)
        if entry.index is None and not _is_memory(scope, args.get(entry.root)):
            return None
        for name, region in scope.targets(entry, args, indices):
            if not related(name, state):
                continue
            if name != state or region is None or found not in (None, region):
                return None
            found = region
    return found


def _is_memory(scope: Summary, value: object) -> bool:
    """Whether a value was seen as a tensor or an array: a part of one lies in it."""
    found = scope.resolve(value) if isinstance(value, fx.Node) else None
    spec = facts.get(found).spec if isinstance(found, fx.Node) and not scope.state(found) else None
    return spec is not None and spec.kind in ("tensor", "array")


def held(scope: Summary, node: fx.Node, state: str) -> tuple[Region, ...] | None:
    """The parts of a state that the graph a ``backward`` goes through may have saved; ``None``:
    any."""
    op = program.op_of(node)
    through = op.attributes.get(THROUGH, ())
    # a graph that compares versions minds a write anywhere in what it holds a part of
    if not through or all(c.kind != UNVERSIONED for c in facts.get(node).context):
        return None
    args = dict(zip(op.signature.params, node.args, strict=False))
    found: dict[Region, None] = {}
    seen: set[fx.Node] = set()
    todo = [v for name in through for v in nodes_in(args.get(name))]
    while todo:
        value = todo.pop()
        if scope.state(value) or scope.linear(value) is not None:
            continue  # what is read of a state is an effect; an index holds nothing
        at = maker(scope, value)
        if at is None or at.graph is not node.graph:
            if may_have_graph(facts.get(value).spec):
                return None  # recorded on an earlier trip, or outside
            continue
        if at in seen:
            continue
        seen.add(at)
        for effect in scope.effects(at):
            if not related(effect.state, state):
                continue
            if effect.state != state or effect.region is None:
                return None
            found[effect.region] = None
        todo += at.all_input_nodes
    return tuple(found) or None


def may_have_graph(spec: Spec | None) -> bool:
    """Whether a value that was seen as this may have an autograd graph."""
    if spec is None or spec.requires_grad or spec.kind in ("object", "dict", "list"):
        return True
    return any(map(may_have_graph, spec.items))
