"""Arguments that keep an operation from being traced: a graph would be right for one of them."""

from __future__ import annotations

from typing import Any

import torch.fx as fx

from rose_compiler.base.remarks import Blocker
from rose_compiler.frontend import makes
from rose_compiler.frontend.record import Record
from rose_compiler.ir.deps import title
from rose_compiler.ir.program import is_state, op_of

#: Types of arguments that decide what a graph holds, and are no inputs of it.
_FIXED = (bool, str, bytes, complex, type(None))


def why_varying(node: fx.Node, record: Record) -> Blocker | None:
    """Why what an operation is handed keeps it from being traced: another type on another trip, or
    what a graph holds as it was."""
    found = makes.two(record.makes.get(node, ()), tails=False)
    if found is None:
        return _why_fixed(node, record)
    position, first, second = found
    return Blocker(
        "not-traceable",
        f"{title(node)}: `{op_of(node).signature.params[position]}` is {makes.told(first)} on one "
        f"trip and {makes.told(second)} on another, and a graph is right for one of them",
        "values of one type on all trips, by a conversion in front of the loop",
    )


def _why_fixed(node: fx.Node, record: Record) -> Blocker | None:
    """Why an argument that is no tensor, array or number keeps an operation from being traced:
    other operations make it, so it may be another one on the next call."""
    example = record.examples.get(node)
    if example is None:
        return None
    seen = list(zip(*record.types.get(node, ()), strict=True))
    for k, (argument, value) in enumerate(zip(node.args, example.args, strict=True)):
        if not isinstance(argument, fx.Node) or is_state(argument):
            continue
        kinds = {kind for kind in (seen[k] if seen else ()) if kind in _FIXED}
        kind = next(iter(kinds), None) or fixed_in(value)
        if kind is not None:
            what = "None on a trip" if kind is type(None) else f"a {kind.__name__}, or holds one"
            return Blocker(
                "not-traceable",
                f"{title(node)}: `{op_of(node).signature.params[k]}` is {what}, and a graph would "
                "keep what it was when it was traced",
                "an attribute in its place, which is compared before each call",
            )
    return None


def fixed_in(value: Any, depth: int = 0) -> type | None:
    """The type of what a graph holds as it was, in a value that is handed to it."""
    if type(value) in _FIXED:
        return type(value)
    if depth < 3 and isinstance(value, dict | tuple | list):
        below = value.values() if isinstance(value, dict) else value
        found = (fixed_in(v, depth + 1) for v in below)
        return next((kind for kind in found if kind is not None), None)
    return None
