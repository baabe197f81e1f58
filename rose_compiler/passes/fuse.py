"""Many small operations of an update as few: optimizer steps by one kernel for all parameters of a
group, a loss and its ``backward``, and graphs without gradients, by what Inductor compiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.fx as fx

from rose_compiler.base.remarks import Blocker
from rose_compiler.ir.deps import title
from rose_compiler.ir.ops import FUSE
from rose_compiler.ir.program import Program, is_call, op_of
from rose_compiler.ir.rewriter import Rewriter
from rose_compiler.passes.base import Pass, PassContext, context_of
from rose_compiler.passes.fuse_graphs import fuse_graphs
from rose_compiler.passes.fuse_losses import fuse_losses
from rose_compiler.passes.fuse_replays import fuse_replays
from rose_compiler.passes.switches import switch


@dataclass(frozen=True)
class Fuse(Pass):
    """Let optimizers that can step by one kernel do so while the program runs, and let Inductor
    compile a loss together with its ``backward``, and graphs that record nothing; on a CUDA device,
    let what it compiled be captured and replayed.

    Fused kernels round otherwise than a loop over parameters, so ``numerics="bitwise"`` keeps that.
    """

    name: ClassVar[str] = "fuse"

    def run_program(self, program: Program, rewrite: Rewriter) -> None:
        fuse_losses(program, rewrite)
        fuse_graphs(program, rewrite)
        fuse_replays(program, rewrite)
        context = context_of(rewrite)
        for state, reason in context.optimizers.items():
            step = _first_step(program, state, rewrite)
            if step is None:
                continue
            blocker = why_not(state, reason, context)
            if blocker is not None:
                rewrite.missed(step, blocker)
            elif rewrite.spend():
                fuse(program, state, step, rewrite)


def why_not(state: str, reason: str | None, context: PassContext) -> Blocker | None:
    """Why the steps of an optimizer stay as they are."""
    if not context.options.fuse:
        return Blocker("switched-off", f"the decision leaves the steps of {state} unfused")
    if reason is not None:
        return Blocker("not-available", f"{state} has no fused step: {reason}")
    if context.numerics == "bitwise":
        return Blocker(
            "probe-bits-differ",
            f"a fused step of {state} rounds otherwise than one parameter after the other",
            'numerics="close"',
        )
    return None


def fuse(program: Program, state: str, step: fx.Node, rewrite: Rewriter) -> None:
    """Put the switch in front of everything else the program does."""
    made = switch(FUSE, program, state, step, rewrite)
    rewrite.applied(made, f"{title(step)} updates all parameters of a group in one kernel")


def _first_step(program: Program, state: str, rewrite: Rewriter) -> fx.Node | None:
    """The first operation that steps the optimizer."""
    for node in program.nodes():
        if not is_call(node) or "optimizer" not in op_of(node).attributes.get("calls", ()):
            continue
        if any(e.write and e.state == state for e in rewrite.deps.effects(node)):
            return node
    return None
