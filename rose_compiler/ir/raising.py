"""Calls of torch that may raise for the values they are given, not for types and shapes alone.

An index out of range raises where a matrix product of the same shapes can't. What is not known to
be harmless counts as raising.
"""

from __future__ import annotations

from typing import Any

import torch.fx as fx

from rose_compiler.ir import facts
from rose_compiler.ir.separable_base import name_of_call
from rose_compiler.ir.separable_math import is_pointwise
from rose_compiler.ir.slice import is_view

#: Raise for a divisor of zero, if all operands are integers.
_DIVISIONS = frozenset(("floor_divide", "remainder", "fmod", "div"))
#: Functions, besides those that work element by element and views, that types and shapes decide.
_HARMLESS = frozenset(
    (
        *("linear", "addmm", "mm", "bmm", "baddbmm", "matmul", "addbmm", "addmv", "mv", "dot"),
        *("outer", "einsum", "conv1d", "conv2d", "conv3d", "layer_norm", "group_norm", "rms_norm"),
        *("batch_norm", "instance_norm", "scaled_dot_product_attention", "avg_pool1d"),
        *("avg_pool2d", "max_pool1d", "max_pool2d", "adaptive_avg_pool1d", "adaptive_avg_pool2d"),
        *("cat", "stack", "sum", "mean", "std", "var", "amax", "amin", "max", "min", "argmax"),
        *("argmin", "prod", "all", "any", "norm", "softmax", "log_softmax", "logsumexp", "cumsum"),
        *("sort", "topk", "flip", "roll", "tril", "triu", "clone", "contiguous", "repeat", "pad"),
        *("interpolate", "gelu", "silu", "mish", "relu", "leaky_relu", "elu", "softplus", "glu"),
        *("normalize", "dropout", "to", "type", "type_as", "float", "double", "half", "bfloat16"),
        *("long", "int", "bool", "zeros", "ones", "full", "empty", "arange", "tensor", "eye"),
        *("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones"),
        *("new_full", "getattr", "size", "dim", "numel", "chunk", "split"),
        *("unflatten", "movedim", "expand_as", "reshape_as"),
    )
)


def may_raise(node: fx.Node) -> bool:
    """Whether a node of a traced graph may raise for the values of its operands."""
    if not node.op.startswith("call_"):
        return False
    name = name_of_call(node)
    if name in _DIVISIONS:
        return (name != "div" or "rounding_mode" in node.kwargs) and not _floating(node)
    if name in _HARMLESS:
        return False
    if is_view(node):  # one that is indexed by tensors is none
        return any(n is not node.args[0] for n in node.all_input_nodes)
    return not is_pointwise(name)


def raising(gm: fx.GraphModule) -> list[fx.Node]:
    """The nodes of a traced graph that may raise for values."""
    return [n for n in gm.graph.nodes if may_raise(n)]


def _floating(node: fx.Node) -> bool:
    operands: tuple[Any, ...] = (node, *node.args)
    if any(isinstance(a, float) for a in operands):
        return True
    specs = [facts.get(a).spec for a in operands if isinstance(a, fx.Node)]
    return any(s is not None and "float" in (s.dtype or "") for s in specs)
