"""Source of a function -> loop-nested program.

What is seen at capture: the source, and the live objects that the arguments, globals and closures
are. What is not: types of computed values; those come from the first trip, which runs this program
in program order.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import keyword
import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from rose_compiler.base.errors import fail
from rose_compiler.frontend import components, liveness, refuse, rewrite_ast, source
from rose_compiler.frontend.assigning import find_changes
from rose_compiler.frontend.lowering import Lowering
from rose_compiler.frontend.scalar import is_scalar
from rose_compiler.frontend.scope import Scope, Session
from rose_compiler.frontend.source import FunctionSource
from rose_compiler.ir.program import Program


@dataclass
class Captured:
    """A captured function.

    ``folded`` holds the configuration that was taken for constant (path to value seen) and
    ``rebindable`` how to read each global or closure name again; guards compare both.
    ``values`` names the parameters that stay values, in order.
    """

    program: Program
    source: FunctionSource
    signature: inspect.Signature
    session: Session
    values: tuple[str, ...]
    argument_states: dict[str, str] = field(default_factory=dict)  # parameter -> state root


def capture(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Captured:
    """Capture one function for one set of arguments.

    Args:
        fn: a function, bound method or closure.
        args, kwargs: the arguments of the call at hand; their live objects become states.

    Raises:
        CaptureError: for a construct that can't be compiled soundly, with the way out.
        TypeError: when the arguments do not fit the function.
    """
    function = source.read(fn)
    signature = inspect.signature(function.fn)
    given = (function.bound, *args) if function.bound is not None else args
    bound = signature.bind(*given, **kwargs)
    bound.apply_defaults()
    session = Session(find_changes(function, bound.arguments))
    lowering = Lowering(session)
    scope = Scope(function, session)
    scope.locals = set(liveness.assigned(function.node.body)) | set(bound.arguments)
    scope.locals.add(rewrite_ast.RETURN_NAME)
    rebound = _rebound(function.node)
    values = [name for name, v in bound.arguments.items() if _is_value(v, rebound.get(name))]
    for name in values:
        scope.bindings[name] = lowering.root.placeholder(name, "value")
        if type(bound.arguments[name]) is int and name not in rebound:
            session.integers.add(scope.bindings[name].name)
    objects = {
        name: value
        for name, value in bound.arguments.items()
        if name not in values and not is_scalar(value)
    }
    session.arguments({_root(n, v, bound.arguments): v for n, v in objects.items()})
    argument_states: dict[str, str] = {}
    for name, value in bound.arguments.items():
        if name in objects:
            static = scope.bindings[name] = session.root(name, value)
            argument_states[name] = static.root
        elif name not in values:
            session.folded[f"<argument>.{name}"] = value
            scope.bindings[name] = value
    refuse.check(function, scope.resolve, scope.resolves_to_component)
    scope.source = function = lowering.prepared(function, scope)
    body = rewrite_ast.single_exit(function.node.body)
    if body is None:
        raise fail(
            "capture-unsupported",
            "`return` inside `try` or `with`",
            where=function.where(function.node),
            help="assign the result and return it at the end of the function",
        )
    lowering.inlining.append(function.fn.__code__)
    lowering.contexts = lowering.entering(function.contexts)
    result = lowering.inlined_body(body, scope, lowering.root)
    root = lowering.root.finish(_returned(result, scope, lowering))
    program = Program(
        function.node.name,
        root,
        lowering.ops,
        tuple(values),
        tuple(session.roots),
        objects=dict(session.roots),
    )
    return Captured(program, function, signature, session, tuple(values), argument_states)


def _root(name: str, value: Any, arguments: dict[str, Any]) -> str:
    """The name of an argument's state: its own, but the class's for ``self``, which a graph's
    placeholder can't be called."""
    if name != "self":
        return name
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(value).__name__).lower()
    while name in arguments or keyword.iskeyword(name) or hasattr(builtins, name):
        name = f"{name}_"
    return name


def _returned(binding: Any, scope: Scope, lowering: Lowering) -> Any:
    """The output of the root graph: one value, or a tuple of values kept apart."""
    if isinstance(binding, tuple):
        return tuple(_returned(b, scope, lowering) for b in binding)
    return lowering.as_output(binding, scope, lowering.root)


def _rebound(node: ast.FunctionDef) -> dict[str, bool]:
    """Names that the function assigns; true where one of the assignments may be left out or
    repeated."""
    found: dict[str, bool] = {}
    for statement in node.body:
        plain = isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign))
        for name in liveness.assigned(statement):
            found[name] = found.get(name, False) or not plain
    return found


def _is_value(value: Any, rebound: bool | None) -> bool:
    """Whether an argument is a value rather than a state: numbers, and what is assigned anew."""
    if type(value) in (int, float, complex):
        return True
    if rebound is None or isinstance(value, (bool, str, bytes)):
        return rebound is not None and bool(rebound)
    if isinstance(value, (torch.Tensor, np.ndarray, type(None), tuple)):
        return True
    return rebound and not components.is_component(value)
