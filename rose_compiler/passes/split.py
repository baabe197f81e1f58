"""An operation's late results taken off the action's path, by slicing its traced graph.

What the next step needs stays in front; values, log-probabilities and validity checks become an
operation of their own, which other passes may move into the shadow of the simulator.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch.fx as fx

from rose_compiler.base.remarks import Blocker
from rose_compiler.ir import facts
from rose_compiler.ir.checks import is_check
from rose_compiler.ir.deps import title
from rose_compiler.ir.effects import related
from rose_compiler.ir.facts import Spec
from rose_compiler.ir.ops import STATE
from rose_compiler.ir.program import (
    LoopView,
    is_call,
    is_item,
    is_state,
    is_structure,
    op_of,
    placeholders,
)
from rose_compiler.ir.recorded import records
from rose_compiler.ir.rewriter import Rewriter
from rose_compiler.ir.sizes import hands_over
from rose_compiler.ir.slice import Split as Sliced
from rose_compiler.ir.slice import split_outputs
from rose_compiler.passes.base import Pass, context_of
from rose_compiler.passes.graphs import (
    axes_of_results,
    named_axes,
    part,
    result_specs,
    results_of,
    retire,
    told_by,
    tupled,
)
from rose_compiler.passes.recurrence import is_step, items, recurrence


@dataclass(frozen=True)
class Split(Pass):
    """Split operations on the way to a step into what the step needs and the rest."""

    name: ClassVar[str] = "split"

    def run(self, loop: LoopView, rewrite: Rewriter) -> None:
        if not any(is_step(n) for n in loop.graph.nodes):
            return
        found = recurrence(loop)
        if isinstance(found, Blocker):
            return  # tile_batch and late say why
        # last ones first: what only their late halves use is late too
        for node in reversed(found.before):
            if is_item(node) or not self.has_late(node, found.before):
                continue
            sliced = self.slice(node, found.before, run_ahead=context_of(rewrite).run_ahead)
            if isinstance(sliced, Blocker):
                rewrite.missed(node, sliced)
            elif rewrite.spend():
                early, late = apply(node, sliced, rewrite)
                results = len(sliced.late_outputs) + len(sliced.early_outputs)
                calls = _calls(sliced.late) + _calls(sliced.early)
                rewrite.applied(
                    early,
                    f"`{op_of(late).name}` makes what no step waits for: "
                    f"{len(sliced.late_outputs)} of {results} results, "
                    f"{_calls(sliced.late)} of {calls} calls",
                )
                again = recurrence(loop)
                assert not isinstance(again, Blocker)
                found = again

    def has_late(self, node: fx.Node, needed: Collection[fx.Node]) -> bool:
        """Whether an operation makes anything that is not ``needed`` for the next step."""
        op = op_of(node)
        if op.kind in ("builtin", "step"):
            return False
        if op.body is not None and any(is_check(n) for n in op.body.graph.nodes):
            return True
        late = [u for u in items(node) if u not in needed and u.users]
        return op.signature.results > 1 and bool(late)

    def slice(
        self, node: fx.Node, needed: Collection[fx.Node], *, run_ahead: bool = True
    ) -> Sliced | Blocker:
        """Both halves of an operation's graph, or why it stays whole."""
        op = op_of(node)
        if op.kind != "graph" or op.body is None:
            return Blocker(
                "not-traceable",
                f"{title(node)} is no traced graph, so its late results can't be told apart",
                "a policy whose source is plain torch, or one call for the action and one for the "
                "rest",
            )
        if records(node):
            return Blocker(
                "grad-graph",
                f"{title(node)} records gradients, and its halves would in another order",
                "`with torch.no_grad():` around it, if no gradient is wanted",
            )
        if op.signature.results > 1 and any(not is_item(u) for u in node.users):
            return Blocker("unsupported-shape", f"the results of {title(node)} are used as a tuple")
        if not run_ahead and any(is_check(n) for n in op.body.graph.nodes):
            return Blocker(
                "may-raise",
                f"{title(node)} checks values, and run_ahead=False steps no further before that",
                "run_ahead=True",
            )
        if op.signature.results == 1:
            early = {0}
        else:
            early = {int(u.args[1]) for u in items(node) if u in needed}  # type: ignore[arg-type]
        rows = named_axes(node)
        small = [n.name for n in placeholders(op.body.graph) if n.name not in rows]
        # where nothing is known of rows, every operand may be a batch
        return split_outputs(tupled(op.body), early, small=small if rows else ())


def _calls(body: fx.GraphModule) -> int:
    return sum(n.op.startswith("call_") for n in body.graph.nodes)


def apply(node: fx.Node, sliced: Sliced, rewrite: Rewriter) -> tuple[fx.Node, fx.Node]:
    """Put two operations in the place of one; the new nodes."""
    op, program = op_of(node), rewrite.program
    assert op.body is not None
    specs = result_specs(node)
    inner = {n.name: n for n in op.body.graph.nodes}
    given = dict(zip([n.name for n in placeholders(op.body.graph)], node.args, strict=True))
    axes = named_axes(node)
    retire(program, node)
    made_early = (*sliced.early_outputs, *(None for _ in sliced.passed))
    told = told_by(inner[n] for n in sliced.passed)
    first = part(
        program,
        op,
        sliced.early,
        f"{op.name}_early",
        axes,
        results=made_early,
        ahead=told is not None and _may_run_ahead(node, set(sliced.early_inputs), rewrite),
    )
    early = rewrite.call(
        first,
        *(given[n] for n in sliced.early_inputs),
        before=node,
        like=node,
        name=f"{node.name}_early",
    )
    picks = {int(u.args[1]): u for u in items(node)}  # type: ignore[arg-type]
    early_specs = [specs.get(p) for p in sliced.early_outputs]
    early_specs += [facts.get(inner[n]).spec for n in sliced.passed]
    made = [picks.get(p) for p in sliced.early_outputs] + [None] * len(sliced.passed)
    names = [n.name for n in results_of(op.body)]
    handed = [*(names[p] for p in sliced.early_outputs), *sliced.passed]
    results = _results(early, early_specs, made, handed, rewrite)
    # values that the late half takes from the early one, by their names in the original graph
    early_axes = first.signature.separable() or axes_of_results(sliced.early, axes)
    for k, name in enumerate(handed):
        given[name] = results[k]
        if f"return.{k}" in early_axes:
            axes[name] = early_axes[f"return.{k}"]
    second = part(
        program,
        op,
        sliced.late,
        f"{op.name}_late",
        axes,
        results=sliced.late_outputs,
        made=dict(zip(handed, made_early, strict=True)),
        told=told if hands_over(first) else None,
    )
    late = rewrite.call(
        second,
        *(given[n] for n in sliced.late_inputs),
        before=node,
        like=node,
        name=f"{node.name}_late",
    )
    late_specs = [specs.get(p) for p in sliced.late_outputs]
    _results(late, late_specs, [picks.get(p) for p in sliced.late_outputs], [], rewrite)
    if node.users:  # the one result of an operation that also checks values
        rewrite.replace(node, results[0])
    rewrite.erase(node)
    return early, late


def _may_run_ahead(node: fx.Node, early: set[str], rewrite: Rewriter) -> bool:
    """Whether the early half may read what only the late one waits for: all that write it write
    what the early one reads too, so that it waits for them as well."""
    op, scope = op_of(node), rewrite.deps.scope
    assert op.body is not None
    names = [n.name for n in placeholders(op.body.graph)]
    read: dict[bool, set[str]] = {True: set(), False: set()}
    for name, value in zip(names, node.args, strict=True):
        if isinstance(value, fx.Node) and is_state(value):
            read[name in early].add(scope.state(value))
    if not read[False]:
        return True
    for other in rewrite.program.nodes():
        if other is node or not is_call(other) or is_structure(other) or is_call(other, STATE):
            continue
        written = [e.state for e in rewrite.deps.effects(other) if e.write]
        late = any(related(w, r) for w in written for r in read[False])
        if late and not any(related(w, r) for w in written for r in read[True]):
            return False
    return True


def _results(
    node: fx.Node,
    specs: Sequence[Spec | None],
    picks: Sequence[fx.Node | None],
    names: Sequence[str],
    rewrite: Rewriter,
) -> list[fx.Node]:
    """The results of a node in order, as nodes: ``picks`` that exist are moved to it, others are
    made and named after ``names``, where there are any."""
    if op_of(node).signature.results == 1:
        rewrite.set_facts(node, spec=specs[0])
        if (picked := picks[0]) is not None:
            rewrite.set_facts(node, alias=facts.get(picked).alias)
            rewrite.replace(picked, node)
            rewrite.erase(picked)
        return [node]
    if specs and all(specs):
        rewrite.set_facts(node, spec=Spec("tuple", "tuple", items=tuple(s for s in specs if s)))
    found = []
    for k, picked in enumerate(picks):
        if picked is not None:
            rewrite.repick(picked, node, k)
            rewrite.move(picked, after=node)
        elif names:
            picked = rewrite.item(node, k, names[k])
            rewrite.set_facts(picked, spec=specs[k])
        if picked is not None:
            found.append(picked)
    return found
