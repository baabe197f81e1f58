"""What counts as a component, and what its author declared about it."""

from __future__ import annotations

import inspect
import re
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

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


_DECLARED: dict[types.FunctionType, Declaration] = {}
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
    """
    function = plain(target)
    if function is None:
        raise fail("declare-target", f"{target!r} is no Python function")
    code = function.__code__
    where = SourceLocation(code.co_filename, code.co_firstlineno)
    called = function.__qualname__
    names = set(inspect.signature(function).parameters)
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
    kind: str, entry: str, called: str, names: set[str], where: SourceLocation
) -> None:
    try:
        parsed = parse_entry(entry)
    except (ValueError, TypeError, AttributeError):
        raise fail("declare-syntax", f"{kind} entry {entry!r} of {called}", where=where) from None
    if parsed.root not in names and not _PROCESS.fullmatch(parsed.root):
        raise _unknown(kind, entry, called, names, parsed.root, where)


def _unknown(
    kind: str, entry: str, called: str, names: set[str], found: str, where: SourceLocation
) -> RoseError:
    return fail(
        "declare-unknown-name",
        f"{kind} entry {entry!r} of {called} names no parameter",
        where=where,
        expected=", ".join(sorted(names)),
        found=found,
    )


def declared(target: Any) -> Declaration | None:
    """The declaration of a callable, if there is one."""
    function = plain(target)
    if function is None:
        return None
    return _DECLARED.get(function) or _DECLARED.get(undecorated(function)[0])


def function_of(declaration: Any) -> types.FunctionType | None:
    """The function that a declaration was made for."""
    return next((f for f, d in _DECLARED.items() if d is declaration), None)


def parameters(target: Any) -> list[str]:
    """The names of the parameters that a call of a function or bound method can pass."""
    return list(inspect.signature(target).parameters)


def plain(target: Any) -> types.FunctionType | None:
    """The Python function behind a function or a bound method."""
    if isinstance(target, types.MethodType):
        target = target.__func__
    return target if isinstance(target, types.FunctionType) else None


def is_simulator(value: Any) -> bool:
    """Whether an object advances a simulation through ``step``: a gymnasium environment or vector
    environment, EnvPool, or an object with ``shards()`` that declares none of its own."""
    gym = sys.modules.get("gymnasium")
    if gym is not None:
        kinds = (gym.Env, gym.vector.VectorEnv) if hasattr(gym, "vector") else (gym.Env,)
        if isinstance(value, kinds):
            return not getattr(type(value), "rose_inline", False)
    module = type(value).__module__ or ""
    if module.startswith("envpool") or (
        hasattr(value, "recv") and hasattr(value, "send") and hasattr(value, "step")
    ):
        return True
    return callable(getattr(value, "shards", None)) and callable(getattr(value, "step", None))


def simulator_of_step(target: Any) -> Any:
    """The simulator whose ``step`` a callable is, or ``None``."""
    if getattr(target, "__name__", "") != "step":
        return None
    owner = getattr(target, "__self__", None)
    return owner if owner is not None and is_simulator(owner) else None


def is_component(value: Any) -> bool:
    """Whether an object is a policy, simulator or trainer."""
    return isinstance(value, (torch.nn.Module, torch.optim.Optimizer)) or is_simulator(value)


def is_component_call(target: Any) -> bool:
    """Whether calling ``target`` calls a policy, simulator or trainer."""
    if is_component(target):
        return True
    owner = getattr(target, "__self__", None)
    return owner is not None and is_component(owner)
