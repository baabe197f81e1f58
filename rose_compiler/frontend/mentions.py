"""What code that ran names: which attributes, keys and globals it may have read."""

from __future__ import annotations

import dis
import functools
import operator
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rose_compiler.frontend.scalar import is_scalar

_ALL_KEYS = frozenset(("items", "values", "keys"))
_BY_KEY = frozenset(("get", "pop", "setdefault"))
_ASKED = ("__getattr__", "__getattribute__")
#: What finds an attribute by its name, and which of its arguments are names.
_BY_NAME = {
    **dict.fromkeys(("getattr", "hasattr"), slice(1, 2)),
    **dict.fromkeys(_ASKED, slice(-1, None)),
    "attrgetter": slice(None),
}
#: What has all arguments of a call on the stack; in Python 3.11 another step takes them from there.
_CALL = "PRECALL" if "PRECALL" in dis.opmap else "CALL"
_ANY_NAME = frozenset(("vars", "__dict__"))
#: What finds an attribute by its name, whatever it is called where that is done.
_FINDERS: dict[Any, str] = {getattr: "getattr", hasattr: "hasattr", vars: "vars"}
#: Modules of the standard library whose functions go through the attributes of what they are given.
_THROUGH = frozenset(("dataclasses", "inspect"))


@dataclass
class Mentions:
    """What code that ran names: attributes that it reads, methods that it calls, keys and globals;
    attributes whose absence it may have seen (``looked``); the code of functions that close over
    numbers (``closed``)."""

    attributes: set[str] = field(default_factory=set)
    methods: set[str] = field(default_factory=set)
    looked: set[str] = field(default_factory=set)
    keys: set[str] = field(default_factory=set)
    constants: set[Any] = field(default_factory=set)  # what may be a key, text or not
    any_attribute: bool = False
    any_key: bool = False
    all_keys: bool = False  # of a dict that is gone through: one more has its effect
    lengths: bool = False  # `len` is called
    globals: dict[tuple[int, str], tuple[dict[str, Any], str]] = field(default_factory=dict)
    free: dict[int, tuple[str, Any]] = field(default_factory=dict)
    closed: set[types.CodeType] = field(default_factory=set)
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
            if value is not None and (is_scalar(value) or isinstance(value, np.generic)):
                self.closed.add(code)
        self._instructions(code, space)
        self._names(code)
        if any(map(_finds, _named(code, frame))):
            self.any_attribute = True

    def found(self, frame: types.FrameType, function: Any) -> None:
        """Take note of a built-in function that is being called: it may find an attribute by a name
        that is not written out, and be known there by another name than its own."""
        name = _FINDERS.get(function) if isinstance(function, types.BuiltinFunctionType) else None
        if name is not None and frame.f_lasti not in _sites(frame.f_code):
            self.any_attribute = True

    def through(self, frame: types.FrameType) -> None:
        """Take note of a function of the standard library: ``dataclasses.asdict`` reads every
        attribute."""
        module = str(frame.f_globals.get("__name__", ""))
        if module in _THROUGH and "getattr" in frame.f_code.co_names:
            self.any_attribute = True

    def _instructions(self, code: types.CodeType, space: dict[str, Any]) -> None:
        before: dis.Instruction | None = None
        through = subscripts = False
        for at in dis.get_instructions(code):
            if at.opname == "LOAD_METHOD" or "NULL|self" in at.argrepr:
                self.methods.add(at.argval)
            elif at.opname == "LOAD_ATTR":
                self.attributes.add(at.argval)
            elif at.opname in ("LOAD_GLOBAL", "LOAD_NAME") and at.argval in space:
                self.globals[id(space), at.argval] = space, at.argval
            elif at.opname in ("LOAD_CONST", "LOAD_SMALL_INT"):
                found = _constants(at.argval)
                self.constants.update(found)
                self.keys.update(k for k in found if isinstance(k, str))
            constant = before is not None and before.opname in ("LOAD_CONST", "LOAD_SMALL_INT")
            # `name in cfg`
            self.all_keys |= at.opname == "CONTAINS_OP" and not constant
            spread = at.opname in ("CALL_FUNCTION_EX", "DICT_MERGE", "DICT_UPDATE")
            # `cfg.get(k)`: the name of the method is followed by what it is called with
            asked = _by_key(before) and at.opname != "LOAD_CONST"
            subscript = at.opname == "BINARY_SUBSCR" and not constant
            if (
                at.opname == "MATCH_CLASS"
            ):  # `case Thing(rate=r)`; without a name, by __match_args__
                self.attributes.update(before.argval if before is not None and constant else ())
                self.any_attribute |= bool(at.arg)
            through, subscripts = through or at.opname == "GET_ITER", subscripts or subscript
            self.all_keys |= spread or asked
            self.any_key |= spread or asked or subscript
            before = at
        self.all_keys |= through and subscripts  # `for k in cfg: ... cfg[k]`

    def _names(self, code: types.CodeType) -> None:
        names = set(code.co_names)
        through = bool(names & _ALL_KEYS)
        self.lengths |= "len" in names
        self.all_keys, self.any_key = self.all_keys or through, self.any_key or through
        self.any_attribute |= bool(names & _ANY_NAME)
        if names & _BY_NAME.keys():
            texts = set(_texts(code))
            self.attributes |= texts
            names_known = _names_known(code)
            self.looked |= texts if names_known is None else names_known
            self.any_attribute |= names_known is None

    def ran(self, code: types.CodeType) -> bool:
        """Whether a function was called."""
        return code in self._seen

    def key(self, key: Any) -> bool:
        """Whether the item of a dict under this key may have been read."""
        return self.any_key or not isinstance(key, str) or key in self.keys

    def attribute(self, name: str, number: bool) -> bool:
        """Whether an attribute of this name may have been read. A number is not called: a method
        of the same name is that of something else."""
        if name in self.attributes or (name in self.methods and not number):
            return True
        return self.by_any_name(name)

    def by_any_name(self, name: str) -> bool:
        """Whether an attribute of this name may be one that is found by a name from elsewhere."""
        return self.any_attribute and not name.startswith("__")


def _texts(code: types.CodeType) -> Iterator[str]:
    """The names, and those in a path, among the constants of code."""
    for each in code.co_consts:
        for text in _constants(each):
            if isinstance(text, str):
                yield from (part for part in text.split(".") if part.isidentifier())


def _named(code: types.CodeType, frame: types.FrameType) -> Iterator[Any]:
    """What the names of a function stand for that are not names of the standard library's."""
    for name in code.co_names:
        value = frame.f_globals.get(name)
        if _FINDERS.get(value if isinstance(value, types.BuiltinFunctionType) else None) != name:
            yield value
    for name in (*code.co_freevars, *code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]):
        yield frame.f_locals.get(name)


def _finds(value: Any) -> bool:
    """Whether a value is called to find an attribute by a name that it brings, or is given."""
    if isinstance(value, types.BuiltinFunctionType):
        return value in _FINDERS
    if isinstance(value, functools.partial):
        return _finds(value.func)
    return isinstance(value, operator.attrgetter)


@functools.cache
def _sites(code: types.CodeType) -> frozenset[int]:
    """Where code calls what finds attributes by its own name; what it finds there is seen to."""
    steps = [at for at in dis.get_instructions(code) if at.opname not in ("EXTENDED_ARG", "NOP")]
    found: set[int] = set()
    for n, at in enumerate(steps):
        if at.opname in ("LOAD_GLOBAL", "LOAD_NAME") and at.argval in _FINDERS.values():
            call = _call(steps[n + 1 :], None)[1]
            found |= {each.offset for each in call}
    return frozenset(found)


def _names_known(code: types.CodeType) -> set[str] | None:
    """The names that code finds attributes by; ``None`` if one is not written out in it."""
    found: set[str] = set()
    steps = [at for at in dis.get_instructions(code) if at.opname not in ("EXTENDED_ARG", "NOP")]
    asked = None
    if code.co_name in _ASKED and code.co_argcount > 1:
        # what it is asked for is named where it is asked, unless the variable is bound anew
        asked = code.co_varnames[1]
        for at in steps:
            if at.opname.startswith("STORE_FAST") and asked in _each(at.argval):
                asked = None
    for n, at in enumerate(steps):
        if at.opname.startswith("LOAD_") and at.opname != "LOAD_CONST" and at.argval in _BY_NAME:
            names = _call(steps[n + 1 :], asked)[0][_BY_NAME[at.argval]]
            if not names or None in names:
                return None
            found.update(part for name in names if name for part in name.split("."))
    return found


def _call(
    steps: list[dis.Instruction], asked: str | None
) -> tuple[list[str | None], list[dis.Instruction]]:
    """What each argument of a call is whose function has just been loaded: text, empty for the
    variable ``asked``, ``None`` if it is something else; no argument at all if that can't be told.
    And the steps that call it.

    Follows the stack above the function, without jumps, up to the call of as many arguments as it
    holds: any other call in between has its own function there, too.
    """
    stack: list[str | None] = []
    for n, at in enumerate(steps):
        if at.opname == _CALL and at.arg == len(stack):
            return stack, steps[n : n + 2]
        if at.opcode in dis.hasjrel or at.opcode in dis.hasjabs:
            return [], []
        effect = dis.stack_effect(at.opcode, at.arg, jump=False)
        if -effect > len(stack):
            return [], []
        if effect > 0:
            loaded = _each(at.argval) if at.opname.startswith("LOAD_FAST") else ()
            variables = loaded if len(loaded) == effect else (None,) * effect
            text = at.argval if at.opname == "LOAD_CONST" and isinstance(at.argval, str) else None
            stack += ["" if v is not None and v == asked else text for v in variables]
            continue
        del stack[len(stack) + effect :]
        if stack:
            stack[-1] = None  # what the step made of those that it took
    return [], []


def _each(names: Any) -> tuple[Any, ...]:
    """The variables of a step that may load, or store, two at once."""
    return names if isinstance(names, tuple) else (names,)


def _by_key(at: dis.Instruction | None) -> bool:
    return at is not None and at.opname in ("LOAD_METHOD", "LOAD_ATTR") and at.argval in _BY_KEY


def _constants(constant: Any) -> list[Any]:
    """The keys that a constant may stand for: itself, or those in a tuple that is gone through."""
    if isinstance(constant, types.CodeType):
        return []
    if isinstance(constant, tuple | frozenset):
        return [constant, *(c for c in constant if not isinstance(c, types.CodeType))]
    return [constant]
