"""What a verifier rule is, and the few questions that all of them ask."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch.fx as fx

from rose_compiler.ir.deps import Dependences
from rose_compiler.ir.program import Program, children


@dataclass(frozen=True)
class Body:
    """One graph of a program: its module, and the loop or branch it is a body of."""

    module: fx.GraphModule
    owner: fx.Node | None
    path: str

    @property
    def graph(self) -> fx.Graph:
        return self.module.graph


@dataclass(frozen=True)
class Fault:
    """What breaks a rule, and where."""

    what: str
    node: fx.Node | None = None
    expected: object = None
    found: object = None


class Subject:
    """The program under test. ``bodies`` may be asked for by the rules behind those of form."""

    def __init__(self, program: Program) -> None:
        self.program = program

    @cached_property
    def bodies(self) -> tuple[Body, ...]:
        """All graphs, outermost first."""
        return tuple(_bodies(self.program.root, None, self.program.name))

    @cached_property
    def deps(self) -> Dependences:
        return Dependences(self.program)

    def body(self, graph: fx.Graph) -> Body:
        return next(b for b in self.bodies if b.graph is graph)


Check = Callable[[Subject], Iterator[Fault]]


@dataclass(frozen=True)
class Rule:
    """A named invariant."""

    name: str
    doc: str
    check: Check


def _bodies(module: fx.GraphModule, owner: fx.Node | None, path: str) -> Iterator[Body]:
    yield Body(module, owner, path)
    for node, child in children(module):
        yield from _bodies(child, node, f"{path}.{node.name}")
