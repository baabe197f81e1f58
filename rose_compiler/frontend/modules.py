"""Modules as guards see them: what must stay as it was for traced code to be right.

A module's class, mode, hooks, ``forward`` and the numbers that its methods may read are compared,
of it and of those inside. Parameters and buffers are states, and no part of this.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterator
from typing import Any

import torch

from rose_compiler.frontend.scalar import is_scalar

State = tuple[tuple[Any, ...], ...]


class Watched:
    """A module and how it was when :meth:`look` was called last.

    ``living`` modules have methods that assign attributes: they may change in a call by themselves.
    """

    def __init__(self, name: str, module: torch.nn.Module) -> None:
        self.name = name
        self.module = module
        kinds: set[Any] = {type(inner) for inner in module.modules()}
        self.living = any(map(_written_by, kinds))
        self.look()

    def look(self) -> None:
        """Take the module for how it is now."""
        self.state = state_of(self.module)
        self._parts = [_Part(m, s) for m, s in zip(self.module.modules(), self.state, strict=True)]

    def unchanged(self) -> bool:
        """Whether surely nothing changed. False is no certainty: ask :meth:`difference` then."""
        for part in self._parts:
            own = part.own
            if (
                part.module.__class__ is not part.kind
                or part.module.training is not part.training  # no attribute of its own in some
                or part.kind.forward is not part.forward
                or part.special
                or "forward" in own
                or own["_forward_hooks"]
                or own["_forward_pre_hooks"]
                or own["_backward_hooks"]
                or (own["_modules"] and tuple(own["_modules"].values()) != part.children)
            ):
                return False
            for key, value in part.numbers:
                if own.get(key) is not value:
                    return False
        return True

    def settle(self) -> None:
        """Take the numbers of the module for how a call left them, and all of one that is living:
        only what else changed, or changes between calls, is a change."""
        if self.living:
            self.look()
        elif not self.unchanged():
            found = state_of(self.module)
            if [part[:-1] for part in found] == [part[:-1] for part in self.state]:
                self.look()

    def difference(self, module: torch.nn.Module) -> str | None:
        """What differs in ``module``, the watched one or another in its place, in words."""
        found = state_of(module)
        if found != self.state:
            return difference(self.name, self.state, found)
        if module is self.module:
            self.look()  # others of the same make may stand inside
        return None


class _Part:
    """One of the modules inside, as a quick comparison wants it."""

    __slots__ = (
        *("children", "forward", "kind", "module", "numbers", "own", "special", "training"),
    )

    def __init__(self, module: torch.nn.Module, state: tuple[Any, ...]) -> None:
        self.module = module
        self.own = module.__dict__
        self.kind, self.training, hooks, forward, self.numbers = state
        self.forward = self.kind.forward
        self.special = bool(hooks) or forward is not self.forward
        self.children = tuple(module._modules.values())


def state_of(module: torch.nn.Module) -> tuple[tuple[Any, ...], ...]:
    """Class, mode, hooks, forward and attributes of a module and of those inside it."""
    found = []
    for inner in module.modules():
        own = inner.__dict__
        kind: Any = type(inner)
        hooks = tuple(
            id(h)
            for table in (inner._forward_pre_hooks, inner._forward_hooks, inner._backward_hooks)
            for h in table.values()
        )
        numbers = tuple((k, own[k]) for k in _read_by(kind) if is_scalar(own.get(k, ...)))
        forward = own.get("forward", kind.forward)
        found.append((kind, inner.training, hooks, forward, numbers))
    return tuple(found)


_WORDS = ("class", "mode", "hooks", "forward", "attributes")


def difference(name: str, before: tuple[Any, ...], after: tuple[Any, ...]) -> str:
    """What differs between two states of a module, in words."""
    if len(before) != len(after):
        return f"{name} changed: it has {len(after)} modules inside, not {len(before)}"
    for old, new in zip(before, after, strict=True):
        for word, a, b in zip(_WORDS, old, new, strict=True):
            if a != b and word == "attributes":
                changed = sorted({k for k, v in set(a) ^ set(b)})
                return f"{name} changed: {', '.join(changed)} of a {new[0].__name__}"
            if a != b:
                return f"{name} changed: the {word} of a {new[0].__name__}"
    return f"{name} changed"


@functools.cache
def _read_by(kind: Any) -> tuple[str, ...]:
    """Names that the methods of a module's class mention: its attributes may be among them."""
    found = {name for code in _methods(kind) for name in code.co_names}
    return tuple(sorted(found - {"training"}))


@functools.cache
def _written_by(kind: Any) -> bool:
    """Whether methods of a module's class assign attributes."""
    return any(i.opname == "STORE_ATTR" for code in _methods(kind) for i in dis.Bytecode(code))


def _methods(kind: type[torch.nn.Module]) -> Iterator[types.CodeType]:
    classes: tuple[type, ...] = kind.__mro__
    for cls in classes:
        if cls is torch.nn.Module:
            return
        for key, member in vars(cls).items():
            code = getattr(member, "__code__", None)
            if code is not None and key not in ("__init__", "__setstate__"):
                yield code
