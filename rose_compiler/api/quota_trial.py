"""What quotas of processes are compared with: a plan, and the components that can go by it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rose_compiler.base.quota import QuotaPlan
from rose_compiler.tune.blocks import Blocks
from rose_compiler.tune.branches import Alone

#: A plan by responses in chunks of SMs, None for what the profile alone says, better than another.
Plan = Callable[[Alone | None, QuotaPlan | None], QuotaPlan]


@dataclass
class Trial:
    """A plan that meets what is in force, for the components that could be moved, by lane."""

    old: QuotaPlan | None
    new: QuotaPlan
    parts: dict[str, Any]
    blocks: Blocks = field(default_factory=Blocks)
    changed: bool = False

    @property
    def wanted(self) -> QuotaPlan | None:
        """What the next iteration is to run under; the winner once that is decided."""
        return self.new if self.blocks.new else self.old
