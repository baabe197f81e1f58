"""What a simulator's step may touch besides the simulator itself."""

from __future__ import annotations

from typing import Any

from rose_compiler.frontend import components
from rose_compiler.ir.effects import GLOBAL_STATES


def simulator_effects(env: Any, declared: components.Declaration | None) -> tuple[str, ...]:
    """Process-wide states that a simulator's step may touch besides its own.

    Library simulators draw from generators of their own; what runs in another process can't
    reach this one's. A user's class that runs here may draw from any global generator, unless its
    step declares otherwise.
    """
    if declared is not None or getattr(env, "hosts", "") == "process":
        return ()
    return () if library_simulator(env) else GLOBAL_STATES


def library_simulator(env: Any) -> bool:
    """Whether a simulator and everything inside it comes from a library known not to touch global
    state, or is declared not to."""
    module = type(env).__module__ or ""
    if not module.startswith(("gymnasium", "envpool", "rose_compiler")):
        return declared_alone(env)
    inner: list[Any] = []
    fields = getattr(env, "__dict__", {})
    for key in ("env", "envs", "_envs", "environments"):
        found = fields.get(key)
        inner.extend(
            found if isinstance(found, (list, tuple)) else [found] if found is not None else []
        )
    shards = getattr(env, "shards", None)
    if callable(shards) and module.startswith("rose_compiler"):
        for shard in shards():
            nested = getattr(shard, "env", None)
            if nested is not None:
                inner.append(nested)
    return all(library_simulator(e) for e in inner if e is not env)


def declared_alone(env: Any) -> bool:
    """Whether the author of an environment has declared that its step touches nothing global."""
    found = components.declared(getattr(env, "step", None))
    if found is None or found.reads is None or found.writes is None:
        return False
    return not any(e.partition(".")[0] in (*GLOBAL_STATES, "*") for e in found.reads + found.writes)


def hands_out_fresh(env: Any) -> bool:
    """Whether a simulator's results own their memory: it copies (gymnasium with ``copy=True``), or
    is known to allocate for each step."""
    module = type(env).__module__ or ""
    if module.startswith(("rose_compiler.sim", "envpool")):
        return True
    if module.startswith("gymnasium.vector"):
        return bool(getattr(env, "copy", False)) if hasattr(env, "copy") else False
    return getattr(env, "rose_fresh_outputs", False) is True
