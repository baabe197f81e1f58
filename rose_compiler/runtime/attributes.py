"""Which attributes of which objects a call reaches and assigns, seen while it runs.

For the length of a call the classes of watched objects get a ``__getattribute__`` and a
``__setattr__`` that take notes. Afterwards classes are as before, and cost what they cost before.
Tensors that are handed to numpy or turned into lists are seen likewise: torch has no operator for
that.
"""

from __future__ import annotations

import sys
import sysconfig
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
        with _patched(list(self._patches(touched))):
            yield touched

    def _patches(self, touched: Touched) -> Iterator[tuple[type, str, Any]]:
        for cls in self._classes:
            yield cls, "__getattribute__", _reads(cls.__getattribute__, self._owners, touched)
            yield cls, "__setattr__", _writes(cls.__setattr__, self._owners, touched)
        for name in _READERS:
            yield torch.Tensor, name, _tensor_reads(getattr(torch.Tensor, name), touched)


@contextmanager
def _patched(patches: list[tuple[type, str, Any]]) -> Iterator[None]:
    """Set attributes of classes, and put them back."""
    done: list[tuple[type, str, Any]] = []
    try:
        for cls, name, value in patches:
            done.append((cls, name, cls.__dict__.get(name)))
            type.__setattr__(cls, name, value)
        yield
    finally:
        for cls, name, before in reversed(done):
            if before is None:
                type.__delattr__(cls, name)
            else:
                type.__setattr__(cls, name, before)


class _Hook:
    """A method that takes notes; a copy that is pickled with its class is the method itself."""

    def __init__(self, original: Callable[..., Any], call: Callable[..., Any]) -> None:
        self.original = original
        self.call = call

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else self.call.__get__(instance, owner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    def __reduce__(self) -> Any:
        return _same, (self.original,)


def _same(value: Any) -> Any:
    return value


def _reads(
    original: Callable[..., Any], owners: dict[int, tuple[str, Any]], touched: Touched
) -> Any:
    def __getattribute__(self: Any, name: str) -> Any:
        value = original(self, name)
        found = owners.get(id(self))
        if found is not None and not name.startswith("__") and name not in _MODULE:
            touched.values.setdefault((found[0], name), value)
            _line(touched, found[0], name)
        return value

    return _Hook(original, __getattribute__)


def _writes(
    original: Callable[..., Any], owners: dict[int, tuple[str, Any]], touched: Touched
) -> Any:
    def __setattr__(self: Any, name: str, value: Any) -> None:
        original(self, name, value)
        found = owners.get(id(self))
        if found is not None:
            _line(touched, found[0], name)

    return _Hook(original, __setattr__)


def _tensor_reads(original: Callable[..., Any], touched: Touched) -> Any:
    def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        touched.tensors.append(self)
        return original(self, *args, **kwargs)

    return _Hook(original, read)


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
