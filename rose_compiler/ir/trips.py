"""The trips of a loop, one after the other, as one function of what the loop is given."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch.fx as fx

from rose_compiler.ir.interp import resolve
from rose_compiler.ir.ops import STATE, Op
from rose_compiler.ir.program import is_call, output_node, placeholders

#: A function, its arguments (the place of a value, or a constant), and where its result goes.
_Step = tuple[Callable[..., Any], tuple[tuple[bool, Any], ...], int]


class Trips:
    """Runs a body for each value of ``indices``; the final carried values.

    ``body`` takes the index, ``carried`` carried values and what it captures, in this order. Called
    with the initial carried values and the captured ones, it returns the one final value, or a
    tuple of several. Without ``indices``, start, stop and step are its last arguments. The body
    has operations alone, no loops, branches or exits, and all under the modes of the caller.

    Raises:
        ValueError: for another body.
    """

    def __init__(
        self, body: fx.GraphModule, indices: range | None, carried: int, name: str
    ) -> None:
        self.indices = indices
        self.carried = carried
        self.__name__ = name
        places: dict[fx.Node, int] = {}
        self._steps: list[_Step] = []
        for node in placeholders(body.graph):
            places[node] = len(places)
        for node in body.graph.nodes:
            if node.op == "call_function":
                made = tuple(_argument(a, places) for a in node.args)
                places[node] = len(places)
                self._steps.append((_function(node), made, places[node]))
            elif node.op not in ("placeholder", "output"):
                raise ValueError(f"{node.name} is no operation")
        self._size = len(places)
        following: Any = output_node(body.graph).args[0]
        self._following = tuple(_argument(v, places) for v in following)

    def __call__(self, *args: Any) -> Any:
        if self.indices is None:
            made = self.over(range(*args[-3:]), args[:-3])
        else:
            made = self.over(self.indices, args)
        return made[0] if self.carried == 1 else made

    def over(self, indices: range, args: Sequence[Any]) -> tuple[Any, ...]:
        """Run some trips; the carried values behind them, always as a tuple."""
        carried, captured = tuple(args[: self.carried]), tuple(args[self.carried :])
        free = [None] * (self._size - 1 - len(args))
        for index in indices:
            values: list[Any] = [index, *carried, *captured, *free]
            for function, given, place in self._steps:
                values[place] = function(*[values[a] if there else a for there, a in given])
            carried = tuple(values[v] if there else v for there, v in self._following)
        return carried


def _argument(value: Any, places: dict[fx.Node, int]) -> tuple[bool, Any]:
    if isinstance(value, fx.Node):
        return True, places[value]
    held: list[fx.Node] = []
    fx.node.map_arg(value, held.append)
    if held:
        raise ValueError(f"{held[0]} is handed on inside a container")
    return False, value


def _function(node: fx.Node) -> Callable[..., Any]:
    if is_call(node, STATE):
        return resolve
    if isinstance(node.target, Op):
        if node.kwargs or node.target.impl is None:
            raise ValueError(f"{node.name} has no function of its arguments")
        return node.target.impl
    if node.target in (operator.getitem, operator.add, operator.sub, operator.mul):
        return node.target
    raise ValueError(f"{node.name} calls no operation")
