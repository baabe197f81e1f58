"""The part of a traced graph that hangs on some of its inputs alone, cut off from the rest.

What a policy computes from an instruction and from its parameters is the same on every trip of a
loop that changes neither, though it stands in one graph with what it computes from observations.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
import torch.fx as fx

from rose_compiler.base.ancestors import ancestors
from rose_compiler.ir import facts
from rose_compiler.ir.checks import is_check
from rose_compiler.ir.program import output_node, placeholders
from rose_compiler.ir.raising import may_raise
from rose_compiler.ir.separable_base import name_of_call
from rose_compiler.ir.separable_math import is_pointwise
from rose_compiler.ir.slice import draws_random, is_view, subgraph, writes_in_place

#: Calls that only cut a tensor into views.
_CUT = frozenset(("chunk", "split", "split_with_sizes", "tensor_split"))
#: Functions, besides those that work element by element, whose result lies in memory of its own.
_ANEW = frozenset(
    (
        *("linear", "addmm", "mm", "bmm", "baddbmm", "matmul", "addbmm", "addmv", "mv", "dot"),
        *("conv1d", "conv2d", "conv3d", "layer_norm", "group_norm", "batch_norm", "embedding"),
        *("scaled_dot_product_attention", "cat", "stack", "sum", "mean", "std", "var", "amax"),
        *("amin", "softmax", "log_softmax", "logsumexp", "cumsum", "index_select", "gather"),
        *("clone", "repeat", "gelu", "silu", "mish", "relu", "leaky_relu", "elu", "softplus"),
    )
)


@dataclass(frozen=True)
class Parts:
    """Two graphs that do together what one did.

    ``fixed`` takes the placeholders ``fixed_inputs`` of the original and returns the tuple of the
    values ``passed``, named after the original's nodes. ``rest`` takes ``rest_inputs``, first
    placeholders of the original, then passed values, and returns what the original returned; all
    checks and draws are in it, in order. No result of ``rest`` shares memory with a passed value
    that the original made itself: each call makes its results anew.
    """

    fixed: fx.GraphModule
    rest: fx.GraphModule
    fixed_inputs: tuple[str, ...]
    rest_inputs: tuple[str, ...]
    passed: tuple[fx.Node, ...]

    @property
    def calls(self) -> int:
        """Calls in ``fixed`` that compute something."""
        return sum(n.op.startswith("call_") and not is_light(n) for n in self.fixed.graph.nodes)

    @property
    def elements(self) -> int:
        """Elements of the largest tensor that ``fixed`` reads or makes, as far as is known."""
        return max((_elements(n) for n in self.fixed.graph.nodes), default=0)


def cut(gm: fx.GraphModule, fixed: Collection[str], *, raising: bool = True) -> Parts | None:
    """Cut off what hangs on the placeholders ``fixed`` alone; ``None`` where nothing does.

    Left in the rest are calls that only make views, what is made of nothing (``zeros``), what may
    share memory with a result, checks and what draws random numbers; without ``raising``, also
    other calls that may raise for values.
    """
    nodes = list(gm.graph.nodes)
    if any(writes_in_place(n) or n.op == "call_module" for n in nodes):
        return None  # the order of writes is fixed
    kept = [n for n in nodes if _stays(n) or (not raising and may_raise(n))]
    handed = {n for n in _same(nodes, fixed, kept) if not is_light(n)} - _shared(gm)
    rest = ancestors([*output_node(gm.graph).all_input_nodes, *kept], handed)
    passed = [n for n in nodes if n in handed and n in rest]
    if not passed:
        return None
    first = ancestors(passed, ())
    own = [n for n in nodes if n in first and n.op != "placeholder"]
    fixed_gm, fixed_inputs = subgraph(gm, own, passed)
    rest_gm, rest_inputs = _rest(gm, rest, passed)
    return Parts(fixed_gm, rest_gm, fixed_inputs, rest_inputs, tuple(passed))


def overtaken(gm: fx.GraphModule, parts: Parts) -> bool:
    """Whether a call in ``fixed`` may raise for values, and stands behind a draw, or behind another
    call that may raise, in the original."""
    mine = {n.name for n in parts.fixed.graph.nodes}
    passed = False
    for node in gm.graph.nodes:
        if node.name not in mine:
            passed = passed or _stays(node) or may_raise(node)
        elif passed and may_raise(node):
            return True
    return False


def is_light(node: fx.Node) -> bool:
    """Whether the result of a call is not worth being kept over a loop: a view, something made of
    nothing, or no tensor."""
    of = node.args[0] if node.target is operator.getitem else None
    if isinstance(of, fx.Node) and _kind(of) == "tuple":  # one result of several
        return is_view(of) or name_of_call(of) in _CUT or not of.all_input_nodes
    return is_view(node) or not node.all_input_nodes or _kind(node) not in ("", "tensor")


def makes_anew(node: fx.Node) -> bool:
    """Whether the result of a call is known to share no memory with any operand."""
    if not node.op.startswith("call_"):
        return False
    name = name_of_call(node)
    return name in _ANEW or (is_pointwise(name) and not _may_be_view(name))


def _may_be_view(name: str) -> bool:
    """Whether an operator of ATen says that its result may lie in an operand's memory."""
    packet = getattr(torch.ops.aten, name, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return False
    returned = [r for o in packet.overloads() for r in getattr(packet, o)._schema.returns]
    return any(r.alias_info is not None and not r.alias_info.is_write for r in returned)


def _stays(node: fx.Node) -> bool:
    return is_check(node) or draws_random(node)


def _same(
    nodes: Iterable[fx.Node], fixed: Collection[str], kept: Collection[fx.Node]
) -> set[fx.Node]:
    """The calls that give the same whenever the placeholders ``fixed`` do."""
    known: set[fx.Node] = set()
    for node in nodes:
        if node.op == "placeholder":
            same = node.name in fixed
        else:
            same = node not in kept and all(n in known for n in node.all_input_nodes)
        if same:
            known.add(node)
    return {n for n in known if n.op.startswith("call_")}


def _shared(gm: fx.GraphModule) -> set[fx.Node]:
    """Nodes whose memory a result of the graph may lie in."""
    found: set[fx.Node] = set()
    todo = list(output_node(gm.graph).all_input_nodes)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += () if makes_anew(node) else node.all_input_nodes
    return found


def _rest(
    gm: fx.GraphModule, rest: Collection[fx.Node], passed: Collection[fx.Node]
) -> tuple[fx.GraphModule, tuple[str, ...]]:
    """The graph of these nodes; what is passed are placeholders behind the original's own."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in (*(n for n in placeholders(gm.graph) if n in rest), *passed):
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    inputs = tuple(n.name for n in copies.values())
    for node in gm.graph.nodes:
        if node in rest and node not in copies and node.op != "output":
            copies[node] = graph.node_copy(node, lambda n: copies[n])
    graph.output(fx.node.map_arg(output_node(gm.graph).args[0], lambda n: copies[n]))
    return fx.GraphModule(gm, graph), inputs


def _elements(node: fx.Node) -> int:
    spec = facts.get(node).spec
    return math.prod(spec.shape) if spec is not None and spec.kind == "tensor" else 0


def _kind(node: fx.Node) -> str:
    spec = facts.get(node).spec
    return "" if spec is None else spec.kind
