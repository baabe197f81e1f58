"""What traced code does besides calling torch: host calls, and changes of Python attributes."""

from __future__ import annotations

import dis
import functools
import gc
import os
import sys
import sysconfig
import types
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rose_compiler.base.remarks import Blocker
from rose_compiler.frontend.known import effects_of_callable
from rose_compiler.frontend.mentions import Mentions
from rose_compiler.ir.effects import GLOBAL_STATES

_LIBRARY = tuple(
    os.path.dirname(str(m.__file__)) + os.sep for m in (torch, np) if m.__file__ is not None
)
_HERE = os.path.dirname(__file__) + os.sep
#: parts of this package that traced code runs through and that hold no numbers of the user's
_AROUND = tuple(
    os.path.join(os.path.dirname(os.path.dirname(__file__)), part) + os.sep
    for part in ("api", "base", "frontend", "ir", "runtime")
)
#: what tells types apart
_KINDS = frozenset(("isinstance", "type", "is_tensor", "hasattr", "callable"))
_STDLIB = sysconfig.get_path("stdlib") + os.sep
#: modules of C code that reaches outside the process, or to other threads
_OUTSIDE = ("_io", "io", "posix", "nt", "_socket", "_queue", "_posixsubprocess", "mmap")
#: modules of the standard library that do
_OUTSIDE_PYTHON = frozenset(
    (
        *("asyncio", "concurrent", "logging", "multiprocessing", "pathlib", "queue", "shutil"),
        *("socket", "subprocess", "tempfile", "threading", "urllib", "warnings"),
    )
)


def _is_own_code(filename: str) -> bool:
    """Whether a file is neither torch's, numpy's, this package's nor the standard library's."""
    if filename.startswith((*_LIBRARY, _HERE, "<frozen")):
        return False
    return not filename.startswith(_STDLIB) or f"{os.sep}site-packages{os.sep}" in filename


class HostCalls:
    """A context that notes built-in functions called by other code than torch's and numpy's which
    touch the host: files, output, the clock, Python's generator."""

    def __init__(self) -> None:
        self.blocker: Blocker | None = None
        self.mentions = Mentions()
        self.kinds = False  # whether code asks what is None, or of which type
        self.arrays = False  # whether it hands something to a function of numpy's written in C

    def __enter__(self) -> HostCalls:
        self._outer = sys.getprofile()
        # a collection in between would run callbacks (gc.callbacks) that the code does not call
        self._collecting = gc.isenabled()
        gc.disable()
        sys.setprofile(self._event)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.setprofile(self._outer)
        if self._collecting:
            gc.enable()

    def _event(self, frame: types.FrameType, event: str, function: Any) -> None:
        if self.blocker is not None:
            return
        if event == "call":
            file = frame.f_code.co_filename
            if _is_own_code(file) and not file.startswith(_AROUND):
                self.mentions.add(frame)
                self.kinds = self.kinds or _asks_kinds(frame.f_code)
            caller = frame.f_back
            if file.startswith(_STDLIB) and _is_own_code(_outside(frame)):
                self.mentions.through(frame)
            module = str(frame.f_globals.get("__name__", "")).partition(".")[0]
            if module in _OUTSIDE_PYTHON and caller and _is_own_code(caller.f_code.co_filename):
                self._refuse(f"{module}.{frame.f_code.co_qualname}", frame)
        elif event == "c_call" and _is_own_code(frame.f_code.co_filename):
            if not frame.f_code.co_filename.startswith(_AROUND):
                self.mentions.found(frame, function)
            owner = getattr(function, "__self__", None)
            module = owner.__name__ if isinstance(owner, types.ModuleType) else _module_of(owner)
            self.arrays = self.arrays or getattr(function, "__module__", None) == "numpy"
            known = effects_of_callable(function)
            touched = {*known.reads, *known.writes} & set(GLOBAL_STATES) if known else set()
            if module in _OUTSIDE or touched - {"rng:torch"}:
                self._refuse(getattr(function, "__qualname__", str(function)), frame)

    def _refuse(self, name: str, frame: types.FrameType) -> None:
        outer: types.FrameType | None = frame
        while outer is not None:
            if outer.f_code.co_filename.startswith("<frozen importlib"):
                return  # a module is imported for the first time
            outer = outer.f_back
        self.blocker = Blocker("opaque-call", f"it calls `{name}`, which reaches outside")


def _outside(frame: types.FrameType | None) -> str:
    """The file of what called into the standard library."""
    while frame is not None and frame.f_code.co_filename.startswith(_STDLIB):
        frame = frame.f_back
    file = "" if frame is None else frame.f_code.co_filename
    return _HERE if file.startswith(_AROUND) else file


@functools.cache
def _asks_kinds(code: types.CodeType) -> bool:
    """Whether code compares with None, or asks for a type."""
    if not _KINDS.isdisjoint(code.co_names):
        return True
    return any(i.opname == "IS_OP" or "NONE" in i.opname for i in dis.get_instructions(code))


def _module_of(value: Any) -> str:
    return type(value).__module__


class Attributes:
    """A snapshot of the Python attributes of objects, to notice and undo changes.

    Covers the attributes of the objects themselves, of the modules below them, and the elements of
    lists and dicts among those attributes.
    """

    def __init__(self, roots: Sequence[Any]) -> None:
        self._objects: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
        self._containers: list[tuple[str, Any, Any]] = []
        seen: set[int] = set()
        for root in roots:
            below = root.modules() if isinstance(root, torch.nn.Module) else (root,)
            for each in below:
                self._add(each, seen)

    def _add(self, value: Any, seen: set[int]) -> None:
        attributes = getattr(value, "__dict__", None)
        if not isinstance(attributes, dict) or id(value) in seen or isinstance(value, type):
            return
        seen.add(id(value))
        owner = type(value).__name__
        self._objects.append((owner, attributes, dict(attributes)))
        for name, each in attributes.items():
            if isinstance(each, torch.nn.Module):
                for module in each.modules():
                    self._add(module, seen)
            elif type(each) in (list, dict, set) or type(each).__module__ == "collections":
                self._containers.append((f"{owner}.{name}", each, _elements(each)))

    def restore(self) -> str:
        """Put everything back; the name of an attribute that had changed, empty if none had."""
        changed = ""
        for name, container, before in self._containers:
            if _differ(_elements(container), before):
                changed = changed or name
                _refill(container, before)
        for owner, attributes, saved in self._objects:
            if _differ(attributes, saved):
                names = [
                    n for n in {**attributes, **saved} if attributes.get(n) is not saved.get(n)
                ]
                changed = changed or f"{owner}.{names[0] if names else '?'}"
                attributes.clear()
                attributes.update(saved)
        return changed


def _elements(container: Any) -> Any:
    return dict(container) if isinstance(container, dict) else list(container)


def _differ(now: Any, before: Any) -> bool:
    if isinstance(now, dict):
        return len(now) != len(before) or any(
            k not in before or before[k] is not v for k, v in now.items()
        )
    return len(now) != len(before) or any(a is not b for a, b in zip(now, before, strict=True))


def _refill(container: Any, elements: Any) -> None:
    container.clear()
    if isinstance(container, dict | set):
        container.update(elements)
    else:
        container.extend(elements)
