"""What a pass is, and what it may know.

A pass asks questions that answer ``None`` or a :class:`~rose_compiler.base.remarks.Blocker`, and
changes the program only through the rewriter it is given. So the test of legality is the
diagnostic, and every change carries the pass's name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch.fx as fx

from rose_compiler.base.decision import Decision
from rose_compiler.base.remarks import Blocker
from rose_compiler.ir import bodies
from rose_compiler.ir.losses import Loss
from rose_compiler.ir.ops import BRANCH, LOOP
from rose_compiler.ir.program import LoopView, Program, is_call, op_of
from rose_compiler.ir.raising import may_raise
from rose_compiler.ir.rewriter import Rewriter

#: How a batched operation, computed on some rows at a time, compares with the whole batch:
#: equal bits, equal within the tolerance of ``numerics="close"``, neither, or not tried.
Verdict = Literal["bits", "close", "differ", "unknown"]

#: ``probe(node, rows)``: compute the operation that ``node`` calls on consecutive groups of these
#: many rows of its batch, compare with all ``sum(rows)`` rows in one call.
Probe = Callable[[fx.Node, tuple[int, ...]], Verdict]


def declared_probe(node: fx.Node, rows: tuple[int, ...]) -> Verdict:
    """The verdict that stands in the operation's own signature, for programs that can't be run."""
    exact = op_of(node).signature.exact
    if exact is None:
        return "unknown"
    return "bits" if exact else "close"


#: The wrappers of one shard's environments that can advance at once, from the outermost in, or
#: none; why none; and the seconds of a step that this saves.
Batchable = tuple[tuple[str, ...], str, float]


@dataclass(frozen=True)
class PassContext:
    """What passes know beside the program.

    ``shards`` maps the state of a simulator to the rows of each of its independent shards, in
    order. ``asynchronous`` names the simulators whose own ``step_async``, and their shards',
    returns while the step goes on elsewhere. ``trips`` maps a loop's label to its number of trips,
    where that is known and guarded. ``run_ahead=False`` forbids to start an operation before an
    earlier one that may raise has ended. ``memory_limit`` bounds, in bytes, what collecting values
    over a loop may keep. ``optimizers`` maps the state of each optimizer to why its steps can't run
    as fused kernels, ``None`` where they can. ``losses`` maps the operation of each ``backward`` to
    the graph of the loss in front of it, or to why there is none. ``wrappers`` maps the state of a
    simulator to what can advance at once in each of its shards. ``device`` names the device on
    whose streams work may be queued (``"cuda:0"``), empty where there is none; one that is only
    planned for starts with ``"virtual:"``, and the program's tensors lie elsewhere then.
    """

    numerics: Literal["close", "bitwise"] = "close"
    options: Decision = field(default_factory=Decision)
    shards: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    asynchronous: frozenset[str] = frozenset()
    probe: Probe = declared_probe
    trips: Mapping[str, int] = field(default_factory=dict)
    run_ahead: bool = True
    memory_limit: float | None = None
    examples: Mapping[str, Any] = field(default_factory=dict)
    optimizers: Mapping[str, str | None] = field(default_factory=dict)
    losses: Mapping[str, Loss | Blocker] = field(default_factory=dict)
    wrappers: Mapping[str, tuple[Batchable, ...]] = field(default_factory=dict)
    device: str = ""


@dataclass(frozen=True)
class Pass:
    """One rewrite. Options of a pass are further fields.

    A pass defines :meth:`run`, called with each loop, innermost first, or replaces
    :meth:`run_program`. ``required`` passes can't be left out by ``ROSE_PASSES``.
    """

    name: ClassVar[str]
    required: ClassVar[bool] = False

    def run(self, loop: LoopView, rewrite: Rewriter) -> None:
        """Rewrite one loop."""
        raise NotImplementedError(f"{type(self).__name__} defines neither run nor run_program")

    def run_program(self, program: Program, rewrite: Rewriter) -> None:
        """Rewrite the program: by default, every loop that is still there."""
        for loop in program.loops():
            if not erased(loop.node):
                self.run(loop, rewrite)


def erased(node: fx.Node) -> bool:
    """Whether the node is no longer part of its graph."""
    return bool(getattr(node, "_erased", False))


def context_of(rewrite: Rewriter) -> PassContext:
    """The context a rewriter carries, or one that knows nothing."""
    found = rewrite.context
    return found if isinstance(found, PassContext) else PassContext()


#: Operations too small for anything to be won by running them beside a step.
TRIVIAL = frozenset(
    {"append", "draw_noise", "freeze", "randn", "rows", "shard", "snapshot", "state", "version"}
)


def is_work(node: fx.Node) -> bool:
    """Whether a node is an operation of the coordinator that takes time."""
    return is_call(node) and op_of(node).kind != "step" and op_of(node).name not in TRIVIAL


def raising(node: fx.Node) -> fx.Node | None:
    """The first operation that may raise, be it for values that a traced graph is given: the node
    itself, or one in the bodies of a loop or a branch. An iterator's next item is one too, which
    stands for the loop over it."""
    if not is_call(node):
        return None
    if not (is_call(node, LOOP) or is_call(node, BRANCH)):
        op = op_of(node)
        values = op.body is not None and any(map(may_raise, op.body.graph.nodes))
        return node if op.signature.may_raise or values else None
    if is_call(node, LOOP) and LoopView(node).facts.kind == "iter":
        return node
    inside = (raising(n) for graph in bodies.graphs_of(node) for n in graph.nodes)
    return next((n for n in inside if n is not None), None)
