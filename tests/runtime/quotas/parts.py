"""Components for hosts under quotas."""

from __future__ import annotations

import os
from typing import Any


class Counter:
    """Counts, and can hand over how far it came."""

    def __init__(self) -> None:
        self.count = 0

    def step(self) -> int:
        """One more."""
        self.count += 1
        return self.count

    def seen(self, name: str) -> str | None:
        """A variable of its environment."""
        return os.environ.get(name)

    def get_state(self) -> Any:
        """How far it came."""
        return self.count

    def set_state(self, state: Any) -> None:
        """Go on from there."""
        self.count = state


class Stuck:
    """Counts, and can't hand anything over."""

    def __init__(self) -> None:
        self.count = 0

    def step(self) -> int:
        """One more."""
        self.count += 1
        return self.count


class Fixed(Stuck):
    """Counts, can't hand anything over, and tells of its environment."""

    def seen(self, name: str) -> str | None:
        """A variable of its environment."""
        return os.environ.get(name)


class Moody(Counter):
    """Refuses to take over a state."""

    def set_state(self, state: Any) -> None:
        """Raises."""
        raise RuntimeError("not today")


class Plain:
    """Loads no torch: its libraries count their threads as they are loaded."""

    def __init__(self) -> None:
        self.count = 0

    def step(self, x: float) -> float:
        self.count += 1
        return x + self.count

    def seen(self) -> tuple[str | None, int, int]:
        return os.environ.get("OMP_NUM_THREADS"), len(os.sched_getaffinity(0)), self.count

    def get_state(self) -> int:
        return self.count

    def set_state(self, state: int) -> None:
        self.count = state
