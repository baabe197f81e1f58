"""What the rules of the separability proof work with."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx

from rose_compiler.base.remarks import Blocker
from rose_compiler.ir import facts

#: Where the batch lies in a value: along an axis, nowhere (None), or for a tuple, item by item.
#: ``ALL`` stands for one truth value about all rows, which only checks may use.
Axis = Any
ALL = -1


class Coupled(Exception):
    """The proof fails here."""

    def __init__(self, code: str, why: str, allow: str | None = None) -> None:
        super().__init__(why)
        self.blocker = Blocker(code, why, allow)


@dataclass(frozen=True)
class Literal:
    """A call whose sizes hold the number of rows: that number, and sizes that do not."""

    size: int
    sizes: tuple[Any, ...]


@dataclass(frozen=True)
class Spread:
    """A call that makes as many equal rows as there are: ``sizes`` for one row, the axis of the
    rows, and a batch to take their number from."""

    sizes: tuple[Any, ...]
    axis: int
    like: fx.Node
    like_axis: int

    def one_row(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the call's result for one row."""
        return tuple(1 if k == self.axis else n for k, n in enumerate(shape))


@dataclass
class Rows:
    """The axis of every value so far, and the calls that fix the number of rows."""

    axes: dict[fx.Node, Axis] = field(default_factory=dict)
    literals: dict[fx.Node, Literal] = field(default_factory=dict)
    spreads: dict[fx.Node, Spread] = field(default_factory=dict)
    count: int | None = None

    def start(self, node: fx.Node, axis: int) -> None:
        """Enter a batched placeholder; one that is a dict has the batch in each entry."""
        spec = facts.get(node).spec
        entries = spec is not None and bool(spec.keys)
        shapes = [s.shape for s in spec.items] if spec is not None and entries else [shape_of(node)]
        for shape in shapes:
            if not 0 <= axis < len(shape):
                raise Coupled("not-proven-separable", f"`{node.name}` has no axis {axis}")
            if self.count is not None and self.count != shape[axis]:
                raise Coupled(
                    "not-proven-separable",
                    f"`{node.name}` has {shape[axis]} rows, the others have {self.count}",
                )
            self.count = shape[axis]
        self.axes[node] = ("each", axis) if entries else axis


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """The recorded shape of a tensor or array."""
    spec = facts.get(node).spec
    if spec is None or spec.kind not in ("tensor", "array"):
        raise Coupled("not-proven-separable", f"the shape of `{node.name}` is not known")
    return spec.shape


def is_tensor(value: Any) -> bool:
    """Whether a value is a node of a tensor; a node of unknown type counts as one."""
    if not isinstance(value, fx.Node):
        return False
    spec = facts.get(value).spec
    return spec is None or spec.kind == "tensor"


def is_array(node: fx.Node) -> bool:
    """Whether a value is a numpy array."""
    spec = facts.get(node).spec
    return spec is not None and spec.kind == "array"


@dataclass
class Call:
    """One call, by what the rules ask of it; a method's receiver is its first argument."""

    node: fx.Node
    rows: Rows

    @property
    def args(self) -> tuple[Any, ...]:
        return tuple(self.node.args)

    def arg(self, position: int, name: str, default: Any = None) -> Any:
        """An argument that may be passed by position or by name."""
        if position < len(self.node.args):
            return self.node.args[position]
        return self.node.kwargs.get(name, default)

    def axis(self, value: Any) -> Axis:
        """Where the batch lies in an argument."""
        return self.rows.axes.get(value) if isinstance(value, fx.Node) else None

    @property
    def batched(self) -> list[fx.Node]:
        """Operands that have the batch anywhere in them, containers looked into."""
        return [n for n in self.node.all_input_nodes if self.rows.axes.get(n) is not None]

    def row_axis(self, value: Any) -> int:
        """The axis of an argument that must be batched along one axis."""
        axis = self.axis(value)
        if not isinstance(axis, int):
            self.refuse("not-proven-separable", "an operand has no single batch axis")
        assert isinstance(axis, int)
        return axis

    def tensors(self) -> list[fx.Node]:
        """All tensor operands."""
        return [n for n in self.node.all_input_nodes if is_tensor(n)]

    def only(self, *values: Any) -> None:
        """Fail if anything but these operands is batched."""
        allowed = [v for v in values if isinstance(v, fx.Node)]
        for operand in self.batched:
            if operand not in allowed:
                self.refuse(
                    "batch-coupling", f"its operand `{operand.name}` differs from row to row"
                )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result."""
        return shape_of(self.node)

    def refuse(self, code: str, why: str, allow: str | None = None) -> None:
        raise Coupled(code, f"`{self.node.name}`: {why}", allow)

    def coupled(self, what: str) -> None:
        """Fail: the call mixes rows."""
        self.refuse("batch-coupling", f"{what} the batch axis")


Rule = Callable[[Call], Axis]

_OPERATORS = {
    operator.truediv: "div",
    operator.floordiv: "floor_divide",
    operator.mod: "remainder",
    operator.and_: "bitwise_and",
    operator.or_: "bitwise_or",
    operator.xor: "bitwise_xor",
    operator.invert: "bitwise_not",
    operator.pos: "positive",
    operator.getitem: "getitem",
}
_SAME = {
    "truediv": "div",
    "divide": "div",
    "multiply": "mul",
    "subtract": "sub",
    "negative": "neg",
    "absolute": "abs",
    "concat": "cat",
    "concatenate": "cat",
    "swapaxes": "transpose",
    "swapdims": "transpose",
    "moveaxis": "movedim",
    "__getitem__": "getitem",
    "view_as": "reshape_as",
    "reshape_as": "reshape_as",
}


def name_of_call(node: fx.Node) -> str:
    """One name for all forms of an operation: operator, function, method, ATen overload."""
    target: Any = node.target
    if isinstance(target, str):
        name = target
    elif isinstance(target, torch._ops.OpOverload):
        name = target._schema.name.partition("::")[2]
    else:
        name = str(_OPERATORS.get(target) or getattr(target, "__name__", target))
    return _SAME.get(name, name)


def normal_dim(dim: int, rank: int) -> int:
    """An axis counted from the front."""
    return dim + rank if dim < 0 else dim


def dims_of(value: Any, rank: int) -> tuple[int, ...] | None:
    """Axes counted from the front; ``None`` for all of them."""
    if value is None or (isinstance(value, tuple | list) and not value):
        return None
    given = value if isinstance(value, tuple | list) else (value,)
    if not all(isinstance(d, int) for d in given):
        raise Coupled("not-proven-separable", "an axis is not known")
    return tuple(normal_dim(d, rank) for d in given)


def product(sizes: Iterator[int] | tuple[int, ...]) -> int:
    """How many elements a tensor of these sizes has."""
    return math.prod(sizes)
