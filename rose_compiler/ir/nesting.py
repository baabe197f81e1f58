"""Values across bodies: who owns a body, and how an outer value comes to be seen in it."""

from __future__ import annotations

from typing import Any

import torch.fx as fx

from rose_compiler.base.remarks import RemarkLog
from rose_compiler.ir import bodies
from rose_compiler.ir.deps import Dependences
from rose_compiler.ir.program import Program, Value
from rose_compiler.ir.reporter import Fuel, Reporter


class Nesting(Reporter):
    """A program under change, its dependences, and captures of outer values."""

    def __init__(
        self,
        of: Program,
        log: RemarkLog,
        pass_name: str,
        fuel: Fuel | int | None = None,
        context: Any = None,
    ) -> None:
        super().__init__(log, pass_name, fuel)
        self.program = of
        self.context = context
        self._deps: Dependences | None = None

    @property
    def deps(self) -> Dependences:
        """The dependences of the program as it stands now; kept until the next change."""
        if self._deps is None:
            self._deps = Dependences(self.program)
        return self._deps

    def owner(self, graph: fx.Graph) -> fx.Node | None:
        """The loop or branch that a body belongs to; ``None`` for the root graph.

        Raises:
            ValueError: when the graph belongs to no body of the program.
        """
        return bodies.owner(self.program, graph)

    def use(self, value: Value, graph: fx.Graph) -> Value:
        """``value`` as seen in ``graph``: captured, level by level, where it lives further out.

        Raises:
            ValueError: when no graph around ``graph`` holds the value.
        """
        if not isinstance(value, fx.Node) or value.graph is graph:
            return value
        owner = self.owner(graph)
        if owner is None:
            raise ValueError(f"{value} belongs to no graph around the place it is used at")
        return self.import_value(owner, value, graph=graph)

    def import_value(
        self, owner: fx.Node, value: Value, *, graph: fx.Graph | None = None
    ) -> fx.Node:
        """Capture an outer value for the body of a loop or branch; the placeholder inside.

        Both arms of a branch get one; ``graph`` says in which to return it (the first if left out).
        """
        value = self.use(value, owner.graph)
        graphs = bodies.graphs_of(owner)
        if value not in owner.args[3]:  # type: ignore[operator]
            for body in graphs:
                bodies.stand_for(bodies.add_placeholder(body, value.name), value)
            owner.args = (*owner.args[:3], (*owner.args[3], value))  # type: ignore[misc]
            self._changed()
        return bodies.captured_param(owner, value, graph or graphs[0])

    def _owner_of(self, node: fx.Node) -> fx.Node:
        owner = self.owner(node.graph)
        assert owner is not None
        return owner

    def _changed(self) -> None:
        self._deps = None
