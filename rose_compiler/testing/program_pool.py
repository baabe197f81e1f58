"""What the generator of programs keeps track of: values in reach, by type, and where it writes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch.fx as fx
from hypothesis import strategies as st

from rose_compiler.ir.program import Builder

Value = Any
Draw = Callable[[st.SearchStrategy[Any]], Any]

#: What may occur; ``programs(without=...)`` leaves some out.
FEATURES = frozenset(
    ("branch", "context", "draw", "exit", "host", "iter", "local", "loop", "opaque", "simulator")
) | {"gradient", "store", "strange", "unbound", "view", "while"}


@dataclass
class Pool:
    """What a statement may use: nodes of this body and of those around it, by type."""

    ints: list[Value] = field(default_factory=list)
    rows: list[Value] = field(default_factory=list)
    bools: list[Value] = field(default_factory=list)
    views: list[Value] = field(default_factory=list)
    lists: list[fx.Node] = field(default_factory=list)
    growing: list[fx.Node] = field(default_factory=list)
    grids: list[fx.Node] = field(default_factory=list)
    indices: list[fx.Node] = field(default_factory=list)
    losses: list[fx.Node] = field(default_factory=list)  # not gone back through yet

    def child(self) -> Pool:
        return Pool(**{name: list(found) for name, found in vars(self).items()})


@dataclass
class Place:
    """Where statements go: a body, what it may use, and the loop around it."""

    builder: Builder
    pool: Pool
    depth: int
    carried: tuple[str, ...] | None = None  # types of what the loop around carries

    def inside(self, builder: Builder, **changes: Any) -> Place:
        return replace(self, builder=builder, pool=self.pool.child(), **changes)
