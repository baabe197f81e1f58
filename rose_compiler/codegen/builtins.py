"""Built-in operations as text."""

from __future__ import annotations

from collections.abc import Callable

import torch.fx as fx

from rose_compiler.codegen.expressions import Printer, References
from rose_compiler.ir import facts, ops
from rose_compiler.ir.ops import Op
from rose_compiler.ir.sizes import all_as, joined_as, may_be_others

Writer = Callable[[fx.Node, References, Printer], str]


def _rows(node: fx.Node, refs: References, p: Printer) -> str:
    value, lo, hi = (p.value(a, refs) for a in node.args)
    spec = facts.get(node).spec
    if spec is not None and spec.kind == "dict":
        return f"rt.rows({value}, {lo}, {hi})"
    return f"{value}[{lo}:{hi}]"


def _concat(node: fx.Node, refs: References, p: Printer) -> str:
    return f"rt.concat({p.arguments(node.args, {}, refs)})"


def _randn(node: fx.Node, refs: References, p: Printer) -> str:
    *shape, dtype, device = node.args
    drawn = (
        f"torch.randn({p.value(tuple(shape), refs)}, dtype={p.value(dtype, refs)}, "
        f"device={p.value(device, refs)})"
    )
    return _from_here(drawn) if may_be_others(node) else drawn


def _draw(node: fx.Node, refs: References, p: Printer) -> str:
    drawn = f"{p.bind(ops.DRAW.impl, ops.DRAW.name)}({p.arguments(node.args, {}, refs)})"
    return _from_here(drawn) if may_be_others(node) else drawn


def _from_here(drawn: str) -> str:
    """A draw, and the state that torch's generator had before."""
    return f"rt.drawn(torch.get_rng_state(), {drawn})"


def _merge(node: fx.Node, refs: References, p: Printer) -> str:
    env, *results = (p.value(a, refs) for a in node.args)
    return f"{env}.merge([{', '.join(results)}])"


def _snapshot(node: fx.Node, refs: References, p: Printer) -> str:
    return f"rt.snapshot({p.value(node.args[0], refs)})"


def _freeze(node: fx.Node, refs: References, p: Printer) -> str:
    return f"rt.frozen({p.value(node.args[0], refs)})"


def _new_list(node: fx.Node, refs: References, p: Printer) -> str:
    return "[]"


def _append(node: fx.Node, refs: References, p: Printer) -> str:
    items, value = (p.value(a, refs) for a in node.args)
    return f"{items}.append({value})"


def _join_rows(node: fx.Node, refs: References, p: Printer) -> str:
    items = p.value(node.args[0], refs)
    if known := joined_as(node):
        return f"rt.join_rows({items}, {p.bind(all_as(known), f'{node.name}_as_proven')})"
    return f"rt.join_rows({items})"


def _split_rows(node: fx.Node, refs: References, p: Printer) -> str:
    return f"rt.split_rows({p.arguments(node.args, {}, refs)})"


def _piece(node: fx.Node, refs: References, p: Printer) -> str:
    parts, index, start, step = (p.value(a, refs) for a in node.args)
    if (start, step) == ("0", "1"):
        return f"{parts}[{index}]"
    return f"{parts}[({index} - {start}) // {step}]"


def _fuse(node: fx.Node, refs: References, p: Printer) -> str:
    return f"rt.fuse({p.value(node.args[0], refs)})"


def _batch_wrappers(node: fx.Node, refs: References, p: Printer) -> str:
    return f"rt.batch_wrappers({p.value(node.args[0], refs)})"


_WRITERS: dict[Op, Writer] = {
    ops.ROWS: _rows,
    ops.CONCAT: _concat,
    ops.RANDN: _randn,
    ops.DRAW: _draw,
    ops.MERGE: _merge,
    ops.SNAPSHOT: _snapshot,
    ops.VERSION: _snapshot,
    ops.FREEZE: _freeze,
    ops.NEW_LIST: _new_list,
    ops.APPEND: _append,
    ops.JOIN_ROWS: _join_rows,
    ops.SPLIT_ROWS: _split_rows,
    ops.PIECE: _piece,
    ops.FUSE: _fuse,
    ops.BATCH_WRAPPERS: _batch_wrappers,
}


def _scan(op: Op, node: fx.Node, refs: References, p: Printer) -> str:
    """All trips of a recurrence: its form, the trips as they stand, what the loop was given."""
    form = p.bind(op.attributes["recurrence"], op.name)
    trips = p.bind(op.impl, f"{op.name}_trips")
    return f"rt.scan({form}, {trips}, {p.arguments(node.args, {}, refs)})"


def text(op: Op, node: fx.Node, refs: References, printer: Printer) -> str | None:
    """A call of a built-in operation, or of one that the runtime has a name for; None for any
    other."""
    if "recurrence" in op.attributes and op.bound:
        return _scan(op, node, refs, printer)
    writer = _WRITERS.get(op)
    return None if writer is None else writer(node, refs, printer)
