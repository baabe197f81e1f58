"""What a rewriter says about its work: remarks, and how many rewrites it may still apply."""

from __future__ import annotations

from dataclasses import dataclass

import torch.fx as fx

from rose_compiler.base.remarks import Blocker, Remark, RemarkLog
from rose_compiler.ir.deps import place


@dataclass
class Fuel:
    """How many rewrites may still be applied; ``None``: any number. Shared between passes."""

    left: int | None = None


class Reporter:
    """Adds to a log in the name of one pass, and counts its rewrites."""

    def __init__(self, log: RemarkLog, pass_name: str, fuel: Fuel | int | None) -> None:
        self.log = log
        self.pass_name = pass_name
        self.fuel = fuel if isinstance(fuel, Fuel) else Fuel(fuel)
        self.rewrites = 0

    def spend(self) -> bool:
        """Whether one more rewrite may be applied."""
        return self.fuel.left is None or self.fuel.left > 0

    def applied(
        self, node: fx.Node, why: str, code: str | None = None, gain: float | None = None
    ) -> None:
        """Report a rewrite that was done, and count it. ``gain`` in seconds an iteration."""
        self.rewrites += 1
        if self.fuel.left is not None:
            self.fuel.left -= 1
        where = place(node)
        self.log.add(
            Remark(
                "applied",
                self.pass_name,
                (where,) if where else (),
                code or self.pass_name,
                why,
                gain=gain,
            )
        )

    def missed(self, node: fx.Node, blocker: Blocker) -> None:
        """Report a rewrite that was not done, and what was in the way."""
        where = place(node)
        self.log.add(Remark.from_blocker(self.pass_name, blocker, (where,) if where else ()))
