"""Python numbers that remember which graph node they stand for.

A number that a traced function takes is handed to it as one of these. Arithmetic on it is recorded;
what would bake its present value into the graph (a comparison, a truth test) stops the trace.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx

from rose_compiler.frontend.sizes import TracedShape

Emit = Callable[[Callable[..., Any], tuple[Any, ...]], fx.Node]
Refuse = Callable[[str], BaseException]


class TracedNumber:
    """Mixin of :class:`TracedInt` and :class:`TracedFloat`: the node, and how to record more."""

    node: fx.Node
    emit: Emit
    refuse: Refuse


class TracedFloat(float, TracedNumber):
    """A float with a node."""


class TracedInt(int, TracedNumber):
    """An int with a node."""


def traced_number(value: float, node: fx.Node, emit: Emit, refuse: Refuse) -> Any:
    """``value`` as a number that stands for ``node``; values of other types come back unchanged."""
    made: Any
    if type(value) is int:
        made = TracedInt(value)
    elif type(value) is float:
        made = TracedFloat(value)
    else:
        return value
    made.node, made.emit, made.refuse = node, emit, refuse
    return made


def plain(value: Any) -> Any:
    """The ordinary number behind a traced one."""
    if isinstance(value, TracedInt):
        return int.__int__(value)
    if isinstance(value, TracedFloat):
        return float.__float__(value)
    return value


def untraced(value: Any) -> Any:
    """Arguments with ordinary numbers in place of traced ones."""
    if isinstance(value, TracedNumber):
        return plain(value)
    if type(value) is TracedShape:
        return torch.Size(map(untraced, value))
    if type(value) in (tuple, list):
        return type(value)(untraced(v) for v in value)
    if type(value) is dict:
        return {k: untraced(v) for k, v in value.items()}
    if isinstance(value, slice):
        return slice(untraced(value.start), untraced(value.stop), untraced(value.step))
    return value


def _node(value: Any) -> Any:
    return value.node if isinstance(value, TracedNumber) else value


def _binary(function: Callable[..., Any], swapped: bool) -> Callable[..., Any]:
    def method(self: Any, other: Any) -> Any:
        if not isinstance(other, int | float):
            return NotImplemented
        left, right = (other, self) if swapped else (self, other)
        value = function(plain(left), plain(right))
        node = self.emit(function, (_node(left), _node(right)))
        return traced_number(value, node, self.emit, self.refuse)

    return method


def _unary(function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Any) -> Any:
        node = self.emit(function, (self.node,))
        return traced_number(function(plain(self)), node, self.emit, self.refuse)

    return method


def _refused(what: str) -> Callable[..., Any]:
    def method(self: Any, *others: Any) -> Any:
        raise self.refuse(f"a Python number that the block is given is {what}")

    return method


_BINARY = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "truediv": operator.truediv,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "pow": operator.pow,
}

for _class in (TracedInt, TracedFloat):
    for _name, _function in _BINARY.items():
        setattr(_class, f"__{_name}__", _binary(_function, swapped=False))
        setattr(_class, f"__r{_name}__", _binary(_function, swapped=True))
    setattr(_class, "__neg__", _unary(operator.neg))  # noqa: B010 (mypy forbids the assignment)
    setattr(_class, "__abs__", _unary(operator.abs))  # noqa: B010
    for _name in ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__", "__bool__"):
        setattr(_class, _name, _refused("compared, which fixes its value"))
    for _name in ("__int__", "__float__", "__round__", "__trunc__", "__floor__", "__ceil__"):
        setattr(_class, _name, _refused("converted, which fixes its value"))
    for _name in ("__str__", "__repr__", "__format__"):
        setattr(_class, _name, _refused("turned into text, which fixes its value"))
    # dictionaries and sets compare by value
    setattr(_class, "__hash__", _refused("hashed, which fixes its value"))  # noqa: B010
