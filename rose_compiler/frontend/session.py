"""What one capture shares between the functions it enters: roots, constants, what may change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rose_compiler.base.errors import SourceLocation
from rose_compiler.base.regions import Region
from rose_compiler.frontend.changes import Changes
from rose_compiler.frontend.names import StateNames


@dataclass(frozen=True)
class Static:
    """A name or path that stands for a live object known at capture.

    ``root`` is the state root it lies below, ``path`` the attributes that lead there. Without a
    root it is a function, class or module, which statements look up by themselves.
    """

    value: Any
    root: str
    path: str = ""

    @property
    def full(self) -> str:
        return f"{self.root}.{self.path}" if self.path else self.root


@dataclass
class Session:
    """What one capture shares between all scopes: roots, folded configuration, what may change."""

    changes: Changes = field(default_factory=Changes)
    roots: dict[str, Any] = field(default_factory=dict)
    folded: dict[str, Any] = field(default_factory=dict)  # path -> value seen
    new_root: Callable[[str, Any], None] = lambda name, value: None
    rebindable: dict[str, Callable[[], Any]] = field(default_factory=dict)  # global/closure roots
    names: StateNames = field(default_factory=lambda: StateNames({}))
    # what loops of the function do, by their lines: "steps" a simulator, "trains"
    loops: dict[SourceLocation, set[str]] = field(default_factory=dict)
    trains: bool = False  # anywhere
    integers: set[str] = field(default_factory=set)  # arguments that are values, whole numbers
    regions: list[Region] = field(default_factory=list)  # of `with` statements seen through
    _root_of: dict[int, str] = field(default_factory=dict)

    def arguments(self, values: dict[str, Any]) -> None:
        """Make roots of the live objects among a call's arguments, all at once: each then has its
        own name, whatever leads to it besides."""
        self.names = StateNames(values)
        for name, value in values.items():
            if self.names.path_of(value) == name:
                self._new(name, value)

    def root(self, stem: str, value: Any, current: Callable[[], Any] | None = None) -> Static:
        """A live object by the shortest path to it; a new root for one that no path leads to.

        ``current`` reads the global or closure variable again that it was found in.
        """
        found = self.names.path_of(value) or self._root_of.get(id(value))
        if found is not None:
            if current is not None and found not in self.rebindable:
                key = f"<{stem}>"
                self.rebindable.setdefault(key, current)
                self.folded.setdefault(key, value)
            root, _, path = found.partition(".")
            return Static(value, root, path)
        name = stem
        n = 1
        while name in self.roots:
            name = f"{stem}_{n}"
            n += 1
        self.names.add(name, value)
        if current is not None:
            self.rebindable[name] = current
        self._new(name, value)
        return Static(value, name)

    def _new(self, name: str, value: Any) -> None:
        self.roots[name] = value
        self._root_of[id(value)] = name
        self.new_root(name, value)

    def static(self, value: Any, root: str, path: str) -> Static:
        """A live object by its shortest path from any root."""
        shortest = self.names.path_of(value) if root else None
        if shortest is not None:
            root, _, path = shortest.partition(".")
        return Static(value, root, path)
