"""Union-find."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class Groups(Generic[T]):
    """Sets of things that grow together."""

    def __init__(self) -> None:
        self.parent: dict[T, T] = {}

    def root(self, item: T) -> T:
        """One member that stands for an item's group."""
        self.parent.setdefault(item, item)
        while self.parent[item] != item:
            self.parent[item] = self.parent[self.parent[item]]
            item = self.parent[item]
        return item

    def join(self, a: T, b: T) -> None:
        """Put two items, and all that is in a group with either, into one group."""
        self.parent[self.root(b)] = self.root(a)

    def join_all(self, items: Sequence[T]) -> None:
        """Put items into one group."""
        for other in items[1:]:
            self.join(items[0], other)

    def all(self) -> list[list[T]]:
        """The groups of two or more."""
        found: dict[T, list[T]] = {}
        for item in self.parent:
            found.setdefault(self.root(item), []).append(item)
        return [members for members in found.values() if len(members) > 1]
