"""Which attributes, globals and closure variables the program itself may assign while it runs.

Capture takes an attribute path for constant (folds a number, resolves a component) only if nothing
that the program can call assigns it. What it can call is found by name: every function that a
reachable function names, and every method of that name of any class that an object within reach
has. So the answer errs to "may change".
"""

from __future__ import annotations

import ast
import builtins
import dis
import sys
import types
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from rose_compiler.frontend import liveness, source
from rose_compiler.frontend.modes import undecorated
from rose_compiler.frontend.reachable import Reachable, fields_of

#: Classes of libraries that keep configuration: nothing but the user's own statements sets them.
_CONFIGURATION = ("types", "argparse", "omegaconf", "ml_collections", "easydict", "addict", "hydra")
#: Attributes of library objects that stay as they are.
_STABLE = frozenset(
    """num_envs observation_space action_space single_observation_space single_action_space shape
    dtype device ndim n low high start nvec spec in_features out_features in_channels out_channels
    num_embeddings embedding_dim hidden_size num_layers max_episode_steps num_obs num_actions
    max_episode_length env_id id weight bias reward_range copy autoreset_mode metadata unwrapped env
    envs""".split()  # noqa: SIM905
)
_TENSOR_CONSTANTS = frozenset(("shape", "dtype", "device", "ndim", "layout"))
#: Base classes whose own methods are known not to assign what their subclasses define.
_HARMLESS = (
    *("builtins", "numpy", "torch"),
    *("gymnasium", "gym", "rose_compiler"),
)
_BORN = frozenset(("__init__", "__new__", "__post_init__", "__init_subclass__", "__set_name__"))


@dataclass
class Changes:
    """What may change: attributes by name and owning classes (``None``: any owner), globals by the
    id of their module's namespace and name, closure variables by the id of their cell."""

    attributes: dict[str, set[type | None]] = field(default_factory=dict)
    globals: set[tuple[int, str]] = field(default_factory=set)
    cells: set[int] = field(default_factory=set)
    names: set[str] = field(default_factory=set)  # every attribute name that is read
    methods: set[str] = field(default_factory=set)  # of any class of the user's within reach
    anything: bool = False  # an attribute is set by a name that is not known
    modules: bool = False  # of what may be a module
    uncalled: list[types.FunctionType] = field(default_factory=list)  # methods that nothing names

    def attribute(self, owner: Any, name: str) -> bool:
        """Whether ``owner.name`` may be another object later."""
        if isinstance(owner, types.ModuleType):
            return self.modules or self.global_(vars(owner), name)
        value = _own(owner, name)
        if isinstance(owner, (torch.Tensor, np.ndarray)):
            return name not in _TENSOR_CONSTANTS and value is not _ABSENT
        if isinstance(owner, torch.nn.Module) and name == "training":
            return True
        if self.anything and value is not _ABSENT:
            return True
        kinds = self.attributes.get(name, ())
        if None in kinds and value is not _ABSENT:
            return True
        if any(k is not None and isinstance(owner, k) for k in kinds):
            return True
        if value is _ABSENT or source.is_user_type(type(owner)):
            return False
        if (type(owner).__module__ or "").split(".")[0] in _CONFIGURATION:
            return False
        return name not in _STABLE and not _stays(value)

    def global_(self, space: dict[str, Any], name: str) -> bool:
        """Whether a global variable may be rebound."""
        return (id(space), name) in self.globals

    def cell(self, cell: types.CellType) -> bool:
        """Whether a closure variable may be rebound."""
        return id(cell) in self.cells


_ABSENT = object()


def _own(owner: Any, name: str) -> Any:
    """An attribute that is data of the object, not of its class; properties count as data."""
    for key, value in fields_of(owner):
        if key == name:
            return value
    if isinstance(owner, torch.nn.Module):
        for pool in (owner._parameters, owner._buffers, owner._modules):
            if name in pool:
                return pool[name]
    for cls in type(owner).__mro__:
        if name in cls.__dict__:
            raw = cls.__dict__[name]
            kinds = (types.FunctionType, staticmethod, classmethod)
            if isinstance(raw, kinds) or not hasattr(type(raw), "__get__"):
                return _ABSENT
            try:
                found = getattr(owner, name) if not source.is_user_type(cls) else raw
            except Exception:  # a property of a library that can't be read now
                return raw
            return _ABSENT if callable(found) else found
    return _ABSENT


def _stays(value: Any) -> bool:
    """Whether a library keeps such an object where it is: components, spaces, functions."""
    if isinstance(value, (torch.nn.Module, torch.optim.Optimizer, torch.nn.Parameter)):
        return True
    module = type(value).__module__ or ""
    return callable(value) or module.startswith(("gymnasium", "envpool", "rose_compiler"))


def find_changes(function: source.FunctionSource, arguments: dict[str, Any]) -> Changes:
    """What a call of a function with these arguments may assign."""
    return _Finder(function, arguments).run()


@dataclass(frozen=True)
class _Store:
    """One assignment of an attribute (no name: any): to what, inside which class's method."""

    name: str
    receiver: ast.expr
    function: types.FunctionType
    owner: type | None
    self_name: str | None


class _Finder:
    def __init__(self, function: source.FunctionSource, arguments: dict[str, Any]) -> None:
        self.changes = Changes()
        self.start = function
        self.arguments = arguments
        self.reached = Reachable()
        self.stores: list[_Store] = []
        self._queue: list[tuple[types.FunctionType, type | None]] = []
        self._seen: set[tuple[types.CodeType, type | None]] = set()
        self._classes: dict[type, None] = {}

    def run(self) -> Changes:
        self.reached.add(self.arguments.values())
        owner = None
        if self.start.bound is not None:
            owner = _defining(type(self.start.bound), self.start.fn)
        self._enqueue(self.start.fn, owner)
        done: tuple[int, int, int, int] | None = None
        while done != (now := self._size()):
            done = now
            for fn in list(self.reached.functions):
                self._enqueue(fn, None)
            for cls in list(self.reached.types):
                self._methods(cls)
            while self._queue:
                self._scan(*self._queue.pop())
        for store in self.stores:
            self._record(store)
        return self.changes

    def _size(self) -> tuple[int, int, int, int]:
        reached = self.reached
        return len(reached.types), len(reached.functions), len(self.changes.names), len(self._seen)

    def _enqueue(self, fn: Any, owner: type | None) -> None:
        if not isinstance(fn, types.FunctionType):
            return
        self._enqueue(fn.__dict__.get("__wrapped__"), owner)  # of a library's decorator
        fn, _ = undecorated(fn)
        if (fn.__code__, owner) in self._seen:
            return
        self._seen.add((fn.__code__, owner))
        self._queue.append((fn, owner))

    def _methods(self, cls: type) -> None:
        """Methods of a class that may be called: special ones, and those that a function names."""
        if not source.is_user_type(cls):
            return
        for base in cls.__mro__:
            package = (base.__module__ or "").split(".")[0]
            harmless = package in _HARMLESS or package in sys.stdlib_module_names
            if harmless and not source.is_user_type(base):
                continue
            for name, raw in list(base.__dict__.items()):
                if not name.startswith("__") and callable(getattr(base, name, None)):
                    self.changes.methods.add(name)
                special = name.startswith("__") and name.endswith("__")
                called = name in self.changes.names or name == "forward" or special
                for fn in _functions_in(raw):
                    if called:
                        self._enqueue(fn, base)
                    elif isinstance(fn, types.FunctionType):
                        self.changes.uncalled.append(fn)

    def _scan(self, fn: types.FunctionType, owner: type | None) -> None:
        if owner is None and not source.is_user_code(fn):
            return
        node = source.tree(fn)
        if node is None:
            # what `dataclass` writes sets the fields of the new object only
            stores = not (fn.__name__ in _BORN and hasattr(owner, "__dataclass_fields__"))
            self._scan_code(fn.__code__, fn, stores)
            return
        spec = node.args
        first = next(iter((*spec.posonlyargs, *spec.args)), None)
        self_name = first.arg if first is not None and owner is not None else None
        born = fn.__name__ in _BORN
        local = set(liveness.assigned(node.body)) | {a.arg for a in source.arguments(spec)}
        for part in ast.walk(node):
            if isinstance(part, ast.Attribute):
                self._attribute(part, fn, owner, self_name, born)
            elif isinstance(part, ast.Name) and part.id not in local:
                self._name(part.id, fn)
            elif isinstance(part, ast.Global):
                self.changes.globals |= {(id(fn.__globals__), n) for n in part.names}
            elif isinstance(part, ast.Nonlocal):
                cells = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))
                self.changes.cells |= {id(cells[n]) for n in part.names if n in cells}
            elif isinstance(part, ast.Call):
                self._call(part, fn, owner, self_name)

    def _scan_code(self, code: types.CodeType, fn: types.FunctionType, stores: bool) -> None:
        """What a function without source, a lambda for instance, does by its bytecode."""
        for instruction in dis.get_instructions(code):
            name = instruction.argval
            if instruction.opname in ("STORE_ATTR", "DELETE_ATTR"):
                if stores:
                    self.changes.attributes.setdefault(name, set()).add(None)
            elif instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                self.changes.globals.add((id(fn.__globals__), name))
            elif instruction.opname == "STORE_DEREF" and name in fn.__code__.co_freevars:
                cell = (fn.__closure__ or ())[fn.__code__.co_freevars.index(name)]
                self.changes.cells.add(id(cell))
            elif instruction.opname in (
                "LOAD_GLOBAL",
                "LOAD_NAME",
                "LOAD_DEREF",
                "LOAD_CLASSDEREF",
            ):
                if name in ("setattr", "delattr", "vars"):
                    self.changes.anything = self.changes.modules = True
                self._name(name, fn)
            elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                self.changes.names.add(name)
            elif isinstance(name, types.CodeType):
                self._scan_code(name, fn, stores)

    def _attribute(
        self,
        part: ast.Attribute,
        fn: types.FunctionType,
        owner: type | None,
        self_name: str | None,
        born: bool,
    ) -> None:
        name = mangled(part.attr, owner.__name__ if owner is not None else None)
        if isinstance(part.ctx, ast.Load):
            self.changes.names.add(name)
            return
        on_self = isinstance(part.value, ast.Name) and part.value.id == self_name
        if not (born and on_self):
            self.stores.append(_Store(name, part.value, fn, owner, self_name))

    def _name(self, name: str, fn: types.FunctionType) -> None:
        """A function, a class or an object that a function names."""
        value = _outer(name, fn)
        if isinstance(value, types.FunctionType):
            self._enqueue(value, None)
        elif value is not _ABSENT:
            self.reached.add([value])
            if value is exec:
                self.changes.names.add("exec")

    def _call(
        self, call: ast.Call, fn: types.FunctionType, owner: type | None, self_name: str | None
    ) -> None:
        """Attributes set by name: ``setattr``, ``__setattr__``, ``vars(x).update``."""
        name, args = "", list(call.args)
        if isinstance(call.func, ast.Name):
            name = call.func.id
        elif isinstance(call.func, ast.Attribute):
            name = call.func.attr
            if name in ("__setattr__", "__delattr__") and len(args) < 3:
                args = [call.func.value, *args]
            space = _namespace_of(call.func.value)
            if name in ("update", "clear", "pop", "setdefault") and space is not None:
                self.stores.append(_Store("", space, fn, owner, self_name))
        if name not in ("setattr", "delattr", "__setattr__", "__delattr__") or len(args) < 2:
            return
        found = args[1].value if isinstance(args[1], ast.Constant) else None
        if isinstance(found, str) or source.is_user_code(fn):
            said = found if isinstance(found, str) else ""
            self.stores.append(_Store(said, args[0], fn, owner, self_name))

    # -- receivers -----------------------------------------------------------------------------

    def _record(self, store: _Store) -> None:
        kinds = self._types(store.receiver, store)
        if not store.name:
            self.changes.anything = True
            module = kinds is None or any(issubclass(k, types.ModuleType) for k in kinds)
            self.changes.modules |= module
            return
        found = self.changes.attributes.setdefault(store.name, set())
        if kinds is None:
            found.add(None)
            return
        for kind in kinds:
            if issubclass(kind, types.ModuleType):
                value = self._live(store.receiver, store)
                if value is not _ABSENT:
                    self.changes.globals.add((id(vars(value)), store.name))
            found.add(kind)

    def _types(self, receiver: ast.expr, store: _Store) -> set[type] | None:
        """The classes that a receiver may be an instance of; ``None`` if that is not known."""
        if isinstance(receiver, ast.Name):
            if receiver.id == store.self_name and store.owner is not None:
                return {store.owner}
            value = self._live(receiver, store)
            return None if value is _ABSENT else {type(value)}
        if isinstance(receiver, ast.Attribute):
            bases = self._types(receiver.value, store)
            if bases is None or any(s.name in ("", receiver.attr) for s in self.stores):
                return None
            found: set[type] = set()
            for (kind, name), seen in self.reached.attributes.items():
                if name == receiver.attr and any(issubclass(kind, b) for b in bases):
                    found |= seen
            return found or None
        return None

    def _live(self, receiver: ast.expr, store: _Store) -> Any:
        if not isinstance(receiver, ast.Name):
            return _ABSENT
        if store.function.__code__ is self.start.fn.__code__ and receiver.id in self.arguments:
            stored = set(liveness.assigned(self.start.node.body))
            return _ABSENT if receiver.id in stored else self.arguments[receiver.id]
        node = source.tree(store.function)
        local: set[str] = set()
        if node is not None:
            local = set(liveness.assigned(node.body)) | {a.arg for a in source.arguments(node.args)}
        return _ABSENT if receiver.id in local else _outer(receiver.id, store.function)


def mangled(name: str, owner: str | None) -> str:
    """An attribute's name as the compiler spells it inside a class."""
    if owner is None or not name.startswith("__") or name.endswith("__"):
        return name
    return f"_{owner.lstrip('_')}{name}"


def _namespace_of(space: ast.expr) -> ast.expr | None:
    """What ``x.__dict__``, ``vars(x)`` or ``globals()`` belongs to."""
    if isinstance(space, ast.Attribute):
        return space.value if space.attr == "__dict__" else None
    if not (isinstance(space, ast.Call) and isinstance(space.func, ast.Name)):
        return None
    return (*space.args, space)[0] if space.func.id in ("vars", "globals") else None


def _outer(name: str, fn: types.FunctionType) -> Any:
    """What a free name of a function stands for now."""
    if name in fn.__code__.co_freevars:
        try:
            return (fn.__closure__ or ())[fn.__code__.co_freevars.index(name)].cell_contents
        except ValueError:
            return _ABSENT
    if name in fn.__globals__:
        return fn.__globals__[name]
    return _ABSENT if not hasattr(builtins, name) else getattr(builtins, name)


def _functions_in(raw: Any) -> list[Any]:
    """The functions behind an entry of a class: a method, a property, a cached one."""
    if isinstance(raw, (staticmethod, classmethod)):
        return [raw.__func__]
    if isinstance(raw, property):
        return [f for f in (raw.fget, raw.fset, raw.fdel) if f is not None]
    return [getattr(raw, "func", raw)]


def _defining(cls: type, fn: types.FunctionType) -> type | None:
    """The class of a method resolution order whose method a function is."""
    for base in cls.__mro__:
        for raw in base.__dict__.values():
            for found in _functions_in(raw):
                if isinstance(found, types.FunctionType) and undecorated(found)[0] is fn:
                    return base
    return None
