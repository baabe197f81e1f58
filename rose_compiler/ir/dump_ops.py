"""Signatures on top of a dump: one decorated ``def`` for every operation that the program calls."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

import torch
import torch.fx as fx

from rose_compiler.base.errors import RoseError
from rose_compiler.ir.dump_expr import (
    RESERVED,
    bare,
    constant,
    is_name,
    plain_call,
    unprintable,
    value,
)
from rose_compiler.ir.dump_names import fresh, identifier
from rose_compiler.ir.ops import DROPPED, Op

# Attributes by which blocks are compiled anew; they lead to the objects that were captured.
_CAPTURED = frozenset(
    (
        "stmts",
        "filename",
        "inputs",
        "outputs",
        "globals",
        "owner",
        "within",
        "statics",
        "conditional",
        "given",
        "once",
        "part_of",
        "made",
        "noises",
        "as_written",
    )
)
# Attributes that have a word of their own.
_WORDS = frozenset(("calls",))
# Tensors larger than this don't belong into a text; graphs get theirs as states.
_MAX_CONSTANT = 4096


def print_op(op: Op, alias: str) -> list[str]:
    """The lines that declare an operation."""
    signature = op.signature
    params, body_names = _params(op)
    told = []
    if op.name != alias:
        told.append(f"name={constant(op.name)}")
    if op.kind != "block":
        told.append(f"kind={constant(op.kind)}")
    if params != signature.params:
        told.append(f"params={value(list(signature.params), {})}")
    for word, entries in (("reads", signature.reads), ("writes", signature.writes)):
        if entries is not None:
            told.append(f"{word}={value(list(entries), {})}")
    if signature.records:
        told.append(f"records={value(list(signature.records), {})}")
    if signature.batch is not None:
        told.append(f"batch={value(dict(signature.batch), {})}")
    for word, found, default in (
        ("results", signature.results, 1),
        ("exact", signature.exact, None),
        ("may_raise", signature.may_raise, True),
        ("declared", signature.declared, False),
    ):
        if found != default:
            told.append(f"{word}={found!r}")
    calls = sorted(filter(None, op.attributes.get("calls", ())))
    if calls:
        told.append(f"calls={value(calls, {})}")
    shown = told_attributes(op)
    if shown:
        told.append(f"attributes={value(shown, {})}")
    source = [line for text in op.source for line in text.splitlines()]
    head = f"def {alias}({', '.join(params)}):"
    lines = ["", f"@op({', '.join(told)})"]
    if op.body is None and not source:
        return [*lines, head + " ..."]
    lines.append(head)
    lines += [f"    # {line}".rstrip() for line in source]
    lines += _graph(op.body, body_names) if op.body is not None else ["    ..."]
    return lines


def _params(op: Op) -> tuple[tuple[str, ...], dict[fx.Node, str]]:
    """The parameter names to print, and with a traced body the names of its placeholders."""
    params = op.signature.params
    printable = len(set(params)) == len(params) and all(
        is_name(p) and p not in RESERVED for p in params
    )
    if op.body is None:
        return (params if printable else ()), {}
    found = [n for n in op.body.graph.nodes if n.op == "placeholder"]
    handed = len(params) - op.attributes.get(DROPPED, 0)
    if len(found) != handed:
        raise unprintable(
            f"the body of {op.name} takes {len(found)} values, its signature {handed}"
        )
    if not printable:
        params = tuple(f"p{i}" for i in range(len(params)))
    return params, dict(zip(found, params, strict=False))


def told_attributes(op: Op) -> dict[str, Any]:
    """The attributes of an operation that a dump tells: what text can hold, nothing empty."""
    told: dict[str, Any] = {}
    for name, found in op.attributes.items():
        if (
            name in _CAPTURED
            or name in _WORDS
            or found is None
            or (isinstance(found, Sized) and not len(found))
        ):
            continue
        try:
            value(found, {})
        except (RoseError, KeyError):
            continue
        told[name] = found
    return told


def _graph(body: fx.GraphModule, names: dict[fx.Node, str]) -> list[str]:
    lines = []
    taken = {*RESERVED, *names.values()}
    for node in body.graph.nodes:
        if node.op == "placeholder":
            continue
        if node.op == "output":
            lines.append(f"return {bare(node.args[0], names)}")
            break
        text = _tensor(body, node) if node.op == "get_attr" else plain_call(node, names)
        # every call has its name, since attributes speak of draws and checks by theirs
        names[node] = fresh(identifier(node.name), taken)
        lines.append(f"{names[node]} = {text}")
    return [f"    {line}" for line in lines]


def _tensor(body: fx.GraphModule, node: fx.Node) -> str:
    """A small tensor that the graph holds as a constant."""
    found: Any = body
    for part in str(node.target).split("."):
        found = getattr(found, part)
    if not isinstance(found, torch.Tensor) or found.numel() > _MAX_CONSTANT:
        raise unprintable(f"{node.target} of a traced graph is no small constant tensor")
    if found.requires_grad or not (found.is_floating_point() or _integral(found)):
        raise unprintable(f"{node.target} of a traced graph can't be written as a constant")
    items = found.detach().cpu().tolist()
    return f"constant({value(items, {})}, {constant(found.dtype)}, {constant(found.device)})"


def _integral(found: torch.Tensor) -> bool:
    return not found.is_complex() and not found.is_quantized
