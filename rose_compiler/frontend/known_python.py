"""Known callables of the standard library: builtins, containers, text, math, random, time, copy."""

# ruff: noqa: SIM905 (tables of names read better as words than as quoted lists)

from __future__ import annotations

import builtins
import collections
import copy
import logging
import math
import operator
import os
import random
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from rose_compiler.base.regions import Region
from rose_compiler.frontend.known_base import (
    PURE,
    Answer,
    CallShape,
    KnownEffects,
    Rule,
    aliases_arguments,
    is_scalar_type,
    register_callable,
    register_callable_rule,
    register_method_rule,
    register_methods,
    with_file,
)

HOST_WRITE = KnownEffects(reads=("host",), writes=("host",), kind="log")
# a reading of the clock is never the same twice: as a write it can't be hoisted, dropped or shared,
# and keeps its place among output
CLOCK = KnownEffects(reads=("host",), writes=("host",), kind="clock", may_raise=False)
PYTHON_DRAW = KnownEffects(reads=("rng:python",), writes=("rng:python",), kind="draw")

# Types whose own methods run no code of the user's when compared, converted, hashed or measured.
_PLAIN: tuple[type, ...] = (
    int, float, complex, bool, str, bytes, type(None), list, tuple, dict, set, frozenset, range,
    collections.deque, collections.OrderedDict, collections.defaultdict, collections.Counter, slice,
    type({}.keys()), type({}.values()), type({}.items()), enumerate, zip, map, reversed, filter,
    np.ndarray, torch.Tensor, torch.nn.Parameter, torch.Size, torch.dtype, torch.device,
)  # fmt: skip


def is_plain(owner: type | None) -> bool:
    """Whether a type is one of the language's own, numpy's or torch's, not a user's subclass."""
    return owner is not None and (owner in _PLAIN or issubclass(owner, np.generic))


def _plain_arguments(call: CallShape) -> bool:
    return all(is_plain(t) for t in (*call.positional, *call.keywords.values()))


def _reads_tensor(call: CallShape) -> bool:
    return any(t is not None and issubclass(t, torch.Tensor) for t in call.positional)


def _pure_on_plain(call: CallShape) -> Answer:
    if not _plain_arguments(call):
        return None
    return KnownEffects(host_read=_reads_tensor(call))


def _holds_on_plain(call: CallShape) -> Answer:
    return aliases_arguments(call) if _plain_arguments(call) else None


def _selects_on_plain(call: CallShape) -> Answer:
    """One of the arguments, or an element of one, comes back."""
    if not _plain_arguments(call):
        return None
    alias = () if all(is_scalar_type(t) for t in call.positional) else call.args()
    return KnownEffects(alias=alias, host_read=_reads_tensor(call))


def _no_function_argument(rule: Rule) -> Rule:
    def check(call: CallShape) -> Answer:
        return None if "key" in call.keywords else rule(call)

    return check


def _next(call: CallShape) -> Answer:
    plain = call.positional and call.positional[0] in (enumerate, zip, reversed)
    return KnownEffects(writes=("arg0",), alias=call.args()) if plain else None


def _print(call: CallShape) -> Answer:
    # a type that is not known is converted to text, which is taken to do nothing else
    if not all(t is None or is_plain(t) for t in (*call.positional, *call.keywords.values())):
        return None
    effects = replace(HOST_WRITE, host_read=_reads_tensor(call))
    return with_file(effects, call, "kw_file" if "file" in call.keywords else None)


def _register_builtins() -> None:
    for name in (
        "abs all any ascii bin bool bytes chr complex divmod float format hash hex int len oct "
        "ord pow repr round str sum"
    ).split():
        register_callable(getattr(builtins, name), _pure_on_plain)
    for name in "min max".split():
        register_callable(getattr(builtins, name), _no_function_argument(_selects_on_plain))
    register_callable(sorted, _no_function_argument(_holds_on_plain))
    for name in "dict enumerate frozenset list reversed set slice tuple zip".split():
        register_callable(getattr(builtins, name), _holds_on_plain)
    for name in "callable id isinstance issubclass range type".split():
        register_callable(getattr(builtins, name), replace(PURE, may_raise=name == "range"))
    register_callable(next, _next)
    register_callable(print, _print)
    register_callable(collections.deque, _holds_on_plain)
    register_callable(collections.OrderedDict, _holds_on_plain)
    register_callable(collections.Counter, _holds_on_plain)
    for name in operator.__all__:
        if name.startswith("i") and name not in (
            "invert",
            "indexOf",
            "is_",
            "is_not",
            "index",
            "inv",
        ):
            continue
        if name in ("setitem", "delitem", "methodcaller", "attrgetter", "itemgetter", "call"):
            continue
        register_callable(getattr(operator, name), _operator)


def _operator(call: CallShape) -> Answer:
    if not _plain_arguments(call):
        return None
    scalars = all(is_scalar_type(t) for t in call.positional)
    return KnownEffects(alias=() if scalars else call.args())


_READ = KnownEffects(reads=("self",))
_READ_OUT = KnownEffects(reads=("self",), alias=("self",))
_WRITE = KnownEffects(reads=("self",), writes=("self",))
_TAKE = KnownEffects(reads=("self",), writes=("self",), alias=("self",))


def _keeps(call: CallShape) -> KnownEffects:
    """A mutator that stores its arguments, or their elements, in the receiver."""
    return KnownEffects(reads=("self",), writes=("self",), retains=call.args())


def _keeps_and_returns(call: CallShape) -> KnownEffects:
    return replace(_keeps(call), alias=("self", *call.args()))


def _looks_up(call: CallShape) -> KnownEffects:
    return KnownEffects(reads=("self",), alias=("self", *call.args()))


def _sort(call: CallShape) -> Answer:
    return None if "key" in call.keywords else _WRITE


def _register_containers() -> None:
    table: tuple[tuple[type, dict[str, Rule | KnownEffects]], ...] = (
        (
            list,
            {
                "append extend insert": _keeps,
                "clear remove reverse": _WRITE,
                "pop": _TAKE,
                "sort": _sort,
                "copy": _READ_OUT,
                "count index": _READ,
            },
        ),
        (
            collections.deque,
            {
                "append appendleft extend extendleft insert": _keeps,
                "clear remove reverse rotate": _WRITE,
                "pop popleft": _TAKE,
                "copy": _READ_OUT,
                "count index": _READ,
            },
        ),
        (
            dict,
            {
                "update": _keeps,
                "setdefault": _keeps_and_returns,
                "clear": _WRITE,
                "pop": lambda call: replace(_TAKE, alias=("self", *call.args()[1:])),
                "popitem": _TAKE,
                "get": _looks_up,
                "copy items keys values": _READ_OUT,
            },
        ),
        (
            collections.OrderedDict,
            {
                "move_to_end clear": _WRITE,
                "update": _keeps,
                "setdefault": _keeps_and_returns,
                "pop": lambda call: replace(_TAKE, alias=("self", *call.args()[1:])),
                "popitem": _TAKE,
                "copy items keys values": _READ_OUT,
            },
        ),
        (collections.defaultdict, {"copy": _READ_OUT}),
        (
            collections.Counter,
            {
                "update": _keeps,
                "subtract": _WRITE,
                "most_common elements copy": _READ_OUT,
                "total": _READ,
            },
        ),
        (
            set,
            {
                "add update": _keeps,
                "clear discard remove difference_update intersection_update": _WRITE,
                "symmetric_difference_update": _keeps,
                "pop": _TAKE,
                "copy difference intersection": _READ_OUT,
                "union symmetric_difference": _looks_up,
                "isdisjoint issubset issuperset": _READ,
            },
        ),
        (tuple, {"count index": _READ}),
    )
    for owner, methods in table:
        for names, rule in methods.items():
            register_methods(owner, names.split(), rule)
    for owner in (str, bytes, int, float, complex, bool, range):
        names_of = [n for n in dir(owner) if not n.startswith("_") and callable(getattr(owner, n))]
        register_methods(owner, names_of, PURE)


def _shuffle(call: CallShape) -> KnownEffects:
    return replace(PYTHON_DRAW, reads=("rng:python", "arg0"), writes=("rng:python", "arg0"))


_SELF_DRAW = KnownEffects(reads=("self",), writes=("self",), kind="draw")


def _register_random() -> None:
    names = [n for n in random.__all__ if isinstance(getattr(random, n), type) is False]
    for name in names:
        rule: Rule | KnownEffects = PYTHON_DRAW
        if name == "shuffle":
            rule = _shuffle
        elif name in ("choice", "choices", "sample"):
            rule = replace(PYTHON_DRAW, alias=("arg0",))
        elif name == "getstate":
            rule = KnownEffects(reads=("rng:python",))
        register_callable(getattr(random, name), rule)
        if name == "shuffle":
            register_methods(random.Random, [name], replace(_SELF_DRAW, writes=("self", "arg0")))
        elif name == "getstate":
            register_methods(random.Random, [name], _READ)
        else:
            register_methods(random.Random, [name], replace(_SELF_DRAW, alias=("arg0",)))
    # without a seed the state comes from the operating system, which is fresh either way
    register_callable(random.Random, PURE)


def _register_modules() -> None:
    for name in dir(math):
        if callable(getattr(math, name)) and not name.startswith("_"):
            register_callable(getattr(math, name), _pure_on_plain)
    for name in dir(time):
        if name.startswith(("time", "perf_counter", "monotonic", "process_time", "thread_time")):
            register_callable(getattr(time, name), CLOCK)
    for name in ("strftime", "localtime", "gmtime", "ctime", "asctime"):
        register_callable(getattr(time, name), CLOCK)
    register_callable(time.sleep, replace(HOST_WRITE, kind="clock"))
    register_callable(copy.copy, _copy)
    register_callable(copy.deepcopy, _deepcopy)
    for name in ("join", "basename", "dirname", "splitext", "split"):
        register_callable(getattr(os.path, name), _pure_on_plain)
    for name in ("exists", "isfile", "isdir", "getsize"):
        register_callable(getattr(os.path, name), KnownEffects(reads=("host",)))
    for name in ("makedirs", "mkdir", "remove"):
        register_callable(getattr(os, name), replace(HOST_WRITE, kind=""))
    # where it stands tells what is done if something raises: nothing passes it that may
    register_methods(Region, ("open", "close"), replace(HOST_WRITE, kind="", may_raise=False))
    levels = "debug info warning error exception critical log".split()
    for name in levels:
        register_callable(getattr(logging, name), HOST_WRITE)
    register_methods(logging.Logger, levels, HOST_WRITE)


def _copy(call: CallShape) -> Answer:
    plain = bool(call.positional) and is_plain(call.positional[0])
    return KnownEffects(alias=("arg0",)) if plain else None


def _deepcopy(call: CallShape) -> Answer:
    """Fresh all the way down; a type's own ``__deepcopy__`` is the user's code."""
    owner = call.positional[0] if call.positional else None
    if owner is None:
        return None
    if owner in (list, tuple, dict, set, collections.deque):
        return KnownEffects(reads=("arg0",))
    if is_plain(owner) or getattr(owner, "__deepcopy__", None) is None:
        large = issubclass(owner, (torch.nn.Module, torch.optim.Optimizer))
        return KnownEffects(reads=("arg0",), kind="copy" if large else "")
    return None


def _exception_class(obj: Any, call: CallShape) -> Answer:
    if isinstance(obj, type) and issubclass(obj, BaseException) and obj.__module__ == "builtins":
        return aliases_arguments(call)
    return None


def _iterators(owner: type, name: str, function: Any, call: CallShape) -> Answer:
    views: Iterable[type] = (type({}.keys()), type({}.values()), type({}.items()))
    if owner in views and name in ("isdisjoint", "mapping"):
        return _READ_OUT
    return None


def register() -> None:
    """Enter this table."""
    _register_builtins()
    _register_containers()
    _register_random()
    _register_modules()
    register_callable_rule(_exception_class)
    register_method_rule(_iterators)
