"""Static branches folded, dead pure work and unread results dropped."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch.fx as fx

from rose_compiler.ir import facts
from rose_compiler.ir.deps import title
from rose_compiler.ir.ops import BRANCH, BREAK_IF, CONTINUE_IF, LOOP
from rose_compiler.ir.program import (
    BranchView,
    LoopView,
    Program,
    is_call,
    is_item,
    is_structure,
    op_of,
    output_node,
    placeholders,
)
from rose_compiler.ir.rewriter import Rewriter
from rose_compiler.passes.base import Pass, erased, raising
from rose_compiler.passes.graphs import keep_results, named_axes, part, retire
from rose_compiler.passes.recurrence import items


@dataclass(frozen=True)
class Canonicalize(Pass):
    """Fold what is static, drop what is dead. Whatever has an effect, or may raise, stays."""

    name: ClassVar[str] = "canonicalize"

    def run_program(self, program: Program, rewrite: Rewriter) -> None:
        changed = True
        while changed and rewrite.spend():
            changed = any([fold(program, rewrite), drop_results(program, rewrite)])
            changed |= drop_dead(program, rewrite)


def fold(program: Program, rewrite: Rewriter) -> bool:
    """Inline the taken arm of static branches; drop exits never taken, loops never entered."""
    changed = False
    for node in list(program.nodes()):
        if erased(node) or not is_structure(node) or not rewrite.spend():
            continue
        if is_call(node, BRANCH) and _constant(BranchView(node).pred):
            taken = bool(BranchView(node).pred)
            rewrite.applied(
                node, f"the branch always takes its {'first' if taken else 'other'} arm"
            )
            inline(BranchView(node), taken, rewrite)
        elif is_call(node, LOOP) and _never_runs(LoopView(node)):
            view = LoopView(node)
            rewrite.applied(node, f"{view.label} makes no trip")
            for picked in list(items(node)):
                rewrite.replace(picked, view.carried_init[picked.args[1]])  # type: ignore[index]
                rewrite.erase(picked)
            rewrite.erase(node)
        elif (is_call(node, BREAK_IF) or is_call(node, CONTINUE_IF)) and node.args[0] is False:
            rewrite.applied(node, "the exit is never taken")
            rewrite.erase(node)
        else:
            continue
        changed = True
    return changed


def _constant(pred: Any) -> bool:
    return not isinstance(pred, fx.Node)


def _never_runs(loop: LoopView) -> bool:
    return (
        loop.facts.kind == "range"
        and all(type(b) is int for b in loop.bounds)
        and len(range(*loop.bounds)) == 0
    )


def inline(view: BranchView, taken: bool, rewrite: Rewriter) -> None:
    """Put the operations of one arm in the place of the branch."""
    arm = view.then if taken else view.orelse
    node = view.node
    known: dict[fx.Node, Any] = dict(zip(placeholders(arm.graph), view.captured, strict=True))
    for inner in arm.graph.nodes:
        if inner.op == "call_function":
            known[inner] = rewrite.clone(inner, known, before=node)
    outputs = output_node(arm.graph).args[0]
    assert isinstance(outputs, tuple)
    for picked in list(items(node)):
        value = outputs[picked.args[1]]  # type: ignore[index]
        rewrite.replace(picked, fx.node.map_arg(value, lambda n: known[n]))
        rewrite.erase(picked)
    rewrite.erase(node)


def drop_results(program: Program, rewrite: Rewriter) -> bool:
    """Slice unread results, and what only they need, out of traced operations."""
    changed = False
    for node in list(program.nodes()):
        if erased(node) or not is_call(node) or op_of(node).kind != "graph":
            continue
        unread = tuple(unread_results(node))
        if not unread or not rewrite.spend() or not node.users:
            continue
        names = ", ".join(str(k) for k in unread)
        rewrite.applied(node, f"result {names} of {title(node)} is never used")
        _keep(node, unread, rewrite)
        changed = True
    return changed


def unread_results(node: fx.Node) -> Iterator[int]:
    """The results of an operation of several that nobody uses."""
    count = op_of(node).signature.results
    if count < 2 or any(not is_item(u) for u in node.users):
        return
    read = {u.args[1] for u in items(node) if u.users}
    yield from (k for k in range(count) if k not in read)


def _keep(node: fx.Node, unread: tuple[int, ...], rewrite: Rewriter) -> None:
    """Put an operation that makes the other results only in the place of a node."""
    op, known = op_of(node), facts.get(node)
    assert op.body is not None
    kept = [k for k in range(op.signature.results) if k not in unread]
    body = keep_results(op.body, kept)
    given = dict(zip((n.name for n in placeholders(op.body.graph)), node.args, strict=True))
    old_axes = op.signature.separable()
    axes = {
        f"return.{k}": old_axes[f"return.{old}"]
        for k, old in enumerate(kept)
        if f"return.{old}" in old_axes
    }
    retire(rewrite.program, node)
    made = part(rewrite.program, op, body, op.name, named_axes(node), axes, kept)
    spec = known.spec
    if spec is not None and spec.items:
        items_left = tuple(spec.items[k] for k in kept)
        spec = replace(spec, items=items_left) if len(kept) > 1 else items_left[0]
    rewrite.retarget(node, made, *(given[n.name] for n in placeholders(body.graph)))
    for picked in list(items(node)):
        position = picked.args[1]
        assert isinstance(position, int)
        if not picked.users:
            rewrite.erase(picked)
        elif len(kept) > 1:
            rewrite.repick(picked, node, kept.index(position))
        else:
            spec = facts.get(picked).spec or spec
            rewrite.set_facts(node, alias=facts.get(picked).alias)
            rewrite.replace(picked, node)
            rewrite.erase(picked)
    rewrite.set_facts(node, spec=spec)


def drop_dead(program: Program, rewrite: Rewriter) -> bool:
    """Erase operations without effect whose values nobody uses."""
    changed = False
    rewrite.tidy()
    for graph in list(program.graphs()):
        for node in reversed(list(graph.nodes)):
            if erased(node) or node.users or node.op != "call_function":
                continue
            if _dead(node) and rewrite.spend():
                rewrite.applied(node, f"nothing uses the value of {title(node)}")
                rewrite.erase(node)
                changed = True
    return changed


def _dead(node: fx.Node) -> bool:
    if not is_call(node) or is_structure(node):
        return False
    signature = op_of(node).signature
    reads_only = signature.reads is not None and signature.writes == ()
    return reads_only and raising(node) is None and not facts.get(node).state
