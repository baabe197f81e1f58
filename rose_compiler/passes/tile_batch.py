"""The batch of a stepping loop cut into groups of shards that advance independently.

Everything on the cycle simulator, observation, policy, action, simulator is cloned: in front of the
step once a group, behind it once a shard. Who uses a whole batch gets the parts joined again. The
order of the trips of one shard stays; what changes is only that no shard waits for another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.fx as fx

from rose_compiler.base.remarks import Blocker
from rose_compiler.ir import bodies, facts
from rose_compiler.ir.deps import Dependences, place, title
from rose_compiler.ir.effects import related
from rose_compiler.ir.program import LoopView, is_call, is_item, is_state, is_structure, op_of
from rose_compiler.ir.recorded import records
from rose_compiler.ir.rewriter import Rewriter
from rose_compiler.passes.base import Pass, PassContext, context_of
from rose_compiler.passes.borrowed import lends, why_not_copied
from rose_compiler.passes.graphs import draw_alone
from rose_compiler.passes.probing import ask, computes
from rose_compiler.passes.recurrence import (
    Recurrence,
    env_state,
    is_step,
    recurrence,
    result_name,
    step_position,
)
from rose_compiler.passes.tiles import Tiler
from rose_compiler.passes.tiling import Tiling


@dataclass(frozen=True)
class TileBatch(Pass):
    """Let groups of a simulator's shards advance independently of each other."""

    name: ClassVar[str] = "tile_batch"

    def run(self, loop: LoopView, rewrite: Rewriter) -> None:
        steps = [n for n in loop.graph.nodes if is_step(n)]
        if not steps:
            return
        found = recurrence(loop)
        if isinstance(found, Blocker):
            _whole(steps[0], found, loop, rewrite)
            return
        plan = self.plan(found, rewrite.deps, context_of(rewrite))
        if isinstance(plan, Blocker):
            _whole(steps[0], plan, loop, rewrite)
        elif rewrite.spend():
            rewrite.applied(
                found.step,
                f"the batch of {plan.size} advances in {len(plan.groups)} groups of "
                f"{', '.join(map(str, plan.group_rows))}",
            )
            Tiler(found, plan, rewrite).run()

    def plan(self, found: Recurrence, deps: Dependences, context: PassContext) -> Tiling | Blocker:
        """How to cut the batch, or why it stays whole."""
        groups = context.options.groups
        if groups < 2:
            return Blocker("switched-off", "the decision keeps the batch whole")
        state = env_state(found)
        rows = context.shards.get(state, ())
        if len(rows) < 2:
            return Blocker(
                "single-shard",
                f"{state} is one piece: no part of its batch can be stepped alone",
                "a simulator made of shards, such as rose_compiler.sim.ShardedEnv",
            )
        if exits := bodies.exits(found.loop.graph):
            where = place(exits[0])
            return Blocker(
                "early-exit",
                f"{found.loop.label} may stop at {title(exits[0])}",
                where=(where,) if where else (),
            )
        if not found.before:
            return Blocker("no-window", f"no operation leads from {state} back to its step")
        tiling = Tiling.of(tuple(rows), groups)
        if reason := _other_rows(found, tiling.size):
            return reason
        for reason in (
            _coupled(found, deps),
            _step_alone(found, deps),
            _written_in_place(found, deps),
            why_not_copied(found.loop, [found.step], deps)
            if lends(found.loop, [found.step], deps.scope)
            else None,
        ):
            if reason is not None:
                return reason
        for node in found.nodes:
            tiles = tiling.group_rows if node in found.before else tuple(rows)
            asked = node is not found.step and is_call(node) and computes(node)
            if asked and (reason := ask(context, node, tiles)):
                return reason
        return tiling


def _whole(step: fx.Node, why: Blocker, loop: LoopView, rewrite: Rewriter) -> None:
    """Leave a batch whole: nobody gets a part of what was drawn for it in front."""
    rewrite.missed(step, why)
    for node in filter(is_call, list(loop.graph.nodes)):
        draw_alone(node, rewrite)


def _other_rows(found: Recurrence, size: int) -> Blocker | None:
    """Whether a value on the cycle has another number of rows than the simulator has."""
    for value in (*(found.loop.carried[k] for k in found.carried), *found.nodes):
        spec = facts.get(value).spec
        measured = spec is not None and (spec.kind in ("tensor", "array") or spec.keys)
        if not measured or facts.rows_of(spec) == size:
            continue
        assert spec is not None
        shape = spec.shape if not spec.keys else tuple(i.shape for i in spec.items)
        where = tuple(w for w in (place(value),) if w)
        return Blocker(
            "unsupported-shape",
            f"`{value.name}` is of shape {shape}, the simulator's batch has {size} rows",
            where=where,
        )
    return None


def _coupled(found: Recurrence, deps: Dependences) -> Blocker | None:
    """Why an operation of the cycle can't be computed on some rows alone."""
    cycle = {*found.nodes, *(found.loop.carried[k] for k in found.carried)}
    for node in found.nodes:
        if node is found.step or is_item(node):
            continue
        where = tuple(w for w in (place(node),) if w)
        if not is_call(node) or is_structure(node):
            return Blocker("unsupported-shape", f"{title(node)} is on the cycle", where=where)
        if records(node):
            return Blocker(
                "grad-graph",
                f"{title(node)} records gradients, and those of its shards add up otherwise than "
                "those of the whole batch",
                "`with torch.no_grad():` around it, if no gradient is wanted",
                where=where,
            )
        signature = op_of(node).signature
        if signature.reads is None or signature.writes is None:
            return Blocker(
                "unknown-effects",
                f"nothing is known of what {title(node)} reads and writes",
                "declare its reads and writes with `rose_compiler.component` or `declare`",
                where=where,
            )
        for effect in deps.effects(node):
            if effect.write:
                drawn = effect.state.startswith("rng:")
                apart = None  # what is stored may come with an action: `action, values[t] = ...`
                if effect.region is not None and not drawn:
                    apart = f"store what goes into {effect.state} in a statement of its own"
                return Blocker(
                    "draw-order" if drawn else "not-pure",
                    f"{title(node)} {'draws from' if drawn else 'writes'} {effect.state}",
                    apart,
                    where=where,
                )
        if reason := _rows_mix(node, cycle, all_used=node in found.before):
            return reason
    return None


def _rows_mix(node: fx.Node, cycle: set[fx.Node], *, all_used: bool) -> Blocker | None:
    """Whether rows are coupled in what the cycle gives and takes, or, with ``all_used``, in any
    result: what lies behind the step can also be computed whole, from the merged result."""
    signature = op_of(node).signature
    axes = signature.separable()
    used = [p for p, a in zip(signature.params, node.args, strict=True) if a in cycle]
    if signature.results == 1:
        made = ["return.0"]
    elif all(is_item(u) for u in node.users):
        made = [result_name(u) for u in node.users if all_used or u in cycle]
    else:
        return Blocker("unsupported-shape", f"the results of {title(node)} are used as one tuple")
    for name in (*used, *made):
        if axes.get(name) == 0:
            continue
        declared = signature.batch is not None
        where = tuple(w for w in (place(node),) if w)
        if declared and name in axes:
            why = f"{title(node)} has its batch along axis {axes[name]} of {name}, not the first"
            return Blocker("unsupported-shape", why, where=where)
        return Blocker(
            "batch-coupling" if declared else "not-proven-separable",
            f"nothing says that rows of {name} are computed apart in {title(node)}",
            f"declare it: batch={{{name!r}: 0, ...}}",
            where=where,
        )
    return None


def _written_in_place(found: Recurrence, deps: Dependences) -> Blocker | None:
    """Whether something writes the memory of values on the cycle: their parts are copies.

    Other states that the cycle reads may be written: each clone stands where its original stood,
    so that writes come before or behind all of them as before.
    """
    names: dict[str, fx.Node] = {}
    for node in (*found.nodes, *(found.loop.carried[k] for k in found.carried)):
        for value in (node, *(u for u in node.users if is_item(u))):
            for name in deps.scope.aliases(value):
                names.setdefault(name, value)
            for definer in deps.scope.definers(value):
                names.setdefault(f"%{definer.name}", value)
    for node in found.loop.graph.nodes:
        for effect in () if node is found.step else deps.effects(node):
            if not effect.write:
                continue
            shared = next((v for n, v in names.items() if related(n, effect.state)), None)
            if shared is not None:
                return Blocker(
                    "may-alias",
                    f"{title(node)} writes {effect.state}, whose memory {title(shared)} shares",
                    where=tuple(w for w in (place(node), place(shared)) if w),
                )
    return None


def _step_alone(found: Recurrence, deps: Dependences) -> Blocker | None:
    """Whether the step touches anything but its simulator and its action."""
    op = op_of(found.step)
    where = tuple(w for w in (place(found.step),) if w)
    for effect in deps.effects(found.step):
        if effect.state == "*":
            return Blocker(
                "unknown-effects", f"{title(found.step)} may touch everything", where=where
            )
        if effect.write and not related(effect.state, env_state(found)):
            drawn = effect.state.startswith("rng:")
            return Blocker(
                "draw-order" if drawn else "not-pure",
                f"{title(found.step)} {'draws from' if drawn else 'writes'} {effect.state}, "
                "which its shards share",
                where=where,
            )
    roles = {step_position(op, "env"), step_position(op, "action")}
    if found.step in found.loop.carried_next:
        return Blocker(
            "unsupported-shape", f"{title(found.step)} hands its result to the next trip unopened"
        )
    for k, argument in enumerate(found.step.args):
        if k not in roles and isinstance(argument, fx.Node) and not is_state(argument):
            return Blocker(
                "unsupported-shape",
                f"{title(found.step)} takes more than its simulator and an action",
                where=where,
            )
    return None
