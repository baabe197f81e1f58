"""Which lane a simulator's step runs on, and what a thread beside the coordinator can run."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import torch
import torch.fx as fx

from rose_compiler.base.remarks import Blocker
from rose_compiler.ir import facts
from rose_compiler.ir.casts import under_autocast
from rose_compiler.ir.deps import Dependences, place, title
from rose_compiler.ir.effects import EVERYTHING, GLOBAL_STATES, HOST
from rose_compiler.ir.facts import Spec
from rose_compiler.ir.interp import resolve
from rose_compiler.ir.ops import SHARD
from rose_compiler.ir.program import is_call, is_state, is_structure, op_of, state_name
from rose_compiler.ir.recorded import records
from rose_compiler.ir.scope import Scope, root_of
from rose_compiler.passes.base import PassContext
from rose_compiler.passes.recurrence import step_position
from rose_compiler.passes.rendering import renders

#: Objects that any thread may use, one after the other: memory, and containers of it.
_PLAIN = (
    torch.Tensor,
    torch.nn.Module,
    torch.Generator,
    np.ndarray,
    np.random.Generator,
    collections.deque,
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    list,
    tuple,
    dict,
    set,
    type(None),
)
_CONTAINERS = frozenset({"builtins.list", "builtins.set", "collections.deque"})
#: What an operation calls that keeps it on the coordinator's thread.
_STAYS = frozenset({"step", "reset", "backward", "optimizer", "log", "clock", "missed"})


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
        if renders(scope.program, whole or ""):
            return Blocker(
                "no-lane",
                f"{whole} renders, and its context belongs to the thread that made it",
                'a simulator in a host of its own (`ShardedEnv(..., hosts="process")`)',
            )
        return f"thread:{name}"
    if whole in context.asynchronous:
        return f"shard:{name}"
    return Blocker(
        "no-lane",
        f"{whole} has no asynchronous step of its own, so nothing can run beside {op.name}",
        "a simulator with `step_async` and `step_wait`, or a decision with lanes='thread'",
    )


def why_not_on_a_thread(node: fx.Node, deps: Dependences) -> Blocker | None:
    """Why an operation runs on the coordinator's own thread alone, or None.

    What order it has to keep is for the dependences to say. Here it is about what is bound to a
    thread: recorded graphs, contexts of renderers, connections of databases. So besides traced
    graphs only such operations may move whose states and arguments are known to be plain memory.
    """
    op = op_of(node) if is_call(node) else None
    at = place(node)
    where = (at,) if at else ()

    def blocked(code: str, why: str, allow: str | None = None) -> Blocker:
        return Blocker(code, f"{title(node)} {why}", allow, where=where)

    if op is None or is_structure(node):
        return blocked("unsupported-shape", "is no operation that a thread can run")
    if records(node):
        return blocked(
            "grad-graph",
            "records gradients, and of a graph made on two threads backward adds them up in "
            "another order",
            "`with torch.no_grad():` around it, if no gradient is wanted",
        )
    if blocker := why_casts(node):
        return blocker
    given = [facts.get(n).spec for n in node.all_input_nodes if not is_state(n)]
    if any(map(_on_device, (facts.get(node).spec, *given))):
        return blocked("no-lane", "runs on a device, which takes its work from one stream")
    if op.kind == "graph":
        return None
    if op.kind in _STAYS | {"builtin", "loss"} or _STAYS & set(op.attributes.get("calls", ())):
        return blocked("opaque-call", "may be bound to the thread that it runs on")
    for effect in deps.effects(node):
        if effect.state == EVERYTHING:
            return blocked(
                "unknown-effects",
                "is known nothing of: it may touch everything",
                "declare its reads and writes with `rose_compiler.component` or `declare`",
            )
        if effect.state == HOST:
            return blocked("opaque-call", "reaches outside of the process")
        if not _plain(effect.state, deps):
            return blocked(
                "opaque-call",
                f"uses {effect.state}, which may be bound to a thread",
                "a component in a host of its own, if it may live there",
            )
    if any(map(_opaque, given)):
        return blocked("opaque-call", "is handed an object that may be bound to a thread")
    return None


def why_casts(node: fx.Node) -> Blocker | None:
    """Why an operation, or a whole loop or branch, stays on the coordinator for the casts that
    ``autocast`` keeps, if it runs under one."""
    if not under_autocast(node):
        return None
    return Blocker(
        "mode-change",
        f"{title(node)} runs under autocast, whose casts of weights all threads share",
        where=(at,) if (at := place(node)) else (),
    )


def _plain(state: str, deps: Dependences) -> bool:
    """Whether a state is memory that any thread may use; where no objects are bound, it is taken
    to be."""
    if state in GLOBAL_STATES or state.startswith("%") or not deps.program.objects:
        return True
    root = root_of(state)
    if root not in deps.program.objects:
        return False
    found: Any = deps.program.objects[root]
    for part in state.removeprefix(root).strip(".").split("."):
        if isinstance(found, _PLAIN):
            return True
        try:
            found = resolve(found, part)
        except (AttributeError, LookupError, TypeError, ValueError):
            return False
    return isinstance(found, _PLAIN)


def _opaque(spec: Spec | None) -> bool:
    if spec is None:
        return False
    container = spec.type_name in _CONTAINERS
    return (spec.kind == "object" and not container) or any(map(_opaque, spec.items))


def _on_device(spec: Spec | None) -> bool:
    if spec is None:
        return False
    return (bool(spec.device) and not spec.device.startswith("cpu")) or any(
        map(_on_device, spec.items)
    )
