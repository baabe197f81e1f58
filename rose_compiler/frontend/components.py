"""What counts as a component, and what its author declared about it."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rose_compiler.base.errors import fail
from rose_compiler.frontend.modes import undecorated
from rose_compiler.ir.effects import parse_entry


@dataclass(frozen=True)
class Declaration:
    """Declared effects of a function or method; entries are rooted at its parameter names."""

    reads: tuple[str, ...] | None
    writes: tuple[str, ...] | None
    batch: tuple[tuple[str, int], ...] | None


_DECLARED: dict[types.FunctionType, Declaration] = {}


def record(
    target: Callable[..., Any],
    reads: Any = None,
    writes: Any = None,
    batch: Mapping[str, int] | None = None,
) -> None:
    """Remember what a function declares.

    Raises:
        DeclarationError: for a malformed entry, or one that names no parameter of the function.
    """
    function = plain(target)
    if function is None:
        raise fail("declare-syntax", f"{target!r} is no Python function; declare effects of one")
    names = set(
        function.__code__.co_varnames[
            : function.__code__.co_argcount + function.__code__.co_kwonlyargcount
        ]
    )
    for kind, entries in (("reads", reads), ("writes", writes)):
        for entry in entries or ():
            try:
                parsed = parse_entry(entry)
            except (ValueError, TypeError):
                raise fail(
                    "declare-syntax", f"{kind}={entry!r} of {function.__qualname__}"
                ) from None
            if (
                parsed.root not in names
                and not parsed.root.startswith("rng:")
                and parsed.root not in ("host", "*")
            ):
                raise fail(
                    "declare-unknown-name",
                    f"{kind}={entry!r} of {function.__qualname__} names no parameter",
                    expected=", ".join(sorted(names)),
                    found=parsed.root,
                )
    _DECLARED[function] = Declaration(
        None if reads is None else tuple(reads),
        None if writes is None else tuple(writes),
        None if batch is None else tuple(sorted(batch.items())),
    )


def declared(target: Any) -> Declaration | None:
    """The declaration of a callable, if there is one."""
    function = plain(target)
    if function is None:
        return None
    return _DECLARED.get(function) or _DECLARED.get(undecorated(function)[0])


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


def is_trainer_call(target: Any) -> bool:
    """Whether a callable is an optimizer's ``step``."""
    owner = getattr(target, "__self__", None)
    return isinstance(owner, torch.optim.Optimizer) and getattr(target, "__name__", "") in (
        "step",
        "zero_grad",
    )


def is_component(value: Any) -> bool:
    """Whether an object is a policy, simulator or trainer."""
    return isinstance(value, (torch.nn.Module, torch.optim.Optimizer)) or is_simulator(value)


def is_component_call(target: Any) -> bool:
    """Whether calling ``target`` calls a policy, simulator or trainer."""
    if is_component(target):
        return True
    owner = getattr(target, "__self__", None)
    return owner is not None and is_component(owner)
