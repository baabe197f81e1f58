"""Which operations keep the rows of a batch apart: proofs, written into their signatures."""

from __future__ import annotations

import ast
import builtins
import types
from typing import Any

import torch.fx as fx

from rose_compiler.base.remarks import Blocker
from rose_compiler.frontend.graphs import whole_or_single
from rose_compiler.frontend.record import Example, Record, spec_of
from rose_compiler.frontend.scope import Static
from rose_compiler.frontend.separable import NOT_STATIC, separable_block
from rose_compiler.ir import facts
from rose_compiler.ir.ops import Op
from rose_compiler.ir.program import LoopView, Program, is_call, is_item, is_state, op_of
from rose_compiler.ir.separable import any_rows, row_axes
from rose_compiler.ir.sizes import with_batch


def annotate(program: Program, record: Record) -> None:
    """Give a ``batch`` to the operations of stepping loops that were proven to keep rows apart.

    The batch is the simulator's number of environments along the first axis. Graphs are proven from
    their calls, blocks of Python from their statements.
    """
    for loop in program.loops():
        rows = _environments(loop.graph)
        if rows is None:
            continue
        for node in loop.graph.nodes:
            if is_call(node) and op_of(node).kind in ("graph", "block"):
                _prove(node, rows, record, loop)


def _environments(graph: fx.Graph) -> int | None:
    """How many environments the loop's simulator steps at once."""
    for node in graph.nodes:
        if is_call(node) and op_of(node).kind == "step":
            op = op_of(node)
            static = op.attributes.get("statics", {}).get(op.attributes["step"]["env"])
            count = getattr(static.value, "num_envs", None) if isinstance(static, Static) else None
            if isinstance(count, int) and count >= 1:
                return count
    return None


def _prove(node: fx.Node, rows: int, record: Record, loop: LoopView) -> None:
    op = op_of(node)
    if op.signature.batch is not None or record.reshapes(node):
        return
    batched = {
        name: 0
        for name, argument in zip(op.signature.params, node.args, strict=True)
        if isinstance(argument, fx.Node)
        and not is_state(argument)
        and _rows(argument, loop) == rows
    }
    if not batched:
        return
    if op.kind == "graph":
        assert op.body is not None
        loose = any_rows(op.body, batched)
        body = op.body if isinstance(loose, Blocker) else loose
        axes = row_axes(body, batched)
        if axes and body is not op.body:
            op.body, op.impl = body, whole_or_single(body)
        if not axes:
            op.attributes["rows"] = batched  # for passes that take a draw out and try again
    else:
        axes = _block_axes(op, node, batched, record.examples.get(node))
    if axes:
        op.signature = _with_batch(op, axes)
        with_batch(op)


def _block_axes(
    op: Op, node: fx.Node, batched: dict[str, int], example: Example | None
) -> dict[str, int]:
    """The proof for a pure block, from its statements."""
    if example is None or not op.signature.pure:
        return {}
    specs = {
        name: spec_of(value) for name, value in zip(op.signature.params, example.args, strict=True)
    }
    space = op.attributes["globals"]

    def resolve(expression: ast.expr) -> Any:
        if isinstance(expression, ast.Name):
            if expression.id in op.signature.params:
                return NOT_STATIC
            return space.get(expression.id, getattr(builtins, expression.id, NOT_STATIC))
        if isinstance(expression, ast.Attribute):
            owner = resolve(expression.value)
            if isinstance(owner, types.ModuleType):
                return getattr(owner, expression.attr, NOT_STATIC)
        return NOT_STATIC

    kept = separable_block(op.attributes["stmts"], batched, resolve, specs)
    if isinstance(kept, Blocker):
        return {}
    results = {
        f"return.{k}": kept[name] for k, name in enumerate(op.attributes["outputs"]) if name in kept
    }
    return {**batched, **results} if results else {}


def _with_batch(op: Op, axes: dict[str, int]) -> Any:
    return op.with_signature(batch=tuple(sorted(axes.items()))).signature


def _rows(node: fx.Node, loop: LoopView) -> int | None:
    """The length of a value's first axis; of a dict, that of all its entries."""
    spec = facts.get(node).spec
    if is_item(node) and isinstance(node.args[0], fx.Node) and isinstance(node.args[1], int):
        outer = facts.get(node.args[0]).spec
        if outer is not None and node.args[1] < len(outer.items):
            spec = outer.items[node.args[1]]
    if spec is not None and spec.keys and _is_infos(node, loop):
        return None
    return facts.rows_of(spec)


def _is_infos(node: fx.Node, loop: LoopView) -> bool:
    """Whether a value is what a step says about the whole batch, on this trip or the one before."""
    seen: set[fx.Node] = set()
    while node in loop.carried and node not in seen:
        seen.add(node)
        following = loop.carried_next[loop.carried.index(node)]
        if not isinstance(following, fx.Node):
            return False
        node = following
    of = node.args[0] if is_item(node) else None
    if not isinstance(of, fx.Node) or not is_call(of) or op_of(of).kind != "step":
        return False
    return bool(node.args[1])
