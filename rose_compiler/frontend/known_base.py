"""The vocabulary of the tables of known callables: effects in terms of a call, and the registry.

See :mod:`rose_compiler.frontend.known` for what places are and how the tables are asked.
"""

from __future__ import annotations

import os
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np


@dataclass(frozen=True)
class KnownEffects:
    """What one call reads and writes, and what its result may share memory with.

    ``reads`` and ``writes`` are places; every argument is read besides. ``alias`` names places that
    the result may share memory with, or hold a reference to; empty means that the result owns its
    memory. ``retains`` names arguments that the receiver keeps a reference to after the call.
    ``kind`` is "" or what the call means to a training loop: "step" (of a simulator), "reset",
    "module", "optimizer", "backward", "draw", "log" (only host output), "clock", "copy" (of a
    module or an optimizer, whole). ``host_read`` says
    that a Python value is made from a tensor's data, so an asynchronous device is waited for.
    ``if_traced`` marks the call of a module whose forward is the user's own code: the effects hold
    only if :func:`rose_compiler.frontend.trace.trace` accepts the call, otherwise nothing is known.
    ``may_raise`` is False only where valid arguments of the types seen can't fail.
    """

    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    alias: tuple[str, ...] = ()
    retains: tuple[str, ...] = ()
    kind: str = ""
    host_read: bool = False
    if_traced: bool = False
    may_raise: bool = True

    @property
    def pure(self) -> bool:
        """Whether nothing is written and no process-wide state is read."""
        return not self.writes and not any(":" in r or r == "host" for r in self.reads)


@dataclass(frozen=True)
class CallShape:
    """The arguments of a call as far as they are known: their types, and the live receiver."""

    positional: tuple[type | None, ...] = ()
    keywords: Mapping[str, type | None] = field(default_factory=dict)
    receiver: Any = None

    def args(self) -> tuple[str, ...]:
        """The places of all arguments."""
        return (
            *(f"arg{i}" for i in range(len(self.positional))),
            *(f"kw_{name}" for name in self.keywords),
        )

    def memory(self) -> tuple[str, ...]:
        """The places of the arguments that may hold mutable memory."""
        known = [*self.positional, *self.keywords.values()]
        return tuple(p for p, t in zip(self.args(), known, strict=True) if not is_scalar_type(t))

    def type_of(self, place: str) -> type | None:
        """The type of the argument at a place."""
        known = [*self.positional, *self.keywords.values()]
        return dict(zip(self.args(), known, strict=True))[place]

    def given(self, position: int, name: str) -> str | None:
        """The place of an argument passed by position or by name; ``None`` if it isn't passed."""
        if position < len(self.positional):
            return f"arg{position}"
        return f"kw_{name}" if name in self.keywords else None


Answer = KnownEffects | None
Rule = Callable[[CallShape], Answer]


def split_place(place: str) -> tuple[str, str]:
    """A place as ``(root, part)``: ``"self#grads"`` is ``("self", "grads")``."""
    root, _, part = place.partition("#")
    return root, part


PURE = KnownEffects()
HOST_READ = KnownEffects(reads=("host",))
HOST_WRITE = KnownEffects(reads=("host",), writes=("host",))
DRAW = KnownEffects(reads=("rng:torch",), writes=("rng:torch",), kind="draw")


def through_file(position: int, name: str, effects: KnownEffects) -> Rule:
    """The rule of what reads or writes a file: one that is open, and may lie in memory, has another
    content or position then. What is named by text or a path belongs to the host alone."""
    return lambda call: with_file(effects, call, call.given(position, name))


def with_file(effects: KnownEffects, call: CallShape, place: str | None) -> KnownEffects:
    """``effects``, and those on the file at a place, if one is passed that may be open."""
    found = None if place is None else call.type_of(place)
    if place is None or (found is not None and issubclass(found, _NAMES_OF_FILES)):
        return effects
    return replace(effects, reads=(*effects.reads, place), writes=(*effects.writes, place))


_NAMES_OF_FILES = (str, bytes, os.PathLike, type(None))


def always(effects: KnownEffects) -> Rule:
    """The rule that answers ``effects`` whatever the arguments are."""
    return lambda call: effects


def aliases_arguments(call: CallShape) -> KnownEffects:
    """Pure; the result may hold or share memory with any argument."""
    return KnownEffects(alias=call.memory())


def with_out(base: KnownEffects, call: CallShape) -> KnownEffects:
    """``base``, and a write of the ``out=`` argument where one is passed."""
    if "out" not in call.keywords or call.keywords["out"] is type(None):
        return base
    return replace(base, writes=(*base.writes, "kw_out"), alias=("kw_out",))


# Filled by the tables below: callables by identity, methods by type and name.
CALLABLES: dict[int, tuple[Any, Rule]] = {}
METHODS: dict[tuple[type, str], Rule] = {}
#: asked in order for callables (or types and method names) that are in neither table
CALLABLE_RULES: list[Callable[[Any, CallShape], Answer]] = []
METHOD_RULES: list[Callable[[type, str, Any, CallShape], Answer]] = []


def register_callable(obj: Any, rule: Rule | KnownEffects) -> None:
    """Enter a function or class; a later entry replaces an earlier one."""
    CALLABLES[id(obj)] = (obj, always(rule) if isinstance(rule, KnownEffects) else rule)


def register_methods(owner: type, names: Iterable[str], rule: Rule | KnownEffects) -> None:
    """Enter methods of a type, by the function objects that ``owner`` itself resolves them to."""
    fixed = always(rule) if isinstance(rule, KnownEffects) else rule
    for name in names:
        if hasattr(owner, name):
            METHODS[owner, name] = fixed


def register_callable_rule(rule: Callable[[Any, CallShape], Answer]) -> None:
    """Add a rule that is asked about callables in no table."""
    CALLABLE_RULES.append(rule)


def register_method_rule(rule: Callable[[type, str, Any, CallShape], Answer]) -> None:
    """Add a rule that is asked about methods in no table: (type, name, resolved function, call)."""
    METHOD_RULES.append(rule)


def shifted(effects: KnownEffects, by: int = 1) -> KnownEffects:
    """The effects of a method as those of the function that takes its receiver as ``arg0``."""

    def move(place: str) -> str:
        root, part = split_place(place)
        if root == "self":
            root = "arg0"
        elif root.startswith("arg") and root[3:].isdigit():
            root = f"arg{int(root[3:]) + by}"
        return f"{root}#{part}" if part else root

    return replace(
        effects,
        reads=tuple(map(move, effects.reads)),
        writes=tuple(map(move, effects.writes)),
        alias=tuple(map(move, effects.alias)),
        retains=tuple(map(move, effects.retains)),
    )


def is_scalar_type(owner: type | None) -> bool:
    """Whether values of the type are immutable numbers or text."""
    return owner is not None and issubclass(
        owner, int | float | complex | bool | str | bytes | np.generic | type(None)
    )


def defined_in(obj: Any, packages: tuple[str, ...]) -> bool:
    """Whether a class, or the function at the bottom of torch's own wrappers, is from a package.

    A function is judged by the globals it runs in: ``functools.wraps`` copies ``__module__`` onto
    any wrapper. Torch wraps an optimizer's methods, the user's overrides of them too, so everything
    that is wrapped counts.
    """
    if isinstance(obj, type):
        return _inside(obj.__module__, packages)
    function: Any = obj
    while True:
        if isinstance(function, types.MethodType):
            function = function.__func__
        if isinstance(function, types.FunctionType):
            module = str(function.__globals__.get("__name__"))
        else:
            module = getattr(function, "__module__", None) or ""
        inner = getattr(function, "__wrapped__", None)
        if inner is None:
            return _inside(module, packages)
        if not _inside(module, (*packages, "torch")):
            return False
        function = inner


def _inside(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == p or module.startswith(p + ".") for p in packages)
