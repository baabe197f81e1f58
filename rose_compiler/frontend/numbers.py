"""Numbers and text that traced code reads from Python objects, which its graph holds for good.

A graph is made of torch calls; what a dict of settings, a list or an attribute said when it was
traced is a constant in it. Which of all numbers within reach were read can't be seen, so all count
whose attribute or key the code that ran mentions.
"""

from __future__ import annotations

import collections
import dis
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from rose_compiler.frontend.components import is_hosted, is_simulator
from rose_compiler.frontend.names import StateNames
from rose_compiler.frontend.reachable import fields_of
from rose_compiler.frontend.scalar import is_scalar

#: How far down objects are searched, and through how many.
DEPTH, OBJECTS = 8, 5000
#: Items of a sequence that are looked at one by one.
ITEMS = 64
_ALL_KEYS = frozenset(("items", "values", "keys"))
#: "attr" or "item", and which; "length"; "keys", and those that are looked for (``None``: all)
_Step = tuple[str, Any]
_GONE = object()


@dataclass(frozen=True)
class Number:
    """A number or text that a graph holds: ``where`` in the user's words, ``state`` the name of
    what holds it, and its value when the code was traced."""

    where: str
    state: str
    root: Any  # the name of a root, or an object that no root leads to
    steps: tuple[_Step, ...]
    value: Any

    def now(self, states: Mapping[str, Any]) -> Any:
        """What stands there now, below the roots of a call; something unlike any number if nothing
        does."""
        at = states.get(self.root, _GONE) if isinstance(self.root, str) else self.root
        try:
            for kind, key in self.steps:
                if kind == "attr":
                    at = getattr(at, key)
                elif kind == "keys":
                    at = _keys(at, key)
                else:
                    at = len(at) if kind == "length" else at[key]
        except (AttributeError, LookupError, TypeError):
            return _GONE
        return at

    def changed(self, states: Mapping[str, Any]) -> str | None:
        """What it is now, in words, if another than it was."""
        now = self.now(states)
        if now is self.value or (type(now) is type(self.value) and bool(now == self.value)):
            return None
        if now != now and self.value != self.value:
            return None
        told = "nothing" if now is _GONE else repr(now)[:40]
        return f"{self.where} changed from {self.value!r:.40} to {told}"


@dataclass
class Mentions:
    """What code that ran names: attributes that it reads, keys and globals."""

    attributes: set[str] = field(default_factory=set)
    keys: set[str] = field(default_factory=set)
    any_key: bool = False
    all_keys: bool = False  # of a dict that is gone through: one more has its effect
    globals: dict[tuple[int, str], tuple[dict[str, Any], str]] = field(default_factory=dict)
    free: dict[int, tuple[str, Any]] = field(default_factory=dict)
    _seen: set[types.CodeType] = field(default_factory=set)

    def add(self, frame: types.FrameType) -> None:
        """Take note of a function that is being called."""
        code, space = frame.f_code, frame.f_globals
        if code in self._seen:
            return
        self._seen.add(code)
        for name in code.co_freevars:
            value = frame.f_locals.get(name)
            self.free.setdefault(id(value), (name, value))
        before = None
        for at in dis.get_instructions(code):
            if at.opname == "LOAD_ATTR" and not at.argrepr.startswith("NULL"):
                self.attributes.add(at.argval)
            elif at.opname in ("LOAD_GLOBAL", "LOAD_NAME") and at.argval in space:
                self.globals[id(space), at.argval] = space, at.argval
            elif at.opname == "LOAD_CONST" and isinstance(at.argval, str):
                self.keys.add(at.argval)
            constant = before is not None and before.opname == "LOAD_CONST"
            spread = at.opname in ("CALL_FUNCTION_EX", "DICT_MERGE", "DICT_UPDATE")
            self.all_keys |= spread
            self.any_key |= spread or (at.opname == "BINARY_SUBSCR" and not constant)
            before = at
        names = set(code.co_names)
        through = bool(names & _ALL_KEYS)
        self.all_keys, self.any_key = self.all_keys or through, self.any_key or through
        if "getattr" in names or "attrgetter" in names:
            self.attributes.update(c for c in code.co_consts if isinstance(c, str))

    def key(self, key: Any) -> bool:
        """Whether the item of a dict under this key may have been read."""
        return self.any_key or not isinstance(key, str) or key in self.keys


def numbers_read(mentions: Mentions, roots: list[Any], names: StateNames) -> list[Number]:
    """What code that mentioned this may have read below the objects that it was given, and below
    the globals and closure variables that it names."""
    found = _Found(mentions, names)
    for value in roots:
        path = names.path_of(value)
        if path is None:
            found.walk(value, value, (), names.name_of(value) or type(value).__name__)
        else:
            root, *rest = path.split(".")
            found.walk(value, root, tuple(("attr", part) for part in rest), path)
    for space, name in mentions.globals.values():
        value = space.get(name)
        if not isinstance(value, type | types.ModuleType | types.FunctionType):
            found.walk(value, space, (("item", name),), name)
    for name, value in mentions.free.values():
        if not is_scalar(value):
            found.walk(value, value, (), name)
    return list(found.numbers.values())


class _Found:
    def __init__(self, mentions: Mentions, names: StateNames) -> None:
        self.mentions = mentions
        self.names = names
        self.numbers: dict[str, Number] = {}
        self._seen: set[int] = set()

    def walk(
        self, value: Any, root: Any, steps: tuple[_Step, ...], where: str, state: str = ""
    ) -> None:
        """Collect what is at a place and below it."""
        if is_scalar(value):
            self.numbers.setdefault(where, Number(where, state or where, root, steps, value))
            return
        if id(value) in self._seen or len(self._seen) > OBJECTS or len(steps) > DEPTH:
            return
        if isinstance(value, torch.Tensor | np.ndarray | type | torch.optim.Optimizer):
            return
        if is_simulator(value) or is_hosted(value) or callable_code(value):
            return
        self._seen.add(id(value))
        own = self.names.name_of(value) or where
        for kind, key, each, said in self._below(value, where):
            inner = f"{own}.{key}" if kind == "attr" else own
            self.walk(each, root, (*steps, (kind, key)), said, inner)

    def _below(self, value: Any, where: str) -> Iterator[tuple[str, Any, Any, str]]:
        if isinstance(value, Mapping):
            # a key that is not there may be looked for: `if "clip" in cfg`, `cfg.get("clip")`
            looked = None if self.mentions.all_keys else frozenset(self.mentions.keys)
            if (present := _keys(value, looked)) is not None:
                yield "keys", looked, present, f"which keys {where} has"
            for key in list(value):
                if self.mentions.key(key):
                    yield "item", key, value[key], f"{where}[{key!r}]"
        elif isinstance(value, list | tuple | collections.deque):
            if len(value) <= ITEMS:
                yield "length", None, len(value), f"len({where})"
                for n, each in enumerate(value):
                    yield "item", n, each, f"{where}[{n}]"
        else:
            yield from self._attributes(value, where)

    def _attributes(self, value: Any, where: str) -> Iterator[tuple[str, Any, Any, str]]:
        known = self.mentions.attributes
        below = dict(fields_of(value))
        if isinstance(value, torch.nn.Module):
            for key, inner in value._modules.items():
                yield "attr", key, inner, f"{where}.{key}"
        for key, each in below.items():
            if key in known and key != "training":
                yield "attr", key, each, f"{where}.{key}"
        for cls in type(value).__mro__:
            if cls.__module__.partition(".")[0] in ("builtins", "torch", "typing", "abc"):
                continue
            for key, each in list(vars(cls).items()):
                if key in known and key not in below and _plain_data(each):
                    yield "attr", key, each, f"{where}.{key}"


def _keys(of: Any, looked: frozenset[str] | None) -> tuple[str, ...] | None:
    """The keys of a dict that are names, in order: all, or those that are looked for."""
    if not isinstance(of, Mapping):
        return None
    return tuple(k for k in of if isinstance(k, str) and (looked is None or k in looked))


def _plain_data(value: Any) -> bool:
    return is_scalar(value) or isinstance(value, list | tuple | dict)


def callable_code(value: Any) -> bool:
    """Whether a value is a function or method, of Python or not, or a module of code."""
    kinds = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType)
    return isinstance(value, kinds)
