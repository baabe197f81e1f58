"""Which attributes of which objects a call reaches and assigns, seen while it runs.

For the length of a call the classes of watched objects get a ``__getattribute__`` and a
``__setattr__`` that take notes. Afterwards classes are as before, and cost what they cost before.
Tensors that are handed to numpy or turned into lists are seen likewise: torch has no operator for
that.
"""

from __future__ import annotations

import sys
import sysconfig
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from rose_compiler.base.errors import SourceLocation

_PACKAGE = str(Path(__file__).resolve().parents[1])
_LIBRARIES = tuple({sysconfig.get_paths()[k] for k in ("stdlib", "purelib", "platlib")})
# of a type's flags: it is no static type of C code; its attributes can't be set
_HEAP, _IMMUTABLE = 1 << 9, 1 << 8
_MODULE = frozenset(vars(torch.nn.Module())) - {"training"}
_READERS = ("numpy", "tolist")


@dataclass
class Touched:
    """Attributes by the owner's name and their own: reached ones with their value, and all lines
    that reached or assigned one."""

    values: dict[tuple[str, str], Any] = field(default_factory=dict)
    lines: dict[tuple[str, str], dict[SourceLocation, None]] = field(default_factory=dict)
    tensors: list[torch.Tensor] = field(default_factory=list)  # read by numpy or as a list

    def line_of(self, owner: str, name: str) -> SourceLocation | None:
        """The line that changed an attribute: the first that assigns it, stores to an item of it or
        calls a method of it, as far as the text tells; else the first that reached it."""
        found = list(self.lines.get((owner, name), ()))
        for line in found:
            text = line.source or ""
            before, _, rest = text.partition(f".{name}")
            stores = "=" in rest.replace("==", "") and not before.rstrip().endswith("=")
            if stores or rest.startswith("."):
                return line
        return found[0] if found else None


class Attributes:
    """Watches attributes of ``things``, live objects with the names they are told by."""

    def __init__(self, things: Iterable[tuple[str, Any]]) -> None:
        self._owners: dict[int, tuple[str, Any]] = {}
        self._classes: dict[type, None] = {}
        for name, thing in things:
            cls = type(thing)
            if _written_by_users(cls):
                self._owners.setdefault(id(thing), (name, thing))
                self._classes.setdefault(cls)

    @contextmanager
    def noting(self) -> Iterator[Touched]:
        """Note what is touched in this context, on any thread."""
        touched = Touched()
        with _patched(list(self._patches()), (self._owners, touched)):
            yield touched

    def _patches(self) -> Iterator[tuple[type, str, Making]]:
        for cls in self._classes:
            yield cls, "__getattribute__", _reads
            yield cls, "__setattr__", _writes
        for name in _READERS:
            yield torch.Tensor, name, _tensor_reads


#: Watched objects by identity, each with its name, and where notes of them go.
_Watcher = tuple[dict[int, tuple[str, Any]], Touched]


@contextmanager
def _patched(patches: list[tuple[type, str, Making]], watcher: _Watcher) -> Iterator[None]:
    """Let attributes of classes take notes for a watcher. Several may watch the same class, in
    several threads: the last one to end, whichever that is, leaves it as the first one found it."""
    done: list[tuple[type, str]] = []
    try:
        for cls, name, make in patches:
            with _patching:
                done.append((cls, name))
                hook = _hooks.get((cls, name))
                if hook is None:
                    hook = _Hook(getattr(cls, name), cls.__dict__.get(name), make)
                    _hooks[cls, name] = hook
                    type.__setattr__(cls, name, hook)
                hook.watchers += (watcher,)
        yield
    finally:
        for cls, name in reversed(done):
            with _patching:
                _unwatched(cls, name, watcher)


def _unwatched(cls: type, name: str, watcher: _Watcher) -> None:
    hook = _hooks.get((cls, name))
    if hook is None:
        return
    hook.watchers = tuple(w for w in hook.watchers if w is not watcher)
    if hook.watchers:
        return
    del _hooks[cls, name]
    if hook.before is not None:
        type.__setattr__(cls, name, hook.before)
    elif name in cls.__dict__:
        type.__delattr__(cls, name)


class _Hook:
    """A method that takes notes; a copy that is pickled with its class is the method itself."""

    def __init__(self, original: Callable[..., Any], before: Any, make: Making) -> None:
        self.original = original
        self.before = before  # what the class itself had, None where it inherits
        self.watchers: tuple[_Watcher, ...] = ()
        self.call = make(self)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else self.call.__get__(instance, owner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    def __reduce__(self) -> Any:
        return _same, (self.original,)


Making = Callable[[_Hook], Callable[..., Any]]
_hooks: dict[tuple[type, str], _Hook] = {}
_patching = threading.Lock()


def _same(value: Any) -> Any:
    return value


def _reads(hook: _Hook) -> Callable[..., Any]:
    original = hook.original

    def __getattribute__(self: Any, name: str) -> Any:
        value = original(self, name)
        for owners, touched in hook.watchers:
            found = owners.get(id(self))
            if found is not None and not name.startswith("__") and name not in _MODULE:
                touched.values.setdefault((found[0], name), value)
                _line(touched, found[0], name)
        return value

    return __getattribute__


def _writes(hook: _Hook) -> Callable[..., Any]:
    original = hook.original

    def __setattr__(self: Any, name: str, value: Any) -> None:
        original(self, name, value)
        for owners, touched in hook.watchers:
            found = owners.get(id(self))
            if found is not None:
                _line(touched, found[0], name)

    return __setattr__


def _tensor_reads(hook: _Hook) -> Callable[..., Any]:
    def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        for _, touched in hook.watchers:
            touched.tensors.append(self)
        return hook.original(self, *args, **kwargs)

    return read


def _line(touched: Touched, owner: str, name: str) -> None:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_PACKAGE, "<", *_LIBRARIES)):
            touched.lines.setdefault((owner, name), {})[SourceLocation(file, frame.f_lineno)] = None
            return
        frame = frame.f_back


def _written_by_users(cls: type) -> bool:
    if not cls.__flags__ & _HEAP or cls.__flags__ & _IMMUTABLE or issubclass(cls, type):
        return False
    if cls.__module__ in sys.builtin_module_names:
        return False
    module = sys.modules.get(cls.__module__)
    file = getattr(module, "__file__", None)
    return file is None or not file.startswith((_PACKAGE, *_LIBRARIES))
