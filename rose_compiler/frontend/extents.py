"""Marks on operations of how much of a state their results, or the graph behind them, lie in."""

from __future__ import annotations

import ast

import torch.fx as fx

from rose_compiler.frontend.backward import Slices
from rose_compiler.frontend.effects_val import Effects
from rose_compiler.frontend.record import Record
from rose_compiler.ir.effects import Entry, parse_entry, related
from rose_compiler.ir.extent import THROUGH, VIEWS
from rose_compiler.ir.ops import Op
from rose_compiler.ir.program import is_state, op_of

#: Methods of a tensor whose result lies in its memory, or is new.
_INSIDE = frozenset(
    (
        *(
            "view",
            "reshape",
            "flatten",
            "unflatten",
            "squeeze",
            "unsqueeze",
            "transpose",
            "permute",
        ),
        *("detach", "clone", "contiguous", "float", "double", "long", "bool", "to", "expand", "T"),
    )
)


def mark_views(op: Op, effects: Effects) -> None:
    """Say where the results of an operation lie, if an index tells more than a state's name: of
    statements such as ``obs = buf.obs[g].flatten(0, 1)``."""
    if not all(map(_takes_parts, op.attributes.get("stmts", ()))):
        return
    found: dict[str, None] = {}
    for place in {p for places in effects.results.values() for p in places}:
        known = parse_entry(place)
        same = [parse_entry(text) for text in effects.reads]
        read = [e for e in same if related(_name(e), _name(known))]
        if len(read) == 1 and read[0].index and _name(read[0]) == _name(known):
            found[str(read[0])] = None
        else:
            found[place] = None
    # a part of a value lies in what that lies in
    values = set(op.signature.params) - set(op.attributes.get("statics", ()))
    entries = list(map(parse_entry, found))
    if any(entry.index or entry.root in values for entry in entries):
        op.attributes[VIEWS] = tuple(sorted(found))


def _name(entry: Entry) -> str:
    return f"{entry.root}.{entry.path}"


def _takes_parts(statement: ast.stmt) -> bool:
    """Whether a statement gives names to parts of tensors, and does nothing else."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return False
    target, value = statement.targets[0], statement.value
    if isinstance(target, ast.Name):
        return _is_part(value)
    if not isinstance(target, ast.Tuple) or not isinstance(value, ast.Tuple):
        return False
    names = all(isinstance(t, ast.Name) for t in target.elts)
    return names and len(target.elts) == len(value.elts) and all(map(_is_part, value.elts))


def _is_part(value: ast.expr) -> bool:
    while True:
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
            if value.func.attr not in _INSIDE:
                return False
            value = value.func.value
        elif isinstance(value, ast.Attribute) and value.attr == "T":
            value = value.value
        elif isinstance(value, ast.Subscript):
            value = value.value
            if isinstance(value, ast.Name | ast.Attribute):
                return _is_path(value)
        else:
            return False


def _is_path(value: ast.expr) -> bool:
    while isinstance(value, ast.Attribute):
        value = value.value
    return isinstance(value, ast.Name)


def mark_through(node: fx.Node, slices: Slices, record: Record) -> None:
    """Say by which arguments a ``backward`` reaches all that it goes through, if it does."""
    if slices.local(node, record.recorded):
        pairs = zip(op_of(node).signature.params, node.args, strict=True)
        values = (n for n, a in pairs if isinstance(a, fx.Node) and not is_state(a))
        op_of(node).attributes[THROUGH] = tuple(values)
