"""Which operations keep the rows of a batch apart: proofs, written into their signatures."""

from __future__ import annotations

from typing import Any

import torch.fx as fx

from rose_compiler.base.remarks import Blocker
from rose_compiler.frontend.record import Example, Record
from rose_compiler.frontend.scope import Static
from rose_compiler.frontend.trace import Traced, trace
from rose_compiler.ir import facts
from rose_compiler.ir.ops import Op
from rose_compiler.ir.program import Program, is_call, is_item, is_state, op_of
from rose_compiler.ir.separable import row_axes


def annotate(program: Program, record: Record, examples: dict[str, Any]) -> None:
    """Give a ``batch`` to the operations of stepping loops that were proven to keep rows apart.

    The batch is the simulator's number of environments along the first axis. Graphs are proven as they
    are; a block of Python is traced once for the proof alone, and stays a block.
    """
    for loop in program.loops():
        rows = _environments(loop.graph)
        if rows is None:
            continue
        for node in loop.graph.nodes:
            if is_call(node) and op_of(node).kind in ("graph", "block"):
                _prove(node, rows, record, examples)


def _environments(graph: fx.Graph) -> int | None:
    """How many environments the loop's simulator steps at once."""
    for node in graph.nodes:
        if is_call(node) and op_of(node).kind == "step":
            op = op_of(node)
            static = op.attributes.get("statics", {}).get(op.attributes["step"]["env"])
            count = getattr(static.value, "num_envs", None) if isinstance(static, Static) else None
            if isinstance(count, int) and count > 1:
                return count
    return None


def _prove(node: fx.Node, rows: int, record: Record, examples: dict[str, Any]) -> None:
    op = op_of(node)
    if op.signature.batch is not None:
        return
    batched = {
        name: 0
        for name, argument in zip(op.signature.params, node.args, strict=True)
        if isinstance(argument, fx.Node) and not is_state(argument) and _rows(argument) == rows
    }
    if not batched:
        return
    if op.kind == "graph":
        assert op.body is not None
        axes = row_axes(op.body, batched)
        if not axes:
            op.attributes["rows"] = batched  # for passes that take a draw out and try again
    else:
        axes = _block_axes(op, node, batched, record.examples.get(node))
    if axes:
        op.signature = _with_batch(op, axes)


def _block_axes(
    op: Op, node: fx.Node, batched: dict[str, int], example: Example | None
) -> dict[str, int]:
    """The proof for a pure block, from its trace."""
    if example is None or not op.signature.pure or any(is_state(a) for a in node.all_input_nodes):
        return {}
    traced = trace(
        op,
        example.args,
        lifted={},
        contexts=facts.get(node).context,
        names=op.signature.params,
    )
    if isinstance(traced, Blocker):
        return {}
    return row_axes(traced.gm, {n: a for n, a in batched.items() if n in _inputs(traced)})


def _inputs(traced: Traced) -> set[str]:
    return {n for n, a in zip(traced.inputs, traced.arguments, strict=True) if isinstance(a, int)}


def _with_batch(op: Op, axes: dict[str, int]) -> Any:
    return op.with_signature(batch=tuple(sorted(axes.items()))).signature


def _rows(node: fx.Node) -> int | None:
    """The length of a value's first axis."""
    spec = facts.get(node).spec
    if is_item(node) and isinstance(node.args[0], fx.Node) and isinstance(node.args[1], int):
        outer = facts.get(node.args[0]).spec
        if outer is not None and node.args[1] < len(outer.items):
            spec = outer.items[node.args[1]]
    if spec is None or spec.kind not in ("tensor", "array") or not spec.shape:
        return None
    return spec.shape[0]
