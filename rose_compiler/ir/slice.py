"""Splits the graph of a traced operation into what some of its outputs need and the rest."""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from rose_compiler.base.ancestors import ancestors
from rose_compiler.base.remarks import Blocker
from rose_compiler.ir.program import output_node, placeholders


@dataclass(frozen=True)
class Split:
    """Two graphs that do together what one did.

    ``early`` takes the placeholders ``early_inputs`` and returns the tuple of the outputs
    ``early_outputs`` (positions in the original's result) followed by ``passed``: values, named
    after the original's nodes, that ``late`` needs and that would cost more to compute again.
    ``late`` takes ``late_inputs``: placeholders of the original, outputs of ``early`` (by node
    name) and the passed values; it returns the tuple of the outputs ``late_outputs``, the other
    positions. Checks that may raise are in ``late``, random draws in ``early``, both in order.
    """

    early: fx.GraphModule
    late: fx.GraphModule
    early_inputs: tuple[str, ...]
    late_inputs: tuple[str, ...]
    early_outputs: tuple[int, ...]
    late_outputs: tuple[int, ...]
    passed: tuple[str, ...]


def split_outputs(
    gm: fx.GraphModule,
    early: Collection[int],
    *,
    pinned: Iterable[str] = (),
    small: Collection[str] = (),
) -> Split | Blocker:
    """Split a graph whose output is a tuple of nodes.

    Args:
        early: positions of the outputs wanted first.
        pinned: names of further nodes that must stay in the early graph. Nodes that draw random
            numbers stay there anyway.
        small: placeholders that are no rows of a batch. What is made of them alone, element by
            element, both graphs make: a scale that is a parameter, for instance.
    """
    returned: Any = output_node(gm.graph).args[0]
    outputs: list[fx.Node] = list(returned) if isinstance(returned, tuple | list) else []
    if not outputs or not all(isinstance(o, fx.Node) for o in outputs):
        return Blocker("unsupported-shape", "the graph does not return a tuple of values")
    for node in gm.graph.nodes:
        if writes_in_place(node):
            return Blocker("not-pure", f"`{node.name}` writes a tensor, so the order is fixed")
    kept = set(pinned)
    wanted = [outputs[i] for i in sorted(set(early))]
    wanted += [n for n in gm.graph.nodes if n.name in kept or draws_random(n)]
    first = ancestors(wanted)
    calls = [n for n in gm.graph.nodes if n.op.startswith("call_")]
    rest = [n for n in calls if n not in first]
    late_positions = tuple(i for i in range(len(outputs)) if i not in set(early))
    if not rest:
        return Blocker("unsupported-shape", "nothing is left for later: all is needed early")
    needed = {a for n in rest for a in n.all_input_nodes if a in first and a.op != "placeholder"}
    needed |= {outputs[i] for i in late_positions if outputs[i] in first}
    handed = {o for i, o in enumerate(outputs) if i in set(early)}
    again = _cheap_again(calls, needed, handed, first, small)
    passed = [n for n in calls if n in needed and n not in again and n not in handed]
    early_nodes = [n for n in calls if n in first]
    late_nodes = [n for n in calls if n in again or n not in first]
    made_early = [outputs[i] for i in sorted(set(early))]
    early_gm, early_inputs = subgraph(gm, early_nodes, [*made_early, *passed])
    late_gm, late_inputs = subgraph(gm, late_nodes, [outputs[i] for i in late_positions])
    return Split(
        early=early_gm,
        late=late_gm,
        early_inputs=early_inputs,
        late_inputs=late_inputs,
        early_outputs=tuple(sorted(set(early))),
        late_outputs=late_positions,
        passed=tuple(n.name for n in passed),
    )


def writes_in_place(node: fx.Node) -> bool:
    """Whether a call writes one of its operands, by torch's naming."""
    if not node.op.startswith("call_"):
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if "out" in node.kwargs or node.kwargs.get("inplace"):
        return True
    if getattr(node.target, "__module__", "") == "_operator":
        return node.target in _WRITING_OPERATORS
    return str(name).endswith("_") and not str(name).startswith("__")


_WRITING_OPERATORS = {
    getattr(operator, name)
    for name in (
        *("setitem", "delitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow"),
        *("iand", "ior", "ixor", "ilshift", "irshift", "imatmul", "iconcat"),
    )
}


def draws_random(node: fx.Node) -> bool:
    """Whether a call may draw from torch's generator."""
    if not node.op.startswith("call_"):
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        return torch.Tag.nondeterministic_seeded in node.target.tags
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return _random_name(str(name)) and not _without_chance(node, str(name))


def _without_chance(node: fx.Node, name: str) -> bool:
    """Whether a call that could apply dropout is told to apply none."""

    def given(position: int, keyword: str, default: Any) -> Any:
        return (
            node.args[position] if position < len(node.args) else node.kwargs.get(keyword, default)
        )

    if name == "scaled_dot_product_attention":
        return given(4, "dropout_p", 0.0) == 0.0
    if name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        return given(5, "dropout", 1.0) == 0.0 or given(6, "train", True) is False
    if name in ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"):
        return given(2, "train", True) is False or given(1, "p", 1.0) == 0.0
    return name == "rrelu" and given(3, "training", False) is False


@functools.cache
def _random_name(name: str) -> bool:
    packet = getattr(torch.ops.aten, name, None) if name.isidentifier() else None
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return False
    return any(
        torch.Tag.nondeterministic_seeded in getattr(packet, o).tags for o in packet.overloads()
    )


#: calls that only make another view of an operand
_VIEWS = frozenset(
    ("expand", "expand_as", "view", "view_as", "reshape", "unsqueeze", "squeeze", "flatten")
) | {*("transpose", "t", "permute", "select", "narrow", "detach", "getitem", "getattr", "unbind")}


#: calls of one operand, element by element, that cost little on a few elements
_SMALL = frozenset(("exp", "log", "sqrt", "square", "neg", "abs", "sigmoid", "tanh", "softplus"))


def _cheap_again(
    calls: list[fx.Node],
    needed: set[fx.Node],
    handed: set[fx.Node],
    first: set[fx.Node],
    small: Collection[str],
) -> set[fx.Node]:
    """What the late graph makes again from what it has anyway: views, and what is made of small
    placeholders alone."""
    little = _made_of_small(calls, small)
    cheap = {n for n in calls if n in first and n not in handed and (is_view(n) or n in little)}
    available = handed | (needed - cheap)
    can: set[fx.Node] = set()
    for node in calls:
        if node in cheap and all(
            a.op == "placeholder" or a in available or a in can for a in node.all_input_nodes
        ):
            can.add(node)
        elif node in needed:
            available.add(node)
    again: set[fx.Node] = set()
    for node in reversed(calls):
        if node in can and (node in needed or any(u in again for u in node.users)):
            again.add(node)
    return again


def _made_of_small(calls: list[fx.Node], small: Collection[str]) -> set[fx.Node]:
    """Views and cheap functions of small placeholders."""
    found: set[fx.Node] = set()
    for node in calls:
        operands = node.all_input_nodes
        if call_name(node) in ("expand_as", "view_as"):
            operands = operands[:1]  # of the other one only the sizes matter
        made = all(a in found or (a.op == "placeholder" and a.name in small) for a in operands)
        if operands and made and (is_view(node) or call_name(node) in _SMALL):
            found.add(node)
    return found


def is_view(node: fx.Node) -> bool:
    """Whether a call only makes another view of an operand, by torch's naming."""
    return call_name(node) in _VIEWS


def call_name(node: fx.Node) -> str:
    """The name of what a node calls."""
    name: Any = node.target
    return name if isinstance(name, str) else getattr(name, "__name__", "")


def subgraph(
    gm: fx.GraphModule, nodes: list[fx.Node], outputs: list[fx.Node]
) -> tuple[fx.GraphModule, tuple[str, ...]]:
    """The graph of these nodes; whatever else they use becomes a placeholder of its node's name."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    inside = set(nodes)
    used = {a for n in nodes for a in n.all_input_nodes} | set(outputs)
    order = placeholders(gm.graph) + [n for n in gm.graph.nodes if n.op != "placeholder"]
    inputs = [n for n in order if n in used and n not in inside]
    for node in inputs:
        copy = graph.placeholder(node.name)
        copy.meta = dict(node.meta)
        copies[node] = copy
    for node in nodes:
        copies[node] = graph.node_copy(node, lambda n: copies[n])
    graph.output(tuple(copies[o] for o in outputs))
    return fx.GraphModule(gm, graph), tuple(copies[n].name for n in inputs)
