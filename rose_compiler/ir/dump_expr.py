"""Values and expressions of a dump: constants, arguments, calls, operators, as Python text."""

from __future__ import annotations

import keyword
import math
import operator
import re
from collections.abc import Mapping
from typing import Any

import torch
import torch.fx as fx

from rose_compiler.base.errors import RoseError, VerifyError, fail, register
from rose_compiler.ir import functions
from rose_compiler.ir.ops import UNBOUND

register(
    "dump-unprintable",
    VerifyError,
    "a program holds something that the language of dumps can't express",
    "pass it as a state, or keep it inside an operation",
)

#: Binary operators that print infix, by function.
INFIX: dict[Any, str] = {
    operator.add: "+",
    operator.sub: "-",
    operator.mul: "*",
    operator.truediv: "/",
    operator.floordiv: "//",
    operator.mod: "%",
    operator.pow: "**",
    operator.and_: "&",
    operator.or_: "|",
    operator.xor: "^",
    operator.lshift: "<<",
    operator.rshift: ">>",
    operator.lt: "<",
    operator.le: "<=",
    operator.gt: ">",
    operator.ge: ">=",
    operator.eq: "==",
    operator.ne: "!=",
}
#: Unary operators; they print as such only in front of a name, since ``-1`` is a constant.
PREFIX: dict[Any, str] = {operator.neg: "-", operator.invert: "~", operator.not_: "not "}
# Names that values can't have in a dump: roots of qualified names, the constant, the blank target.
RESERVED = frozenset((*functions.ROOTS, "UNBOUND", "_"))

Names = Mapping[fx.Node, str]


def unprintable(what: str) -> RoseError:
    return fail("dump-unprintable", what)


def is_name(text: str) -> bool:
    """Whether the text can stand as a name in a dump."""
    return text.isascii() and text.isidentifier() and not keyword.iskeyword(text)


def constant(value: Any) -> str:
    """A constant as an expression that parses back to an equal one.

    Raises:
        VerifyError: when there is no such expression.
    """
    if value is None or value is UNBOUND or type(value) in (bool, int):
        return repr(value)
    if type(value) is str:
        text = repr(value)
        return text if '"' in text else f'"{text[1:-1]}"'
    if type(value) is float:
        return repr(value) if math.isfinite(value) else f'float("{value}")'
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return str(value)
    if isinstance(value, torch.device):
        return f'torch.device("{value}")'
    if value is Ellipsis:
        return "..."
    shown = re.sub(r" at 0x[0-9a-f]+", "", repr(value))[:80]
    raise unprintable(f"a constant of type {type(value).__name__} can't be printed: {shown}")


def value(item: Any, names: Names) -> str:
    """An argument: a node by its name, containers item by item, anything else as a constant."""
    if isinstance(item, fx.Node):
        return names[item]
    if isinstance(item, tuple):
        inner = ", ".join(value(i, names) for i in item)
        return f"({inner},)" if len(item) == 1 else f"({inner})"
    if isinstance(item, list):
        return f"[{', '.join(value(i, names) for i in item)}]"
    if isinstance(item, dict):
        pairs = (f"{value(k, names)}: {value(v, names)}" for k, v in item.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(item, frozenset):
        # the order of a set differs from run to run
        return f"frozenset([{', '.join(sorted(value(i, names) for i in item))}])"
    if isinstance(item, slice):
        return f"slice({', '.join(value(i, names) for i in (item.start, item.stop, item.step))})"
    return constant(item)


def bare(items: Any, names: Names) -> str:
    """A value behind ``return``, ``yield`` or ``=``: a tuple of several stands without brackets."""
    text = value(items, names)
    return text[1:-1] if isinstance(items, tuple) and len(items) > 1 else text


def _operand(item: Any, names: Names) -> str:
    text = value(item, names)
    return f"({text})" if text.startswith("-") else text


def _index(item: Any, names: Names) -> str:
    if isinstance(item, slice):
        ends = (item.start, item.stop, item.step)
        start, stop, step = ("" if e is None else value(e, names) for e in ends)
        return f"{start}:{stop}" + (f":{step}" if step else "")
    if isinstance(item, tuple) and item:
        inner = ", ".join(
            _index(i, names) if isinstance(i, slice) else value(i, names) for i in item
        )
        return inner + ("," if len(item) == 1 else "")
    return value(item, names)


def arguments(args: Any, kwargs: Mapping[str, Any], names: Names) -> str:
    parts = [value(a, names) for a in args]
    parts += [f"{k}={value(v, names)}" for k, v in kwargs.items()]
    return ", ".join(parts)


def is_infix(node: fx.Node) -> bool:
    """Whether a node calls an operator that may print as one."""
    return node.op == "call_function" and (node.target in INFIX or node.target in PREFIX)


def plain_call(node: fx.Node, names: Names) -> str:
    """A call of something that is no operation: operator, torch function or tensor method.

    Raises:
        VerifyError: when the function is none that a dump can name.
    """
    args, kwargs, target = node.args, node.kwargs, node.target
    if node.op == "call_method":
        if args and isinstance(args[0], fx.Node) and target in functions.methods():
            return f"{names[args[0]]}.{target}({arguments(args[1:], kwargs, names)})"
        raise unprintable(f"{node.name} calls the method {target!r}, which is no tensor method")
    if node.op != "call_function":
        raise unprintable(f"{node.name} is a {node.op}")
    if not kwargs:
        if len(args) == 2 and target in INFIX:
            return f"{_operand(args[0], names)} {INFIX[target]} {_operand(args[1], names)}"
        if len(args) == 1 and target in PREFIX and isinstance(args[0], fx.Node):
            return PREFIX[target] + names[args[0]]
        if len(args) == 2 and isinstance(args[0], fx.Node):
            if target is operator.getitem:
                return f"{names[args[0]]}[{_index(args[1], names)}]"
            if target is getattr and args[1] in functions.ATTRIBUTES:
                return f"{names[args[0]]}.{args[1]}"
    name = functions.name_of(target)
    if name is None:
        raise unprintable(f"{node.name} calls {target!r}, which is none of the known functions")
    return f"{name}({arguments(args, kwargs, names)})"
