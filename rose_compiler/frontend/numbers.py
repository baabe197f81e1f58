"""Numbers and text that traced code reads from Python objects, which its graph holds for good.

A graph is made of torch calls; what a dict of settings, a list or an attribute said when it was
traced is a constant in it. Which of all numbers within reach were read can't be seen, so all count
whose attribute or key the code that ran mentions (:mod:`rose_compiler.frontend.mentions`).
"""

from __future__ import annotations

import array
import collections
import datetime
import enum
import functools
import gc
import numbers
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rose_compiler.frontend.components import is_hosted, is_simulator
from rose_compiler.frontend.mentions import Mentions
from rose_compiler.frontend.names import PARTS, StateNames
from rose_compiler.frontend.reachable import field_names, fields_of
from rose_compiler.frontend.scalar import is_scalar
from rose_compiler.frontend.source import is_user_type
from rose_compiler.ir.effects import related

#: How far down objects are searched, and through how many; what lies further is not followed.
DEPTH, OBJECTS = 32, 20_000
#: Items of a sequence that are looked at one by one; more of them only if all are numbers, as one
#: value of at most so many.
ITEMS, MANY = 64, 4096
#: "attr" or "item", and which; "length"; "keys", and those that are looked for (``None``: all);
#: "all", the items or members as one value; "type", the class of what stands there; "some", whether
#: a dict has entries; "fields", the names of the attributes that an object has
_Step = tuple[str, Any]
_GONE = object()
_LIBRARIES = frozenset(("torch", "numpy", "rose_compiler", *sys.stdlib_module_names))


@dataclass(frozen=True)
class Number:
    """A number or text that a graph holds: ``where`` in the user's words, ``state`` the name of
    what holds it, and its value when the code was traced. What is not ``followed`` is too much to
    be compared: no graph may hold it. One that is ``simulated`` is an attribute of a simulator,
    which may set it with each step."""

    where: str
    state: str
    root: Any  # the name of a root, or an object that no root leads to
    steps: tuple[_Step, ...]
    value: Any
    followed: bool = True
    simulated: bool = False

    @property
    def absent(self) -> bool:
        """Whether nothing stood there, where code may have looked for something."""
        return self.value is _GONE

    def now(self, states: Mapping[str, Any]) -> Any:
        """What stands there now, below the roots of a call; something unlike any number if nothing
        does."""
        at = states.get(self.root, _GONE) if isinstance(self.root, str) else self.root
        try:
            for kind, key in self.steps:
                at = step(at, kind, key)
        except (AttributeError, LookupError, TypeError, ValueError):
            return _GONE
        return at

    def written_by(self, state: str) -> bool:
        """Whether who writes a state may change it. An object keeps its class, whatever is written
        in it, and its methods, and the attributes that it has as long as no other is written."""
        kind, below = self.steps[-1][0] if self.steps else "", f"{self.state}."
        if kind == "type" and state.startswith(below):
            return False
        if kind == "fields" and state.startswith(below):
            return state.removeprefix(below).partition(".")[0] not in (*self.value, *PARTS)
        if isinstance(self.value, types.MethodType) and state != self.state:
            return False
        return related(self.state, state)

    def changed(self, states: Mapping[str, Any]) -> str | None:
        """What it is now, in words, if another than it was."""
        now = self.now(states)
        if now is self.value or (type(now) is type(self.value) and bool(now == self.value)):
            return None
        if now != now and self.value != self.value:
            return None
        before, after = (
            "nothing" if value is _GONE else repr(value)[:40] for value in (self.value, now)
        )
        return f"{self.where} changed from {before} to {after}"


def numbers_read(mentions: Mentions, roots: Sequence[Any], names: StateNames) -> list[Number]:
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
        found.walk(space.get(name), space, (("item", name),), name)
    for name, value in mentions.free.values():
        if not is_number(value):
            found.walk(value, value, (), name)
    for name, cell in _cells(mentions):
        found.walk(cell.cell_contents, cell, (("attr", "cell_contents"),), name)
    return list(found.numbers.values())


def is_number(value: Any) -> bool:
    """Whether a value is compared as it is: a number of Python's or numpy's, text, an enum, and
    other values that never change."""
    return is_scalar(value) or isinstance(value, _VALUES)


def _cells(mentions: Mentions) -> Iterator[tuple[str, types.CellType]]:
    """The variables of functions that ran which hold numbers and may be bound anew: a frame gives
    their values alone."""
    for code in mentions.closed:
        for function in gc.get_referrers(code):
            if not isinstance(function, types.FunctionType) or function.__code__ is not code:
                continue
            for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
                try:
                    if is_number(cell.cell_contents):
                        yield name, cell
                except ValueError:  # not bound yet
                    continue


class _Found:
    def __init__(self, mentions: Mentions, names: StateNames) -> None:
        self.mentions = mentions
        self.names = names
        self.numbers: dict[Any, Number] = {}  # by where they stand: one name may stand for several
        self._seen: set[int] = set()

    def _add(self, number: Number) -> None:
        root = number.root if isinstance(number.root, str) else id(number.root)
        self.numbers.setdefault((root, number.steps), number)

    def walk(
        self, value: Any, root: Any, steps: tuple[_Step, ...], where: str, state: str = ""
    ) -> None:
        """Collect what is at a place and below it."""
        if is_number(value) or value is _GONE or isinstance(value, _Whole | functools.partial):
            self._add(Number(where, state or where, root, steps, value))
            if isinstance(value, enum.Enum):
                self._member(value, where)
            return
        if isinstance(value, torch.Tensor):
            return
        if isinstance(value, torch.optim.Optimizer):
            for key in ("param_groups", "defaults"):
                if key in self.mentions.attributes:
                    named = f"{self.names.name_of(value) or where}.{key}"
                    self.walk(getattr(value, key), root, (*steps, ("attr", key)), named)
            return
        if is_simulator(value):
            self._simulator(value, root, steps, where)
            return
        if is_hosted(value) or _library(value):
            return
        if isinstance(value, _FUNCTIONS):
            if steps and steps[-1][0] in ("attr", "item"):  # another may be put in its place
                self._add(Number(where, state or where, root, steps, value))
            if id(value) not in self._seen:
                self._seen.add(id(value))
                self._function(value, where)
            return
        if id(value) in self._seen:
            return
        many = value.size if isinstance(value, np.ndarray) else 0
        many = len(value) if isinstance(value, _SIZED) else many
        if len(self._seen) > OBJECTS or len(steps) > DEPTH or many > MANY:
            self._add(Number(where, state or where, root, steps, None, followed=False))
            return
        self._seen.add(id(value))
        # None may come, or go, in its place; modules have guards of their own
        if steps and steps[-1][0] in ("attr", "item") and not isinstance(value, torch.nn.Module):
            typed = (*steps, ("type", None))
            self._add(Number(f"the type of {where}", state or where, root, typed, type(value)))
        own = self.names.name_of(value) or where
        for kind, key, each, said in self._below(value, where):
            inner = f"{own}.{key}" if kind == "attr" else own
            self.walk(each, root, (*steps, (kind, key)), said, inner)

    def _member(self, value: enum.Enum, where: str) -> None:
        """What the value of an enum's member holds, which may change in place."""
        if id(value) not in self._seen:
            self._seen.add(id(value))
            if not is_number(value.value):
                self.walk(value.value, value, (("attr", "value"),), f"{where}.value")

    def _simulator(self, value: Any, root: Any, steps: tuple[_Step, ...], where: str) -> None:
        """The numbers among the attributes of a simulator of the user's, or of one around another;
        what it simulates with is its own."""
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        held = dict(fields_of(value))
        inner = held.get("env")
        if inner is not None and is_simulator(inner):
            self._simulator(inner, root, (*steps, ("attr", "env")), f"{where}.env")
        for cls in filter(is_user_type, type(value).__mro__):
            held = {**vars(cls), **held}
        for key, each in held.items() if is_user_type(type(value)) else ():
            if is_number(each) and self.mentions.attribute(key, True):
                said, at = f"{where}.{key}", (*steps, ("attr", key))
                self._add(Number(said, said, root, at, each, simulated=True))

    def _function(self, value: Any, where: str) -> None:
        """What a function holds: attributes and defaults that are read, and if it ran, all its
        defaults and variables that it closes over."""
        if isinstance(value, types.MethodType):
            owner = self.names.name_of(value.__self__) or where
            self.walk(value.__self__, value, (("attr", "__self__"),), owner)
            value = value.__func__
        if not isinstance(value, types.FunctionType):
            return
        for key, each in list(vars(value).items()):
            if self.mentions.attribute(key, is_number(each)):
                self.walk(each, value, (("attr", key),), f"{where}.{key}")
        ran = self.mentions.ran(value.__code__)
        if not ran and self.mentions.attributes.isdisjoint(_DEFAULTS):
            return
        if value.__defaults__ is not None:
            defaults = (("attr", "__defaults__"),)
            self.walk(value.__defaults__, value, defaults, f"the defaults of {where}")
        for key, each in (value.__kwdefaults__ or {}).items():
            keyword = (("attr", "__kwdefaults__"), ("item", key))
            self.walk(each, value, keyword, f"the default {key} of {where}")
        if not ran and "__closure__" not in self.mentions.attributes:
            return
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                held = cell.cell_contents
            except ValueError:  # not bound yet
                continue
            self.walk(held, cell, (("attr", "cell_contents"),), name)

    def _below(self, value: Any, where: str) -> Iterator[tuple[str, Any, Any, str]]:
        if isinstance(value, Mapping):
            # of keys that are objects, one more is seen by their number
            if self.mentions.lengths or not all(map(_is_key, value)):
                yield "length", None, len(value), f"len({where})"
            yield "some", None, bool(value), f"whether {where} has any"
            # a key that is not there may be looked for: `if "clip" in cfg`, `cfg.get("clip")`
            looked = None if self.mentions.all_keys else frozenset(self.mentions.constants)
            if (present := _keys(value, looked)) is not None:
                yield "keys", looked, present, f"which keys {where} has"
            for key in list(value):
                # `cfg.clip`, where a class of the user's looks its attributes up
                if self.mentions.key(key) or key in self.mentions.attributes:
                    yield "item", key, value[key], f"{where}[{key!r}]"
        elif isinstance(value, (set, frozenset, *_PACKED)) or _only_numbers(value):
            yield "all", None, _Whole(value), where
        elif isinstance(value, list | tuple | collections.deque):
            yield "length", None, len(value), f"len({where})"
            for n, each in enumerate(value):
                yield "item", n, each, f"{where}[{n}]"
        elif isinstance(value, type | types.ModuleType):
            for key, each in _of_namespace(value):
                found = _plain_data(each) and self.mentions.by_any_name(key)
                if key in self.mentions.attributes or found:
                    yield "attr", key, each, f"{where}.{key}"
        else:
            yield from self._attributes(value, where)

    def _attributes(self, value: Any, where: str) -> Iterator[tuple[str, Any, Any, str]]:
        known = self.mentions
        below = dict(fields_of(value))
        module = isinstance(value, torch.nn.Module)
        if module:
            for key, inner in value._modules.items():
                yield "attr", key, inner, f"{where}.{key}"
        for key, each in below.items():
            if module and key in _MODULE_FIELDS and key not in known.attributes:
                continue
            if key != "training" and known.attribute(key, is_number(each)):
                yield "attr", key, each, f"{where}.{key}"
        for cls in type(value).__mro__:
            if cls.__module__.partition(".")[0] in _LIBRARIES:
                continue
            for key, each in list(vars(cls).items()):
                read = key in known.attributes or known.by_any_name(key)
                if read and key not in below and _plain_data(each):
                    yield "attr", key, each, f"{where}.{key}"
                elif read and hasattr(type(each), "__get__") and is_user_type(type(each)):
                    self.walk(each, each, (), f"{where}.{key}")  # a descriptor, not what it gives
                elif isinstance(each, types.FunctionType) and known.ran(each.__code__):
                    # what a method is may change, for an object and for all of its class
                    yield "attr", key, getattr(value, key), f"{where}.{key}"
        if known.any_attribute:
            yield "fields", None, field_names(value), f"which attributes {where} has"
        for key in sorted(known.looked - below.keys()):
            if _lacks(value, key):
                yield "attr", key, _GONE, f"{where}.{key}"


class _Whole(tuple[Any, ...]):
    """Items or members as one value."""

    def __new__(cls, of: Any) -> _Whole:
        if isinstance(of, np.ndarray):
            return super().__new__(cls, (of.tobytes(), of.dtype, of.shape))
        members = frozenset(of) if isinstance(of, set | frozenset) else list(of)
        return super().__new__(cls, (members,))

    def __repr__(self) -> str:
        if len(self) > 1:
            return str(np.frombuffer(self[0], self[1]).reshape(self[2]))
        return repr(self[0])


_MODULE_FIELDS = frozenset(vars(torch.nn.Module()))
_DEFAULTS = ("__defaults__", "__kwdefaults__", "__closure__")
_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType)
_PACKED = (np.ndarray, array.array, bytearray)
_SIZED = (list, tuple, set, frozenset, collections.deque, array.array, bytearray)
_VALUES = (np.generic, enum.Enum, numbers.Number, bytes, range, slice, datetime.timedelta)


def step(at: Any, kind: str, key: Any) -> Any:
    """What one step of a number's leads to."""
    if kind == "attr":
        return getattr(at, key)
    if kind == "keys":
        return _keys(at, key)
    if kind == "all":
        return _Whole(at)
    if kind == "fields":
        return field_names(at)
    if kind == "type":
        return type(at)
    if kind == "some":
        return bool(at)
    return len(at) if kind == "length" else at[key]


def _keys(of: Any, looked: frozenset[Any] | None) -> tuple[Any, ...] | None:
    """The keys of a dict that are text or numbers, in order: all, or those that are looked for."""
    if not isinstance(of, Mapping):
        return None
    return tuple(k for k in of if _is_key(k) and (looked is None or k in looked))


def _is_key(key: Any) -> bool:
    if isinstance(key, tuple):
        return all(map(_is_key, key))
    return key is None or is_number(key)


def _lacks(value: Any, name: str) -> bool:
    try:
        return not hasattr(value, name)
    except Exception:  # a property of the user's, which may raise whatever it likes
        return False


def _only_numbers(value: Any) -> bool:
    """Whether a long sequence holds nothing but numbers."""
    if not isinstance(value, list | tuple | collections.deque) or len(value) <= ITEMS:
        return False
    return len(value) <= MANY and all(map(is_number, value))


def _of_namespace(value: Any) -> Iterator[tuple[str, Any]]:
    """What a class, with its bases, or a module holds."""
    if isinstance(value, enum.EnumMeta):
        yield from value.__members__.items()
    for each in value.__mro__ if isinstance(value, type) else (value,):
        if not _library(each):
            yield from list(vars(each).items())


def _library(value: Any) -> bool:
    """Whether a class or module is none of the user's."""
    if isinstance(value, types.ModuleType):
        return value.__name__.partition(".")[0] in _LIBRARIES
    if isinstance(value, type):
        return value.__module__.partition(".")[0] in _LIBRARIES
    return False


def _plain_data(value: Any) -> bool:
    return is_number(value) or isinstance(value, (*_SIZED, dict))


class Every:
    """All numbers, where no graph may hold any."""

    def __contains__(self, where: object) -> bool:
        return True
