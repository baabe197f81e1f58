"""Questions about what a probe found: may an operation be computed on some rows at a time?"""

from __future__ import annotations

import torch.fx as fx

from rose_compiler.base.remarks import Blocker
from rose_compiler.ir import facts
from rose_compiler.ir.deps import place, title
from rose_compiler.ir.program import op_of
from rose_compiler.passes.base import PassContext


def ask(context: PassContext, node: fx.Node, rows: tuple[int, ...]) -> Blocker | None:
    """What the probe says against computing a node in tiles of these rows."""
    try:
        verdict = context.probe(node, rows)
    except Exception as error:  # a probe runs the user's code
        return Blocker("not-probed", f"trying {title(node)} raised {type(error).__name__}: {error}")
    return differs(node, verdict, rows, context.numerics)


def computes(node: fx.Node) -> bool:
    """Whether an operation takes rows of numbers, and not only takes a result apart."""
    signature = op_of(node).signature
    axes = signature.separable()
    specs = [
        facts.get(value).spec
        for name, value in zip(signature.params, node.args, strict=True)
        if name in axes and isinstance(value, fx.Node)
    ]
    return any(s is None or s.kind in ("tensor", "array", "dict") for s in specs)


def differs(node: fx.Node, verdict: str, tiles: tuple[int, ...], numerics: str) -> Blocker | None:
    """What a probe says against computing a node in tiles."""
    parts = "+".join(map(str, tiles)) if len(tiles) < 9 else f"{len(tiles)} times {tiles[0]}"
    where = tuple(w for w in (place(node),) if w)
    if verdict == "unknown":
        return Blocker(
            "not-probed", f"{title(node)} has not been computed in rows of {parts} yet", where=where
        )
    if verdict == "differ":
        return Blocker(
            "probe-values-differ",
            f"{title(node)} gives other values in rows of {parts}",
            where=where,
        )
    if verdict != "bits" and numerics == "bitwise":
        return Blocker(
            "probe-bits-differ",
            f"{title(node)} gives other bits in rows of {parts}",
            'numerics="close"',
            where=where,
        )
    return None
