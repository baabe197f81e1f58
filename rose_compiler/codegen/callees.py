"""What emitted calls take from the operation that they call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.fx as fx

from rose_compiler.ir.ops import MERGE, Op
from rose_compiler.ir.program import is_call, is_item

#: Parts of a step's result: observations, rewards, terminated, truncated. The infos are the fifth.
_ARRAYS = (0, 1, 2, 3)


def always_read(op: Op, node: fx.Node) -> Sequence[Any]:
    """The arguments that an operation reads whatever happens, so that they have to be bound."""
    maybe = op.attributes.get("maybe_unbound", ())
    if not maybe:
        return node.args
    pairs = zip(op.signature.params, node.args, strict=False)
    return [arg for name, arg in pairs if name not in maybe]


def plain_step(op: Op, node: fx.Node) -> tuple[Any, Any] | None:
    """(simulator, action) of an operation that is one plain step and nothing else."""
    roles = op.attributes.get("step")
    if op.kind != "step" or not roles or not roles.get("action"):
        return None
    params = op.signature.params
    if sorted(params) != sorted((roles["env"], roles["action"])) or len(node.args) != 2:
        return None
    given = dict(zip(params, node.args, strict=True))
    return given[roles["env"]], given[roles["action"]]


def is_compiled(op: Op) -> bool:
    """Whether a graph is run by what it was compiled to."""
    return bool(op.attributes.get("inductor") or op.attributes.get("script"))


def form(op: Op) -> str:
    """What a loss or graph is compiled to, as arguments of its call."""
    script = ", script=True" if op.attributes.get("script") else ""
    if tiles := op.attributes.get("tiles"):
        script += f", tiles={tiles}"
    return script + (", replayed=True" if op.attributes.get("replayed") else "")


def infos_unread(node: fx.Node) -> bool:
    """Whether of a shard's step only parts other than its infos are used, and the merged whole."""
    return all(is_call(u, MERGE) or (is_item(u) and u.args[1] in _ARRAYS) for u in node.users)


def source_of(op: Op) -> str:
    """The user's statement, or its first line."""
    if not op.source or op.kind in ("graph", "loss"):
        return ""
    first, *more = op.source[0].splitlines() or [""]
    return first + (" …" if more or len(op.source) > 1 else "")
