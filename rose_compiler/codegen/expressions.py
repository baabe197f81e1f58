"""Arguments, calls and operators of emitted code as text."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch.fx as fx

from rose_compiler.base.errors import RoseError
from rose_compiler.ir import functions
from rose_compiler.ir.dump_expr import INFIX, PREFIX, constant

References = Mapping[fx.Node, str]
#: Gives a name to an object that has no text: it is put into the namespace of the module.
Bind = Callable[[Any, str], str]

_FUNCTIONAL = "torch.nn.functional."


class Printer:
    """Prints values and calls. What has no text is bound to a name."""

    def __init__(self, bind: Bind) -> None:
        self.bind = bind

    def value(self, item: Any, refs: References) -> str:
        """An argument: a node by its reference, containers item by item, constants as text."""
        if isinstance(item, fx.Node):
            return refs[item]
        if type(item) is tuple:
            inner = ", ".join(self.value(i, refs) for i in item)
            return f"({inner},)" if len(item) == 1 else f"({inner})"
        if isinstance(item, list):
            return f"[{', '.join(self.value(i, refs) for i in item)}]"
        if isinstance(item, dict):
            pairs = (f"{self.value(k, refs)}: {self.value(v, refs)}" for k, v in item.items())
            return f"{{{', '.join(pairs)}}}"
        if isinstance(item, slice):
            ends = (item.start, item.stop, item.step)
            return f"slice({', '.join(self.value(i, refs) for i in ends)})"
        if isinstance(item, tuple) and hasattr(item, "numel"):  # torch.Size
            return self.value(tuple(item), refs)
        try:
            return constant(item)
        except RoseError:
            return self.bind(item, type(item).__name__.lower())

    def arguments(self, args: Any, kwargs: Mapping[str, Any], refs: References) -> str:
        parts = [self.value(a, refs) for a in args]
        parts += [f"{k}={self.value(v, refs)}" for k, v in kwargs.items()]
        return ", ".join(parts)

    def index(self, item: Any, refs: References) -> str:
        """What stands in square brackets."""
        if isinstance(item, slice):
            ends = (item.start, item.stop, item.step)
            start, stop, step = ("" if e is None else self.value(e, refs) for e in ends)
            return f"{start}:{stop}" + (f":{step}" if step else "")
        if type(item) is tuple and item:
            inner = ", ".join(self.index(i, refs) for i in item)
            return inner + ("," if len(item) == 1 else "")
        return self.value(item, refs)

    def function(self, target: Any) -> str:
        """The name of a plain function."""
        name = functions.name_of(target)
        if name is None or name.startswith("rose_compiler."):
            return self.bind(target, getattr(target, "__name__", "function"))
        if name.startswith(_FUNCTIONAL):
            return "F." + name.removeprefix(_FUNCTIONAL)
        if name.startswith(("operator.", "math.")):
            return self.bind(target, name.partition(".")[2])
        return name

    def plain(self, node: fx.Node, refs: References) -> str:
        """A call of something that is no operation: an operator, a torch function or a method."""
        args, kwargs, target = node.args, node.kwargs, node.target
        if node.op == "call_method":
            owner = self._primary(args[0], refs)
            return f"{owner}.{target}({self.arguments(args[1:], kwargs, refs)})"
        if not kwargs and len(args) == 2 and target in INFIX:
            left, right = (self._operand(a, refs) for a in args)
            return f"{left} {INFIX[target]} {right}"
        if not kwargs and len(args) == 1 and target in PREFIX:
            return f"{PREFIX[target]}{self._operand(args[0], refs)}"
        if target is operator.getitem and len(args) == 2:
            return f"{self._primary(args[0], refs)}[{self.index(args[1], refs)}]"
        if target is getattr and len(args) == 2 and str(args[1]).isidentifier():
            return f"{self._primary(args[0], refs)}.{args[1]}"
        name = self.function(target)
        if name.startswith("torch.Tensor.") and args and isinstance(args[0], fx.Node):
            owner, method = refs[args[0]], name.removeprefix("torch.Tensor.")
            if not method.startswith("__"):
                return f"{owner}.{method}({self.arguments(args[1:], kwargs, refs)})"
        return f"{name}({self.arguments(args, kwargs, refs)})"

    def _operand(self, item: Any, refs: References) -> str:
        text = self.value(item, refs)
        return text if _simple(text) else f"({text})"

    def _primary(self, item: Any, refs: References) -> str:
        text = self.value(item, refs)
        return text if _simple(text) and not text[0].isdigit() else f"({text})"


def quoted(text: str) -> str:
    """A string as emitted code writes it."""
    return constant(text)


def _simple(text: str) -> bool:
    return text.replace(".", "_").isidentifier() or text.replace(".", "").isdecimal()
