"""The trips of a loop, one after the other, as one function of what the loop is given."""

from __future__ import annotations

from typing import Any

import torch.fx as fx

from rose_compiler.ir.interp import Hooks, Interpreter


class Trips:
    """Runs a body for each value of ``indices``; the final carried values.

    ``body`` takes the index, ``carried`` carried values and what it captures, in this order. Called
    with the initial carried values and the captured ones, it returns the one final value, or a
    tuple of several. The body must have no exit.
    """

    def __init__(self, body: fx.GraphModule, indices: range, carried: int, name: str) -> None:
        self.body = body
        self.indices = indices
        self.carried = carried
        self.__name__ = name

    def __call__(self, *args: Any) -> Any:
        carried, captured = args[: self.carried], args[self.carried :]
        interpreter = Interpreter(Hooks())
        for index in self.indices:
            carried = interpreter.graph(self.body.graph, (index, *carried, *captured)).values
        return carried[0] if self.carried == 1 else tuple(carried)
