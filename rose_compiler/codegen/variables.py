"""Which variable of a merged function holds which value, and when its name is free again."""

from __future__ import annotations

import ast
from collections.abc import Iterable

import torch.fx as fx

from rose_compiler.codegen.names import stem
from rose_compiler.codegen.schedule import uses_of


class Variables:
    """The local variables of a function under construction.

    A name may be given to a value when nothing needs the value that had it before: values of the
    same body by their last use, values of bodies that are over at once, values of bodies around
    never.
    """

    def __init__(self, reserved: Iterable[str]) -> None:
        self.reserved = frozenset(reserved)
        self.of: dict[fx.Node, str] = {}
        self.preferred: dict[fx.Node, str] = {}
        self.given: set[str] = set()
        self._holder: dict[str, fx.Node | None] = {}
        self._place: dict[fx.Graph, dict[fx.Node, int]] = {}
        self._under_way: list[fx.Graph] = []

    # -- bodies

    def begin(self, graph: fx.Graph) -> None:
        """A body begins."""
        self._place[graph] = {n: k for k, n in enumerate(graph.nodes)}
        self._under_way.append(graph)

    def end(self) -> None:
        """The innermost body is over."""
        self._under_way.pop()

    def place(self, node: fx.Node) -> int:
        """Where a node stands in its graph."""
        return self._place[node.graph][node]

    # -- names

    def dead(self, node: fx.Node, before: fx.Node, *, including: bool = True) -> bool:
        """Whether nothing behind ``before`` uses a value; ``including`` says whether ``before``
        itself may be the last to use it."""
        if node.graph is not before.graph:
            return node.graph not in self._under_way
        last = self.place(before) if including else self.place(before) - 1
        return all(u.op != "output" and self.place(u) <= last for u in uses_of(node))

    def free(self, name: str, before: fx.Node, *, including: bool = True) -> bool:
        """Whether a name may be given to a new value at a node."""
        if name in self.reserved:
            return False
        holder = self._holder.get(name)
        return holder is None or self.dead(holder, before, including=including)

    def hold(self, name: str, node: fx.Node | None) -> str:
        """A name now holds a value, or nothing that is needed."""
        self._holder[name] = node
        self.given.add(name)
        if node is not None:
            self.of[node] = name
        return name

    def alias(self, node: fx.Node, name: str) -> None:
        """A node of another body stands for what a name holds."""
        self.of[node] = name

    def pick(self, text: str, before: fx.Node, *, including: bool = True) -> str:
        """A free name close to ``text``."""
        if self.free(text, before, including=including):
            return text
        base, n = stem(text), 1
        while not self.free(name := base if n == 1 else f"{base}_{n}", before, including=including):
            n += 1
        return name

    def target(self, node: fx.Node, text: str, before: fx.Node, *, including: bool = True) -> str:
        """A name for a new value: the preferred one where it is free."""
        preferred = self.preferred.get(node)
        if preferred is not None and self.free(preferred, before, including=including):
            return preferred
        return self.pick(text, before, including=including)

    def unused(self, text: str) -> str:
        """A name that nothing has had so far."""
        base, n = stem(text), 1
        name = base
        while name in self.given or name in self.reserved:
            n += 1
            name = f"{base}_{n}"
        self.given.add(name)
        return name


def read_globals(statements: Iterable[ast.stmt], inputs: Iterable[str], own: set[str]) -> set[str]:
    """The names that statements look up outside of themselves and their inputs."""
    found = {
        part.id
        for stmt in statements
        for part in ast.walk(stmt)
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load)
    }
    return found - set(inputs) - own
