"""Which lane a simulator's step runs on."""

from __future__ import annotations

import torch.fx as fx

from rose_compiler.base.remarks import Blocker
from rose_compiler.ir.deps import place, title
from rose_compiler.ir.ops import SHARD
from rose_compiler.ir.program import is_call, op_of, state_name
from rose_compiler.ir.recorded import records
from rose_compiler.ir.scope import Scope
from rose_compiler.passes.base import PassContext
from rose_compiler.passes.recurrence import step_position


def lane_of(step: fx.Node, scope: Scope, context: PassContext) -> str | Blocker:
    """The lane that runs a step beside the coordinator, or why there is none.

    ``"shard:<name>"`` is the simulator's own asynchronous step, ``"thread:<name>"`` a thread; the
    name is the shard's index, or the state of a simulator that is stepped whole.
    """
    if context.options.lanes == "inline":
        return Blocker("switched-off", "the decision lets the coordinator run every step itself")
    if records(step):
        # each thread counts what it records by itself, and backward goes by these numbers
        where = place(step)
        return Blocker(
            "grad-graph",
            f"{title(step)} records gradients, and of a graph made on two threads backward adds "
            "them up in another order",
            "`with torch.no_grad():` around it, if no gradient is wanted",
            where=(where,) if where else (),
        )
    op = op_of(step)
    env = step.args[step_position(op, "env")]
    assert isinstance(env, fx.Node)
    resolved = scope.resolve(env)
    if isinstance(resolved, fx.Node) and is_call(resolved, SHARD):
        whole, name = scope.state(resolved.args[0]), str(resolved.args[1])  # type: ignore[arg-type]
    else:
        whole = name = state_name(env)
    if context.options.lanes == "thread":
        return f"thread:{name}"
    if whole in context.asynchronous:
        return f"shard:{name}"
    return Blocker(
        "no-lane",
        f"{whole} has no asynchronous step of its own, so nothing can run beside {op.name}",
        "a simulator with `step_async` and `step_wait`, or a decision with lanes='thread'",
    )
