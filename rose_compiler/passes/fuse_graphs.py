"""Traced graphs without gradients as what Inductor compiles, or TorchScript runs, for the fuse
pass."""

from __future__ import annotations

import torch.fx as fx

from rose_compiler.base.remarks import Blocker
from rose_compiler.ir.effects import RNG_TORCH
from rose_compiler.ir.ops import Op
from rose_compiler.ir.program import Program, is_call, op_of
from rose_compiler.ir.recorded import records
from rose_compiler.ir.rewriter import Rewriter
from rose_compiler.passes.base import context_of
from rose_compiler.passes.hoist_draws import drawing, replace_draws, without_draws

#: Calls of torch that a graph has at least: the checks of its arguments cost about two of them.
LEAST_CALLS = 6
#: Graphs of a program that are compiled at most, the longest ones: each takes seconds.
MOST_GRAPHS = 6


def fuse_graphs(program: Program, rewrite: Rewriter) -> None:
    """Mark graphs for Inductor or TorchScript; what is faster by it is found out when they first
    run."""
    context = context_of(rewrite)
    inductor = context.options.compile and context.numerics != "bitwise"
    script = context.options.script
    if not inductor and not script:
        return  # the remarks on losses say so
    for node in list(program.nodes()):
        _draw_in_front(node, rewrite)
    fitting = graphs(program)
    chosen = set(fitting[:MOST_GRAPHS]) if inductor else set[Op]()
    others = set(fitting) - chosen if script else set[Op]()
    made: dict[Op, Op] = {}
    for node in program.nodes():
        if not is_graph(node) or is_marked(op := op_of(node)):
            continue
        if op not in chosen and op not in others:
            if calls(op) >= LEAST_CALLS:
                rewrite.missed(node, _why_not(node))
            continue
        if op not in made and rewrite.spend():
            form = "inductor" if op in chosen else "script"
            made[op] = _marked(op, program, form)
            whose = "Inductor" if op in chosen else "TorchScript"
            rewrite.applied(node, f"a graph of {calls(op)} torch calls is for {whose}")
        if op in made:
            rewrite.retarget(node, made[op], *node.args)


def _draw_in_front(node: fx.Node, rewrite: Rewriter) -> None:
    """Let a graph that would fit but for its draws be handed its random numbers."""
    if not is_graph(node) or calls(op_of(node)) < LEAST_CALLS or not drawing(node):
        return
    signature = op_of(node).signature
    drawn = {s for s in (*(signature.reads or ()), *(signature.writes or ())) if "rng:" in s}
    blocker = _blocked(node)
    if blocker is None or blocker.code != "draw-order" or drawn != {RNG_TORCH}:
        return
    taken = without_draws(node)
    if isinstance(taken, Blocker):
        rewrite.missed(node, taken)
    elif rewrite.spend():
        replace_draws(node, taken, rewrite, alone=True)


def graphs(program: Program) -> list[Op]:
    """The graphs that can be compiled, longest first."""
    found = {op_of(n): None for n in program.nodes() if is_graph(n) and _fits(n)}
    return sorted(found, key=calls, reverse=True)


def _fits(node: fx.Node) -> bool:
    return calls(op_of(node)) >= LEAST_CALLS and _blocked(node) is None


def _blocked(node: fx.Node) -> Blocker | None:
    signature = op_of(node).signature
    if records(node):
        return Blocker("grad-graph", "it records gradients, and no backward follows it at once")
    # what is handed its random numbers draws only where it is run as written
    handed = op_of(node).attributes.get("noises", ())
    drawn = [s for s in signature.reads or () if s.startswith("rng:")]
    if drawn and not handed:
        return Blocker("draw-order", f"it draws from {drawn[0]}")
    if signature.reads is None or signature.writes not in ((), (RNG_TORCH,) if handed else ()):
        return Blocker("not-pure", "it writes what others may see")
    return None


def _why_not(node: fx.Node) -> Blocker:
    return _blocked(node) or Blocker(
        "switched-off", f"{MOST_GRAPHS} longer graphs are compiled, and each takes seconds"
    )


def is_graph(node: fx.Node) -> bool:
    """Whether a node calls a traced graph."""
    return is_call(node) and op_of(node).kind == "graph" and op_of(node).body is not None


def calls(op: Op) -> int:
    """How many calls of torch a graph is."""
    assert op.body is not None
    return sum(n.op in ("call_function", "call_method") for n in op.body.graph.nodes)


def is_marked(op: Op) -> bool:
    """Whether an operation is marked already."""
    return bool(op.attributes.get("inductor") or op.attributes.get("script"))


def _marked(op: Op, program: Program, form: str) -> Op:
    marked = op.with_signature(name=program.ops.fresh(op.name))
    fused = op.attributes.get("fused") or (op.name,)
    marked.attributes = {**op.attributes, form: True, "fused": tuple(fused)}
    return marked
