"""What code that a program may call assigns, by its source."""

from __future__ import annotations

import ast
import builtins
import dis
import sys
import types
from dataclasses import dataclass, replace
from typing import Any

from rose_compiler.frontend import liveness, setting, source
from rose_compiler.frontend.changes import Changes, mangled
from rose_compiler.frontend.modes import undecorated
from rose_compiler.frontend.reachable import HOOKS_OF_ALL, Reachable

_ABSENT = object()
_NOTHING = ast.Constant(None)
#: Base classes whose own methods are known not to assign what their subclasses define.
_HARMLESS = (
    *("builtins", "numpy", "torch"),
    *("gymnasium", "gym", "rose_compiler"),
)
_BORN = frozenset(("__init__", "__new__", "__post_init__", "__init_subclass__", "__set_name__"))


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
        self._born: list[_Store] = []  # of objects that are being made
        self._again = False  # `__init__` is called for one that was made before
        self._all = False  # any method may be called
        self._stored: set[str] = set()
        self._texts: set[str] = set()  # what may be the name of a method
        self._bases: set[type] = set()

    def run(self) -> Changes:
        self.reached.add(self.arguments.values())
        for table in HOOKS_OF_ALL:
            self.reached.add(table.values())
        owner = None
        if self.start.bound is not None:
            owner = _defining(type(self.start.bound), self.start.fn)
        self._enqueue(self.start.fn, owner)
        self._settle()
        near = self._recorded()
        if not self._all:
            self._all = True
            self._settle()
            near.far = self._recorded()
        return near

    def _settle(self) -> None:
        """Look at all code that may be called."""
        done: tuple[int, ...] | None = None
        while done != (now := self._size()):
            done = now
            for fn in list(self.reached.functions):
                self._enqueue(fn, None)
            for cls in list(self.reached.types):
                self._methods(cls)
            while self._queue:
                self._scan(*self._queue.pop())

    def _recorded(self) -> Changes:
        """What the code seen so far changes."""
        seen = self.changes
        found = Changes(
            {name: set(kinds) for name, kinds in seen.attributes.items()},
            *(set(seen.globals), set(seen.cells), set(seen.names), set(seen.methods)),
            anything=seen.anything or self.reached.holds(setattr, delattr),
            modules=seen.modules,
        )
        found.modules |= found.anything
        for store in (*self.stores, *(self._born if self._again else ())):
            self._record(store, found)
        for cls in self._bases:
            for name in setting.inherited(cls)[1]:
                found.attributes.setdefault(name, set()).add(cls)
        return found

    def _size(self) -> tuple[int, ...]:
        reached, seen = self.reached, self.changes
        sizes = (reached.types, reached.functions, seen.names, self._seen, self._stored)
        return (*(len(each) for each in sizes), len(self._texts), self._all)

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
        mentioned, stored = setting.inherited(cls)
        if stored:
            self._bases.add(cls)
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
                called |= self._all or name in self._texts or name in mentioned
                called |= isinstance(raw, property) and name in self._stored
                for fn in _functions_in(raw):
                    if called:
                        self._enqueue(fn, base)

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
        parents = setting.parents_of(node)
        for part in ast.walk(node):
            self._into(part, parents, _Store("", _NOTHING, fn, owner, self_name), born)
            if isinstance(part, ast.Attribute):
                self._attribute(part, fn, owner, self_name, born)
            elif isinstance(part, ast.Name) and part.id not in local:
                self._name(part.id, fn)
                around = parents.get(part)
                named = isinstance(around, ast.Call) and around.func is part
                if part.id in setting.SETTERS and not named:
                    self.changes.anything = True  # called by another name
            elif isinstance(part, ast.Global):
                self.changes.globals |= {(id(fn.__globals__), n) for n in part.names}
            elif isinstance(part, ast.Nonlocal):
                cells = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))
                self.changes.cells |= {id(cells[n]) for n in part.names if n in cells}
            elif isinstance(part, ast.Call):
                self._call(part, fn, owner, self_name, node)
            elif isinstance(part, ast.Constant) and isinstance(part.value, str):
                self._texts.update(part.value.split("."))

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
                    self.changes.anything = True
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
            self._read(name, part, fn, self_name)
            return
        self._stored.add(name)
        # other attributes, and all of another class, stand there then
        said = "" if name in ("__dict__", "__class__") else name
        self._add(_Store(said, part.value, fn, owner, self_name), born)

    def _add(self, store: _Store, born: bool) -> None:
        to = store.receiver
        on_self = isinstance(to, ast.Name) and to.id == store.self_name
        (self._born if born and on_self else self.stores).append(store)

    def _read(
        self, name: str, part: ast.Attribute, fn: types.FunctionType, self_name: str | None
    ) -> None:
        """What a function may call by an attribute."""
        held = _outer(part.value.id, fn) if isinstance(part.value, ast.Name) else _ABSENT
        if isinstance(held, types.ModuleType):
            found = vars(held).get(name)
            if source.is_user_module(held) or not isinstance(found, types.FunctionType | type):
                if isinstance(found, types.FunctionType):
                    self._enqueue(found, None)
                else:
                    self.reached.add([found])
        elif name == "__init__" and isinstance(part.value, ast.Name):
            self._again |= not isinstance(held, type)

    def _into(self, part: ast.AST, parents: dict[ast.AST, ast.AST], at: _Store, born: bool) -> None:
        """What is stored in all attributes of an object, as a dict."""
        if not setting.is_namespace(part) or not source.is_user_code(at.function):
            return
        assert isinstance(part, ast.Attribute | ast.Call)
        names = setting.stored_in(part, parents)
        for name in [""] if names is None else names:
            self._add(replace(at, name=name, receiver=setting.owner_of(part)), born)

    def _name(self, name: str, fn: types.FunctionType) -> None:
        """A function, a class or an object that a function names."""
        value = _outer(name, fn)
        if isinstance(value, types.FunctionType):
            self._enqueue(value, None)
        elif value is not _ABSENT:
            if name not in setting.SETTERS:
                self.reached.add([value])
            if value is exec or value is eval:
                self.changes.names.add("exec")

    def _call(
        self,
        call: ast.Call,
        fn: types.FunctionType,
        owner: type | None,
        self_name: str | None,
        node: ast.AST,
    ) -> None:
        """Attributes set, and methods found, by name: ``setattr``, ``__setattr__``, ``getattr``."""
        name, args = "", list(call.args)
        if isinstance(call.func, ast.Name):
            name = call.func.id
        elif isinstance(call.func, ast.Attribute):
            name = call.func.attr
            if name in ("__setattr__", "__delattr__") and len(args) < 3:
                args = [call.func.value, *args]
        if name in setting.FINDERS and source.is_user_code(fn):
            self._found_by(call, name, fn, node)
        if name not in ("setattr", "delattr", "__setattr__", "__delattr__") or len(args) < 2:
            return
        found = setting.names_of(args[1], node)
        if found is None and not source.is_user_code(fn):
            return
        for said in [""] if found is None else found:
            self._stored.add(said)
            self._add(_Store(said, args[0], fn, owner, self_name), fn.__name__ in _BORN)

    def _found_by(self, call: ast.Call, name: str, fn: types.FunctionType, node: ast.AST) -> None:
        """Methods that are looked up by a name which is not written out: any may be called."""
        args = call.args
        if name in ("getattr", "getattr_static"):
            held = _outer(args[0].id, fn) if args and isinstance(args[0], ast.Name) else None
            if isinstance(held, types.ModuleType) and not source.is_user_module(held):
                return
            args = args[1:]
        asked = args[-1:] if name == "__getattribute__" else args[:1]
        if fn.__name__ in ("__getattr__", "__getattribute__", *_BORN):
            return  # what it is asked for is named where it is asked
        if not asked or setting.names_of(asked[0], node) is None:
            self._all = True

    # -- receivers -----------------------------------------------------------------------------

    def _record(self, store: _Store, changes: Changes) -> None:
        kinds = self._types(store.receiver, store)
        if not store.name:
            module = kinds is None or any(issubclass(k, types.ModuleType) for k in kinds)
            changes.modules |= module
            changes.kinds |= kinds or set()
            # what objects hold that are none, their classes have
            wide = kinds is None or any(issubclass(k, type | types.ModuleType) for k in kinds)
            changes.anything |= wide
            return
        found = changes.attributes.setdefault(store.name, set())
        if kinds is None:
            found.add(None)
            return
        for kind in kinds:
            if issubclass(kind, types.ModuleType):
                value = self._live(store.receiver, store)
                if value is not _ABSENT:
                    changes.globals.add((id(vars(value)), store.name))
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
