"""What simulators say of the wrappers around their environments, and what it is worth."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch.fx as fx

from rose_compiler import sim
from rose_compiler.api.objects import simulators
from rose_compiler.base.errors import RoseError
from rose_compiler.base.profile import Profile
from rose_compiler.ir.keys import nodes_by_key
from rose_compiler.ir.program import Program, op_of, state_name
from rose_compiler.passes.base import Batchable
from rose_compiler.passes.recurrence import is_step, step_position


def batchable(objects: dict[str, Any]) -> dict[str, tuple[Batchable, ...]]:
    """By the state of a simulator that knows, for each of its shards which wrappers of its
    environments can advance at once, or why none can."""
    found: dict[str, tuple[Batchable, ...]] = {}
    for name, env in simulators(objects).items():
        switch = batching(env)
        if switch is not None:
            with suppress(RoseError):  # a step will say what is wrong with it
                found[name] = tuple(switch.batchable())
    return found


def batching(env: Any) -> Any:
    """What lets the wrappers of a simulator's environments advance at once, or None."""
    if callable(getattr(env, "batch_wrappers", None)):
        return env
    # a simulator that was made without gymnasium has none of its wrappers
    return sim.batching(env) if "gymnasium" in sys.modules else None


def with_wrappers(
    profile: Profile, program: Program, wrappers: Mapping[str, tuple[Batchable, ...]]
) -> Profile:
    """The profile of ``program`` as if wrappers of simulators' environments advanced at once.

    Shards step beside each other: a step ends sooner by what the shard saves that saves most, and
    needs the core seconds less that all save.
    """
    nodes = nodes_by_key(program)
    ops = []
    for op in profile.ops:
        node = nodes.get(op.op)
        saved: list[float] = []
        if node is not None and is_step(node):
            env = node.args[step_position(op_of(node), "env")]
            state = state_name(env) if isinstance(env, fx.Node) else None
            saved = [s for _, _, s in wrappers.get(state or "", ())]
        if saved:
            most = min(max(saved), op.median_s)
            op = replace(
                op,
                median_s=op.median_s - most,
                p90_s=max(op.p90_s - most, 0.0),
                mean_s=max(op.mean_s - most, 0.0),
                work_s=max(op.work_s - sum(saved), 0.0),
            )
        ops.append(op)
    return replace(profile, ops=tuple(ops))
