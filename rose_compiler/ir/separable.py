"""Proof that a traced graph computes the rows of a batch apart.

The proof follows one axis through the graph: each placeholder that is batched has its batch along
a given axis, each call either keeps the rows of its operands apart along some axis of its result,
or the proof ends with the call that does not, or that no rule knows. Then the graph applied to some
rows gives these rows of the result, up to rounding; whether the bits agree is for a probe to see.

Sizes that the trace fixed to the number of rows (``view(64, -1)`` for 64 environments) would be
wrong for other numbers of rows. :func:`separable` refuses them; :func:`any_rows` gives the graph in
which they follow from the operand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch.fx as fx

from rose_compiler.base.remarks import Blocker
from rose_compiler.ir import facts, separable_math, separable_nn, separable_shapes, separable_spread
from rose_compiler.ir.functions import name_of
from rose_compiler.ir.program import output_node, placeholders
from rose_compiler.ir.separable_base import (
    ALL,
    Axis,
    Call,
    Coupled,
    Rows,
    Rule,
    is_array,
    name_of_call,
    shape_of,
)
from rose_compiler.ir.separable_spread import resized
from rose_compiler.ir.slice import draws_random, writes_in_place
from rose_compiler.ir.spread import spread

RULES: dict[str, Rule] = {
    **separable_math.RULES,
    **separable_nn.RULES,
    **separable_shapes.RULES,
    **separable_spread.RULES,
}

#: Functions that make a tensor of an array, or of a tensor, row by row.
_FROM_ARRAYS = frozenset(("as_tensor", "asarray", "from_numpy", "tensor"))


def separable(gm: fx.GraphModule, batched: Mapping[str, int]) -> dict[str, int] | Blocker:
    """The batch axis of every result that has one, by ``"return.<k>"``.

    ``batched`` gives the batch axis of each batched placeholder; nodes need ``spec`` facts. Results
    that are missing from the answer do not depend on the batch, and are the same for any rows.
    """
    rows = _follow(gm, batched)
    if isinstance(rows, Blocker):
        return rows
    if fixed := (*rows.literals, *rows.spreads):
        return Blocker(
            "not-proven-separable",
            f"`{fixed[0].name}` fixes the number of rows, {rows.count}, in its sizes",
            "write -1, or a size taken from the operand, in its place",
        )
    return _results(gm, rows)


def any_rows(gm: fx.GraphModule, batched: Mapping[str, int]) -> fx.GraphModule | Blocker:
    """The same graph for any number of rows: sizes that were fixed to it follow from operands.

    On the number of rows that was traced it makes the same calls with the same sizes.
    """
    rows = _follow(gm, batched)
    if isinstance(rows, Blocker):
        return rows
    if not rows.literals and not rows.spreads:
        return gm
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(gm.graph, copies))
    for node, literal in rows.literals.items():
        copies[node].args = (copies[node].args[0], *literal.sizes)
        copies[node].kwargs = {}
    for node, found in rows.spreads.items():
        one, like = copies[node], copies[found.like]
        one.args = resized(one, found.sizes)
        (user,) = one.users
        with graph.inserting_before(user):
            made = graph.call_function(spread, (one, found.axis, like, found.like_axis))
        user.replace_input_with(one, made)
        facts.copy(node, made)
        known = facts.get(node).spec
        assert known is not None
        facts.put(one, spec=replace(known, shape=found.one_row(known.shape)))
    return fx.GraphModule(gm, graph)


def row_axes(gm: fx.GraphModule, batched: Mapping[str, int]) -> dict[str, int]:
    """``batched`` and the axes of the results, for a signature's ``batch``; empty without proof."""
    found = separable(gm, batched)
    return {} if isinstance(found, Blocker) or not batched else {**batched, **found}


def _follow(gm: fx.GraphModule, batched: Mapping[str, int]) -> Rows | Blocker:
    rows = Rows()
    try:
        for node in placeholders(gm.graph):
            if node.name in batched:
                rows.start(node, batched[node.name])
        for node in gm.graph.nodes:
            if node.op in ("call_function", "call_method"):
                rows.axes[node] = _axis(node, rows)
            elif node.op == "call_module":
                raise Coupled("not-proven-separable", f"`{node.name}` calls a module")
        for value in _returned(gm):
            if isinstance(value, fx.Node) and rows.axes.get(value) == ALL:
                raise Coupled("batch-coupling", f"`{value.name}` is one value for the whole batch")
    except Coupled as found:
        return found.blocker
    return rows


def _axis(node: fx.Node, rows: Rows) -> Axis:
    call = Call(node, rows)
    if draws_random(node):
        raise Coupled(
            "draw-order",
            f"`{node.name}` draws random numbers, which some rows alone would draw differently",
            "draw for the whole batch and hand the numbers in",
        )
    if writes_in_place(node):
        raise Coupled("not-pure", f"`{node.name}` writes a tensor")
    if not call.batched:
        return None
    if not _is_known(node):
        raise Coupled("not-proven-separable", f"`{node.name}` calls no function of torch's own")
    name = name_of_call(node)
    rule = RULES.get(name) or (
        separable_math.pointwise if separable_math.is_pointwise(name) else None
    )
    if name in _FROM_ARRAYS:
        rule = _from_array
    elif any(is_array(n) for n in call.batched):
        raise Coupled("not-proven-separable", f"`{node.name}` is given numpy arrays")
    if rule is None:
        raise Coupled(
            "not-proven-separable", f"no rule says that `{name}` keeps the rows of a batch apart"
        )
    if any(rows.axes.get(a) == ALL for a in node.all_input_nodes) and name != "check_valid":
        raise Coupled(
            "batch-coupling", f"`{node.name}` uses what was computed from the whole batch"
        )
    try:
        return rule(call)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        # a form of the call that its rule does not foresee
        raise Coupled(
            "not-proven-separable", f"`{node.name}` is called in a way that its rule does not know"
        ) from None


def _from_array(call: Call) -> Axis:
    """A tensor of the same rows."""
    call.only(call.args[0])
    axis = call.row_axis(call.args[0])
    if call.shape != shape_of(call.args[0]):
        call.refuse("not-proven-separable", "the tensor has another shape than the array")
    return axis


def _is_known(node: fx.Node) -> bool:
    """Whether the target is what its name says: other packages have functions named ``sum`` too."""
    return node.op == "call_method" or node.target is getattr or name_of(node.target) is not None


def _returned(gm: fx.GraphModule) -> list[object]:
    value = output_node(gm.graph).args[0]
    return list(value) if isinstance(value, tuple | list) else [value]


def _results(gm: fx.GraphModule, rows: Rows) -> dict[str, int] | Blocker:
    found: dict[str, int] = {}
    for k, value in enumerate(_returned(gm)):
        axis = rows.axes.get(value) if isinstance(value, fx.Node) else None
        if isinstance(value, tuple | list | dict) or isinstance(axis, tuple):
            return Blocker("not-proven-separable", f"result {k} is no single tensor")
        if isinstance(axis, int) and axis != ALL:
            found[f"return.{k}"] = axis
    return found
