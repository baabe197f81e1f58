"""Graphs of bodies as fx modules that are not compiled to Python until somebody asks for it."""

from __future__ import annotations

from typing import Any

import torch.fx as fx


def _on_demand(module: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
    if type(module).forward is _on_demand:  # a method that was kept may be called again
        module.recompile()
    return type(module).forward(module, *args, **kwargs)


class Body(fx.GraphModule):
    """The graph of a loop's or a branch's body.

    ``fx.GraphModule`` writes and compiles Python code for its graph, and again for all graphs below
    it, whenever one is made. Executors walk such graphs, or emit code of their own.
    """

    @property
    def graph(self) -> fx.Graph:
        """The graph; setting another one leaves its code for later."""
        return self._graph

    @graph.setter
    def graph(self, graph: fx.Graph) -> None:
        self._graph = graph
        graph.owning_module = self
        # each module has a class of its own, for this method
        type(self).forward = _on_demand

    @property
    def code(self) -> str:
        """Python code for the graph as it was when it was first asked for."""
        if "_code" not in self.__dict__:
            self.recompile()
        return super().code

    def __reduce__(self) -> tuple[Any, ...]:
        self.recompile()  # what is stored is the code
        return super().__reduce__()

    def __str__(self) -> str:
        self.recompile()
        return super().__str__()
