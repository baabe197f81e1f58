"""The only reader and writer of ``node.meta``: frozen facts about a node.

``deepcopy`` of an fx graph shares mutable ``meta`` values, so everything stored here is frozen.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch.fx as fx

from rose_compiler.base.errors import SourceLocation

_KEY = "rose"
#: What the number of a context's region is called in a dump.
REGION = "region"


@dataclass(frozen=True)
class Origin:
    """Where a node came from: the user's place, the inlining chain, the passes that touched it."""

    where: SourceLocation | None = None
    inlined_from: tuple[SourceLocation, ...] = ()
    passes: tuple[str, ...] = ()

    def stamped(self, pass_name: str) -> Origin:
        if self.passes and self.passes[-1] == pass_name:
            return self
        return replace(self, passes=(*self.passes, pass_name))


@dataclass(frozen=True)
class Context:
    """A thread-local mode an operation runs under: ``no_grad``, ``enable_grad``,
    ``inference_mode``, ``autocast``. ``args`` are its static arguments. ``region`` tells one
    ``with`` from others of the same mode where leaving it has an effect
    (:data:`rose_compiler.ir.contexts.ALIKE`); 0 elsewhere."""

    kind: str
    args: tuple[Any, ...] = ()
    region: int = 0

    def __str__(self) -> str:
        return self.kind + (f"({', '.join(map(str, self.args))})" if self.args else "")


@dataclass(frozen=True)
class Spec:
    """The type of a value as seen on the first trip.

    ``kind`` is "tensor", "array", "scalar", "tuple", "dict", "object", "none". Tensors and arrays
    have ``shape`` and ``dtype`` (text, e.g. "float32"); tuples have ``items``, and so have dicts of
    arrays or tensors, by ``keys``.
    """

    kind: str
    type_name: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    device: str = ""
    requires_grad: bool = False
    items: tuple[Spec, ...] = ()
    keys: tuple[str, ...] = ()


def rows_of(spec: Spec | None) -> int | None:
    """The length of the first axis of a tensor or array, or of all entries of a dict of them."""
    if spec is None:
        return None
    if spec.kind in ("tensor", "array"):
        return spec.shape[0] if spec.shape else None
    if spec.kind != "dict" or not spec.keys:
        return None
    found = {rows_of(item) for item in spec.items}
    return found.pop() if len(found) == 1 else None


@dataclass(frozen=True)
class LoopFacts:
    """What a loop node is: ``kind`` "range", "iter" (an iterator the user made) or "while".

    ``threads`` is how many threads torch's operations may use while it runs; 0 leaves them alone.
    """

    kind: str = "range"
    label: str = ""
    index: str = ""  # the user's name of the loop variable
    wrapper: str = ""  # a progress bar around the range, by name
    has_exit: bool = False
    threads: int = 0


@dataclass(frozen=True)
class Slot:
    """Where a scheduled operation runs: its lane, its pipeline stage (executed ``stage`` trips
    later than its program trip) and its place in the issue order of its body (low first)."""

    lane: str = ""  # "" is the coordinator, inline
    stage: int = 0
    order: int = 0


@dataclass(frozen=True)
class Facts:
    """Everything known about one node. ``role`` is "value", "state", "index", "carried" or
    "captured" for placeholders and "" elsewhere. ``alias`` names states that a value may share
    memory with; ``borrowed`` marks values that a later step may overwrite."""

    role: str = ""
    origin: Origin = Origin()
    context: tuple[Context, ...] = ()
    spec: Spec | None = None
    alias: tuple[str, ...] = ()
    borrowed: bool = False
    loop: LoopFacts | None = None
    slot: Slot | None = None
    cost: float | None = None  # median seconds a call, as profiled
    state: str = ""  # the state that a state node stands for
    maybe_unbound: bool = False  # may be UNBOUND when it is used
    note: str = ""


_NONE = Facts()


def get(node: fx.Node) -> Facts:
    """The facts of a node (defaults when none were set)."""
    found = node.meta.get(_KEY)
    return found if isinstance(found, Facts) else _NONE


def put(node: fx.Node, **changes: Any) -> Facts:
    """Change some facts of a node."""
    facts = replace(get(node), **changes)
    node.meta[_KEY] = facts
    return facts


def copy(source: fx.Node, target: fx.Node, *, pass_name: str = "") -> None:
    """Give ``target`` the facts of ``source``, stamped with the pass that made it."""
    facts = get(source)
    if pass_name:
        facts = replace(facts, origin=facts.origin.stamped(pass_name))
    target.meta[_KEY] = facts
