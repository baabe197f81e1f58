"""The wrappers around a simulator's environments, each for all environments of a shard at once."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

import torch.fx as fx

from rose_compiler.base.remarks import Blocker
from rose_compiler.ir.ops import BATCH_WRAPPERS
from rose_compiler.ir.program import Program
from rose_compiler.ir.rewriter import Rewriter
from rose_compiler.passes.base import Batchable, Pass, context_of
from rose_compiler.passes.recurrence import is_step
from rose_compiler.passes.switches import switch


@dataclass(frozen=True)
class BatchWrappers(Pass):
    """Let a simulator whose environments have known wrappers run each of these once a step for a
    whole shard, while the program runs.

    Environments keep statistics of their own, so the operations are those of the wrappers, element
    by element: no bit changes. The simulator holds them against the wrappers' own code first.
    """

    name: ClassVar[str] = "batch_wrappers"

    def run_program(self, program: Program, rewrite: Rewriter) -> None:
        context = context_of(rewrite)
        for state, shards in context.wrappers.items():
            step = _first_step(program, state, rewrite)
            if step is None:
                continue
            blocker = why_not(shards, context.options.wrappers)
            if blocker is not None:
                rewrite.missed(step, blocker)
            elif rewrite.spend():
                made = switch(BATCH_WRAPPERS, program, state, step, rewrite)
                rewrite.applied(made, told(shards))


def why_not(shards: tuple[Batchable, ...], wanted: bool) -> Blocker | None:
    """Why the wrappers run one by one in every shard."""
    if not any(names for names, _, _ in shards):
        whys = dict.fromkeys(why for _, why, _ in shards if why)
        return Blocker("unsupported-shape", f"wrappers run one by one: {'; '.join(whys)}")
    if not wanted:
        return Blocker("switched-off", "the decision lets wrappers run one by one")
    return None


def told(shards: tuple[Batchable, ...]) -> str:
    """Which wrappers run for how many shards at once, from the innermost out."""
    found = Counter(names for names, _, _ in shards if names)
    parts = [f"{', '.join(reversed(names))} in {count} shards" for names, count in found.items()]
    return f"wrappers advance all environments of a shard at once: {'; '.join(parts)}"


def _first_step(program: Program, state: str, rewrite: Rewriter) -> fx.Node | None:
    """The first operation that steps the simulator."""
    for node in program.nodes():
        if is_step(node) and any(e.state == state for e in rewrite.deps.effects(node)):
            return node
    return None
