"""Builders that put nodes into a graph that exists, stamped with the pass that makes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch.fx as fx

from rose_compiler.ir import facts
from rose_compiler.ir.ops import Op
from rose_compiler.ir.program import Builder, Value


class Stamper(Protocol):
    """What a builder needs of the rewriter."""

    def register(self, op: Op) -> None:
        """Enter an operation into the program's table."""

    def stamp(self, node: fx.Node, like: fx.Node | None, known: Mapping[str, Any]) -> None:
        """Give a new node its facts, stamped with the pass."""

    def use(self, value: Value, graph: fx.Graph) -> Value:
        """A value as seen in a graph further in."""


class Stamping(Builder):
    """A builder whose nodes carry the pass that makes them."""

    def __init__(self, stamper: Stamper, parent: Builder | None) -> None:
        super().__init__(parent)
        self.stamper = stamper

    def call(
        self,
        op: Op,
        *args: Value,
        name: str | None = None,
        like: fx.Node | None = None,
        **known: Any,
    ) -> fx.Node:
        node = super().call(op, *args, name=name, **known)
        self.stamper.register(op)
        self.stamper.stamp(node, like, known)
        return node

    def nested(self) -> Builder:
        """A builder of a body below this graph."""
        return Stamping(self.stamper, self)


class Site(Stamping):
    """Builds into a graph that exists, in front of a node."""

    def __init__(self, stamper: Stamper, before: fx.Node) -> None:
        super().__init__(stamper, None)
        self.graph = before.graph
        module = before.graph.owning_module
        assert module is not None
        self.module = module
        self.before = before

    def use(self, value: Value) -> Value:
        return self.stamper.use(value, self.graph)

    def call(self, *args: Any, **known: Any) -> fx.Node:
        with self.graph.inserting_before(self.before):
            return super().call(*args, **known)

    def item(self, node: fx.Node, position: int, name: str | None = None) -> fx.Node:
        with self.graph.inserting_before(self.before):
            return super().item(node, position, name)

    def attach(self, stem: str, child: fx.GraphModule) -> fx.Node:
        with self.graph.inserting_before(self.before):
            return super().attach(stem, child)


class LoopBuilder(Stamping):
    """The body of a loop that is being made: ``index`` and ``params`` are its placeholders."""

    def __init__(
        self,
        site: Site,
        bounds: tuple[Value, ...],
        carried: tuple[Value, ...],
        known: facts.LoopFacts,
        like: fx.Node | None,
    ) -> None:
        super().__init__(site.stamper, site)
        self._site, self._bounds, self._init, self._known = site, bounds, carried, known
        self._like = like
        self.index = self.placeholder(known.index or "i", "index")
        self.params = tuple(
            self.placeholder(v.name if isinstance(v, fx.Node) else "carried", "carried")
            for v in carried
        )

    def close(self, outputs: tuple[Value, ...] = ()) -> fx.Node:
        """End the body with the next carried values; the loop's node."""
        return self._site.loop(
            self, outputs, self._bounds, self._init, self._known, like=self._like
        )
