"""Whether statements may put another tensor in the place of a parameter or buffer."""

from __future__ import annotations

import ast
import dis
import inspect
from collections.abc import Mapping
from itertools import pairwise
from types import FunctionType
from typing import Any

import numpy as np
import torch

from rose_compiler.ir.ops import Op

#: Functions and methods that rebind nothing, beside those of tensors that end in ``_``.
_HARMLESS = frozenset(
    (
        *("zip", "enumerate", "range", "len", "list", "tuple", "float", "int", "min", "max"),
        *("parameters", "named_parameters", "buffers", "named_buffers", "state_dict", "values"),
        *("items", "modules", "children", "no_grad", "lerp", "mul", "add", "sub", "div", "detach"),
        *("clone", "view", "reshape", "pow", "sqrt", "clamp", "mean", "sum", "std", "var"),
        *("zero_grad", "item", "is_floating_point", "_foreach_lerp_", "_foreach_mul_"),
        *("_foreach_add_", "_foreach_copy_", "load_state_dict"),
    )
)

#: What sets an attribute or a global, or calls what is no global function and no method by name.
_SETTING = frozenset(
    (
        *("STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL", "IMPORT_NAME"),
        *("PUSH_NULL", "CALL_FUNCTION_EX"),
    )
)
#: What puts something in the place of an item, or into a tensor.
_STORING = frozenset(("STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE"))
_METHODS = frozenset(("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"))
_HARMLESS_METHODS = frozenset(("items", "keys", "values", "get", "split"))
#: Methods that change which items a list has: of one that the function makes they do no harm.
_ADDING = frozenset(("append", "extend"))
_HARMLESS_BUILTINS = frozenset(
    (
        *("abs", "all", "any", "bool", "dict", "divmod", "enumerate", "float", "int", "len"),
        *("list", "max", "min", "pow", "range", "reversed", "round", "set", "sorted", "str"),
        *("sum", "tuple", "zip", "ValueError", "AssertionError"),
    )
)


def writes_in_place(op: Op, *, items: bool = False) -> bool:
    """Whether all that a block writes to tensors it writes into them: none takes another's place.

    ``x.data = y`` gives a parameter other memory and leaves it the parameter that it is. With
    ``items``, what stores to items (``x[t] = y``) counts: where ``x`` is a tensor, it stays so.
    """
    statements = op.attributes.get("stmts")
    if op.kind != "block" or not statements:
        return False
    known = op.attributes.get("globals") or {}
    parts = [part for s in statements for part in ast.walk(s)]
    if items:
        parts = [p for p in parts if not isinstance(p, ast.Subscript)]
    return all(_harmless(part, known, items) for part in parts)


def _harmless(part: ast.AST, known: Mapping[str, Any], items: bool) -> bool:
    if isinstance(part, ast.Call):
        name = _name(part.func)
        assigns = any(k.arg == "assign" for k in part.keywords)
        in_place = name.endswith("_") and not name.endswith("__")
        if assigns:
            return False
        return in_place or name in _HARMLESS or _is_known(part.func, known, items)
    if isinstance(part, ast.Attribute) and not isinstance(part.ctx, ast.Load):
        return part.attr == "data"
    if isinstance(part, ast.Subscript) and not isinstance(part.ctx, ast.Load):
        return False
    return not isinstance(
        part, ast.Lambda | ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom | ast.Await
    )


def _is_known(function: ast.expr, known: Mapping[str, Any], items: bool) -> bool:
    """Whether a function is one of torch or numpy by its module, or one of the user's whose code,
    and that of all it calls, sets no attribute, no item unless ``items`` may be, and calls no
    method that could."""
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        return known.get(function.value.id) in (torch, np)
    if not isinstance(function, ast.Name):
        return False
    setting = _SETTING if items else _SETTING | _STORING
    return _sets_nothing(known.get(function.id), setting, set())


def _sets_nothing(function: Any, setting: frozenset[str], seen: set[Any]) -> bool:
    if not isinstance(function, FunctionType) or function.__closure__:
        return False
    if function in seen:
        return True
    seen.add(function)
    if any(hasattr(constant, "co_code") for constant in function.__code__.co_consts):
        return False  # a function of its own, whose code is not looked at
    steps = list(dis.get_instructions(function))
    made = _lists_made(function, steps)
    for before, step in pairwise(steps):  # the first only begins the function
        if step.opname in setting:
            return False
        if step.opname in _METHODS and step.argval not in _HARMLESS_METHODS:
            own = before.opname.startswith("LOAD_FAST") and before.argval in made
            if step.argval not in _ADDING or not own:
                return False
        if step.opname == "LOAD_GLOBAL" and not _may_be_read(step.argval, function, setting, seen):
            return False
    return True


def _lists_made(function: FunctionType, steps: list[dis.Instruction]) -> set[str]:
    """The local variables that are never anything but a new list, empty at first."""
    code = function.__code__
    starred = (inspect.CO_VARARGS, inspect.CO_VARKEYWORDS)
    count = (
        code.co_argcount + code.co_kwonlyargcount + sum(bool(code.co_flags & f) for f in starred)
    )
    made: set[str] = set()
    others = set(code.co_varnames[:count])
    for before, step in pairwise(steps):
        if "STORE_FAST" in step.opname:
            new = step.opname == "STORE_FAST" and (before.opname, before.arg) == ("BUILD_LIST", 0)
            named = (step.argval,) if isinstance(step.argval, str) else step.argval
            (made if new else others).update(named)
    return made - others


def _may_be_read(
    name: str, function: FunctionType, setting: frozenset[str], seen: set[Any]
) -> bool:
    if name not in function.__globals__:
        return name in _HARMLESS_BUILTINS
    found = function.__globals__[name]
    plain = isinstance(found, int | float | str | tuple | list | dict)
    return plain or _sets_nothing(found, setting, seen)


def _name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else "?"
