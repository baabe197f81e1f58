"""Lanes whose tasks begin and end at random moments: a missing wait shows as another result."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

from rose_compiler.runtime.lanes import Lane, Task, ThreadLane
from rose_compiler.runtime.support import Runtime

#: Seconds that a task may be held up, in front of it and behind.
DELAYS = (0, 0, 0, 0.0005)


class SlowLane(ThreadLane):
    """A thread lane whose tasks begin and end at random moments."""

    def __init__(self, name: str, seed: int) -> None:
        super().__init__(name)
        self.random = random.Random(f"{name} {seed}")

    def submit(self, site: int, fn: Callable[..., Any], *args: Any) -> Task:
        before, after = self.random.choice(DELAYS), self.random.choice(DELAYS)

        def slow(*given: Any) -> Any:
            if before:
                time.sleep(before)
            result = fn(*given)
            if after:
                time.sleep(after)
            return result

        return super().submit(site, slow, *args)


class SlowRuntime(Runtime):
    """All lanes are slow threads; ``seed`` decides how slow they are when."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.seed = seed

    def _make(self, name: str) -> Lane:
        return SlowLane(name, self.seed)
