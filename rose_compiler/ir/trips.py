"""The trips of a loop, one after the other, as one function of what the loop is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.fx as fx

from rose_compiler.ir.interp import Hooks, Interpreter


class Trips:
    """Runs a body for each value of ``indices``; the final carried values.

    ``body`` takes the index, ``carried`` carried values and what it captures, in this order. Called
    with the initial carried values and the captured ones, it returns the one final value, or a
    tuple of several. Without ``indices``, start, stop and step are its last arguments. The body
    must have no exit.
    """

    def __init__(
        self, body: fx.GraphModule, indices: range | None, carried: int, name: str
    ) -> None:
        self.body = body
        self.indices = indices
        self.carried = carried
        self.__name__ = name

    def __call__(self, *args: Any) -> Any:
        if self.indices is None:
            made = self.over(range(*args[-3:]), args[:-3])
        else:
            made = self.over(self.indices, args)
        return made[0] if self.carried == 1 else made

    def over(self, indices: range, args: Sequence[Any]) -> tuple[Any, ...]:
        """Run some trips; the carried values behind them, always as a tuple."""
        carried, captured = tuple(args[: self.carried]), args[self.carried :]
        interpreter = Interpreter(Hooks())
        for index in indices:
            carried = interpreter.graph(self.body.graph, (index, *carried, *captured)).values
        return tuple(carried)
