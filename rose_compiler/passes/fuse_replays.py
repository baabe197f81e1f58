"""What Inductor compiles on a CUDA device as CUDA graphs, for the fuse pass."""

from __future__ import annotations

from collections.abc import Iterator

import torch.fx as fx

from rose_compiler.base.remarks import Blocker
from rose_compiler.ir import facts
from rose_compiler.ir.facts import Spec
from rose_compiler.ir.ops import Op
from rose_compiler.ir.program import Program, is_call, op_of
from rose_compiler.ir.rewriter import Rewriter
from rose_compiler.passes.base import context_of

#: Calls of torch that the host waits for: what they return is a number or memory of its own.
_WAITS = frozenset({"item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__"})
#: Calls of torch whose results have as many elements as values say.
_BY_VALUES = frozenset(
    {"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount"}
)


def fuse_replays(program: Program, rewrite: Rewriter) -> None:
    """Mark losses and graphs that Inductor compiles for capture; what is faster by it is found out
    when they first run."""
    if not context_of(rewrite).options.cuda_graphs:
        return
    made: dict[Op, Op] = {}
    for node in program.nodes():
        if not compiled(node):
            continue
        op = op_of(node)
        if blocker := why_not(node):
            rewrite.missed(node, blocker)
            continue
        if op not in made and rewrite.spend():
            made[op] = _marked(op, program)
            rewrite.applied(node, "its kernels are launched by one replay of a CUDA graph")
        if op in made:
            rewrite.retarget(node, made[op], *node.args)


def compiled(node: fx.Node) -> bool:
    """Whether Inductor compiles what a node calls, and nothing is captured yet."""
    if not is_call(node) or op_of(node).body is None:
        return False
    op = op_of(node)
    loss = op.kind == "loss" and not op.attributes.get("script")
    marked = loss or bool(op.attributes.get("inductor"))
    return marked and not op.attributes.get("replayed")


def why_not(node: fx.Node) -> Blocker | None:
    """Why the kernels of a graph can't be captured, as far as it is known from the program.

    The rest is asked when it runs: where its arguments lie, and what its operations say of
    themselves.
    """
    op = op_of(node)
    assert op.body is not None
    specs = [s for n in (node, *node.all_input_nodes) for s in _tensors(facts.get(n).spec)]
    specs += [s for n in op.body.graph.nodes for s in _tensors(facts.get(n).spec)]
    elsewhere = [s for s in specs if not s.device.startswith("cuda") and s.shape]
    if elsewhere:
        return Blocker("not-available", f"it works on the {elsewhere[0].device}: no CUDA device")
    if not any(s.device.startswith("cuda") for s in specs):
        return Blocker("not-available", "nothing it works on is known to lie on a CUDA device")
    for call in op.body.graph.nodes:
        name = _name(call)
        if name in _WAITS or (name == "to" and "cpu" in map(str, call.args[1:])):
            return Blocker("host-read", f"the host waits for `{name}` in it")
        if name in _BY_VALUES or (name == "getitem" and _by_mask(call)):
            return Blocker("unsupported-shape", f"the shape of `{name}` in it hangs on values")
    return None


def _tensors(spec: Spec | None) -> Iterator[Spec]:
    if spec is None:
        return
    if spec.kind == "tensor" and spec.device:
        yield spec
    for item in spec.items:
        yield from _tensors(item)


def _name(node: fx.Node) -> str:
    if node.op == "call_method":
        return str(node.target)
    return str(getattr(node.target, "__name__", "")) if node.op == "call_function" else ""


def _by_mask(node: fx.Node) -> bool:
    """Whether a tensor is indexed by truth values."""
    key = node.args[1] if len(node.args) > 1 else None
    found: list[fx.Node] = []
    fx.node.map_arg(key, found.append)
    specs = [facts.get(n).spec for n in found]
    return any(s is not None and s.dtype in ("bool", "uint8") for s in specs)


def _marked(op: Op, program: Program) -> Op:
    marked = op.with_signature(name=program.ops.fresh(op.name))
    marked.attributes = {**op.attributes, "replayed": True}
    return marked
