"""What an operation that may touch anything can have changed of a number that is held.

Nothing is known of such an operation. It may call any method within reach, those that no function
of the user's names among them: a library calls back. So a number stays as it is only where no code
within reach stores anything under a name that leads to it. Items of dicts and lists have no names.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

from rose_compiler.frontend.changes import Changes
from rose_compiler.frontend.numbers import Number, step

#: What sets an attribute of any name in code of libraries.
_FOREIGN = frozenset(("exec", "set_attr", "set_wrapper_attr"))


class Stores:
    """The names that code within reach stores under, called or not."""

    def __init__(self, changes: Changes) -> None:
        far = changes.far or changes
        self._cells = far.cells
        self._kinds = tuple(far.kinds)
        self._names: set[str] | None = {*far.attributes, *(name for _, name in far.globals)}
        if far.anything or far.names & _FOREIGN:
            self._names = None

    def name(self, name: str) -> bool:
        """Whether anything may be stored under a name."""
        return self._names is None or name in self._names

    def reach(self, number: Number, objects: Mapping[str, Any]) -> bool:
        """Whether one of the names that lead to a number may be stored under, or an item of a
        container on the way be changed."""
        at = objects.get(number.root) if isinstance(number.root, str) else number.root
        for kind, key in number.steps:
            if isinstance(at, types.CellType):
                if id(at) in self._cells or self.name("cell_contents"):
                    return True
            elif kind == "attr" and isinstance(at, self._kinds):
                return True
            elif kind == "attr" or (_is_namespace(at) and kind == "item"):
                if self.name(key):
                    return True
            elif kind != "type" and not isinstance(at, tuple | frozenset):
                return True
            try:
                at = step(at, kind, key)
            except (AttributeError, LookupError, TypeError, ValueError):
                return not number.absent  # what is not there leads nowhere
        return False


def _is_namespace(value: Any) -> bool:
    """Whether a dict holds the globals of a module."""
    return isinstance(value, dict) and "__builtins__" in value and "__name__" in value
