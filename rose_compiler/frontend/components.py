"""What counts as a component, and what its author declared about it."""

from __future__ import annotations

import inspect
import re
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rose_compiler.base.errors import RoseError, SourceLocation, fail
from rose_compiler.frontend.modes import undecorated
from rose_compiler.ir.effects import parse_entry


@dataclass(frozen=True)
class Declaration:
    """Declared effects of a function or method; entries are rooted at its parameter names."""

    reads: tuple[str, ...] | None
    writes: tuple[str, ...] | None
    batch: tuple[tuple[str, int], ...] | None

    def __str__(self) -> str:
        """The arguments of ``component`` that it was made from."""
        given = {
            "reads": None if self.reads is None else list(self.reads),
            "writes": None if self.writes is None else list(self.writes),
            "batch": None if self.batch is None else dict(self.batch),
        }
        return ", ".join(f"{k}={v!r}" for k, v in given.items() if v is not None) or "no arguments"


_DECLARED: dict[Any, Declaration] = {}
#: A call of a component in a host of its own: what it is given travels there as it is now, and
#: nothing but the component changes. The other entries are those of the call (``declared_call``).
HOSTED = Declaration(("self",), ("self",), None)
_C_KINDS = (
    *(types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType),
    *(types.MethodWrapperType, types.ClassMethodDescriptorType, np.ufunc),
)
_POSITION = re.compile(r"arg\d+")
_PROCESS = re.compile(r"rng:[A-Za-z_]+|host|\*")
_BATCH = re.compile(r"return(\.\d+)?")


def record(
    target: Callable[..., Any],
    reads: Iterable[str] | None = None,
    writes: Iterable[str] | None = None,
    batch: Mapping[str, int] | None = None,
) -> None:
    """Remember what a function declares.

    Raises:
        DeclarationError: for what is no function, a malformed entry, one that names no parameter of
            the function, or a second declaration that differs from the first.

    Parameters of a function that is not written in Python are named by its signature where it has
    one, and ``arg0``, ``arg1`` and so on in any case; the receiver of a method is ``self``.
    """
    function = _key(target)
    if function is None:
        raise fail("declare-target", f"{target!r} is no function or method")
    code = getattr(function, "__code__", None)
    where = None if code is None else SourceLocation(code.co_filename, code.co_firstlineno)
    called = getattr(function, "__qualname__", function.__name__)
    names = set(signature_names(function))
    kept: dict[str, tuple[str, ...] | None] = {"reads": None, "writes": None}
    for kind, entries in (("reads", reads), ("writes", writes)):
        if entries is None:
            continue
        if isinstance(entries, str):
            what = f"{kind}={entries!r} of {called} is one text"
            raise fail("declare-syntax", what, where=where, expected="a list of entries")
        kept[kind] = tuple(entries)
        for entry in kept[kind] or ():
            _check_entry(kind, entry, called, names, where)
    for name, axis in (batch or {}).items():
        if name not in names and not _BATCH.fullmatch(name):
            raise _unknown("batch", name, called, names, name, where)
        if type(axis) is not int:
            what = f"batch={{{name!r}: {axis!r}}} of {called}"
            raise fail("declare-syntax", what, where=where, expected="the number of an axis")
    made = Declaration(
        kept["reads"], kept["writes"], None if batch is None else tuple(sorted(batch.items()))
    )
    if _DECLARED.setdefault(function, made) != made:
        raise fail(
            "declare-conflict",
            f"{called} is declared a second time, differently",
            where=where,
            expected=str(_DECLARED[function]),
            found=str(made),
        )


def _check_entry(
    kind: str, entry: str, called: str, names: set[str], where: SourceLocation | None
) -> None:
    try:
        parsed = parse_entry(entry)
    except (ValueError, TypeError, AttributeError):
        raise fail("declare-syntax", f"{kind} entry {entry!r} of {called}", where=where) from None
    position = where is None and _POSITION.fullmatch(parsed.root)
    if parsed.root not in names and not position and not _PROCESS.fullmatch(parsed.root):
        raise _unknown(kind, entry, called, names, parsed.root, where)


def _unknown(
    kind: str, entry: str, called: str, names: set[str], found: str, where: SourceLocation | None
) -> RoseError:
    return fail(
        "declare-unknown-name",
        f"{kind} entry {entry!r} of {called} names no parameter",
        where=where,
        expected=", ".join(sorted(names)),
        found=found,
    )


def is_hosted(value: Any) -> bool:
    """Whether an object stands for a component that lives in a host of its own."""
    return getattr(type(value), "rose_hosted", False) is True


def is_hosted_call(target: Any) -> bool:
    """Whether a callable is a method of a component in a host, or that component itself."""
    if is_hosted(target):
        return True
    function = getattr(target, "__func__", None)
    return getattr(function, "__rose_hosted__", False) is True and is_hosted(target.__self__)


def declared(target: Any) -> Declaration | None:
    """The declaration of a callable, if there is one."""
    if is_hosted_call(target):
        return HOSTED
    function = _key(target) if _DECLARED else None
    if function is None:
        return None
    found = _DECLARED.get(function)
    if found is None and isinstance(function, types.FunctionType):
        found = _DECLARED.get(undecorated(function)[0])
    return found


def _key(target: Any) -> Any:
    """What declarations are kept by: the Python function, or the C function or descriptor that a
    builtin method is bound from; ``None`` for what is neither."""
    function = plain(target)
    if function is not None:
        return function
    if not isinstance(target, _C_KINDS):
        return None
    owner = getattr(target, "__self__", None)
    if isinstance(target, np.ufunc) or owner is None or isinstance(owner, types.ModuleType):
        return target
    found = inspect.getattr_static(
        owner if isinstance(owner, type) else type(owner), target.__name__, None
    )
    return found if isinstance(found, _C_KINDS) else target


def signature_names(function: Any) -> list[str]:
    """The names of a function's parameters; positions for a C function that does not tell them."""
    try:
        return list(inspect.signature(function).parameters)
    except (ValueError, TypeError):
        methods = (types.MethodDescriptorType, types.WrapperDescriptorType)
        first = ["self"] if isinstance(function, methods) else []
        return [*first, *(f"arg{k}" for k in range(_MANY))]


_MANY = 16


def declared_names(target: Any) -> list[str]:
    """The names of all parameters of a declared callable, its receiver's included."""
    return signature_names(_key(target))


def function_of(declaration: Any) -> types.FunctionType | None:
    """The function that a declaration was made for."""
    return next((f for f, d in _DECLARED.items() if d is declaration), None)


def parameters(target: Any) -> list[str]:
    """The names of the parameters that a call of a function or bound method can pass."""
    if is_hosted_call(target):
        return []  # what the component takes is known in its host
    if plain(target) is not None:
        return list(inspect.signature(target).parameters)
    names = declared_names(target)
    return names[1:] if names[:1] == ["self"] else names


def plain(target: Any) -> types.FunctionType | None:
    """The Python function behind a function or a bound method."""
    if isinstance(target, types.MethodType):
        target = target.__func__
    return target if isinstance(target, types.FunctionType) else None


def is_simulator(value: Any) -> bool:
    """Whether an object advances a simulation through ``step``: a gymnasium environment or vector
    environment, EnvPool, or an object with ``shards()`` that declares none of its own."""
    if is_hosted(value):
        return False  # it would answer to every name
    gym = sys.modules.get("gymnasium")
    if gym is not None:
        kinds = (gym.Env, gym.vector.VectorEnv) if hasattr(gym, "vector") else (gym.Env,)
        if isinstance(value, kinds):
            return not getattr(type(value), "rose_inline", False)
    module = type(value).__module__ or ""
    if module.startswith("envpool") or all(_has(value, n) for n in ("recv", "send", "step")):
        return True
    return _has(value, "shards") and _has(value, "step")


def _has(value: Any, name: str) -> bool:
    """Whether an object has a method of this name. A class of the user's may answer to any name, or
    raise whatever it likes for one that it does not know."""
    try:
        return callable(getattr(value, name, None))
    except Exception:
        return False


def simulator_of_step(target: Any) -> Any:
    """The simulator whose ``step`` a callable is, or ``None``."""
    if getattr(target, "__name__", "") != "step":
        return None
    owner = getattr(target, "__self__", None)
    return owner if owner is not None and is_simulator(owner) else None


def is_component(value: Any) -> bool:
    """Whether an object is a policy, simulator or trainer."""
    if is_hosted(value):
        return True
    return isinstance(value, (torch.nn.Module, torch.optim.Optimizer)) or is_simulator(value)


def is_component_call(target: Any) -> bool:
    """Whether calling ``target`` calls a policy, simulator or trainer."""
    if is_component(target):
        return True
    owner = getattr(target, "__self__", None)
    return owner is not None and is_component(owner)
