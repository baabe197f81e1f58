"""Abstract values for the walk that finds a block's effects, and what simulators may touch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from rose_compiler.frontend import components, source
from rose_compiler.frontend.scope import NOT_STATIC

IMMUTABLE = (
    int,
    float,
    bool,
    complex,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    np.generic,
    range,
)
MAX_DEPTH = 8


@dataclass(frozen=True)
class Val:
    """What is known of one expression: entry texts it may alias, the live object, the type."""

    places: frozenset[str] = frozenset()
    obj: Any = NOT_STATIC
    type: type | None = None
    loaded: bool = True  # False while a path is still being walked (no data read yet)

    @property
    def static(self) -> bool:
        return self.obj is not NOT_STATIC


FRESH = Val()


@dataclass
class Effects:
    """The result of a walk. ``unknown`` names the call, with its line, that made it everything."""

    reads: dict[str, None] = field(default_factory=dict)
    writes: dict[str, None] = field(default_factory=dict)
    unknown: str = ""
    calls: set[str] = field(default_factory=set)  # kinds of known calls: "draw", "module", ...
    may_raise: bool = False


def is_tensor(value: Val) -> bool:
    return value.type is not None and issubclass(value.type, (torch.Tensor, np.ndarray))


def is_immutable(value: Val) -> bool:
    return value.type is not None and issubclass(value.type, IMMUTABLE)


def has_plain_items(value: Val) -> bool:
    """Whether the items of a value are immutable: text, numbers, ranges."""
    return value.type is not None and issubclass(value.type, (str, bytes, range, int, float))


def from_closure(function: source.FunctionSource) -> dict[str, Any]:
    """The free variables of a function as they are now."""
    found = {}
    for name, cell in function.closure.items():
        try:
            found[name] = cell.cell_contents
        except ValueError:
            continue
    return found


def simulator_effects(env: Any, declared: components.Declaration | None) -> tuple[str, ...]:
    """Process-wide states that a simulator's step may touch besides its own.

    Library simulators draw from generators of their own; what runs in another process can't
    reach this one's. A user's class that runs here may draw from any global generator, unless its
    step declares otherwise.
    """
    if declared is not None or getattr(env, "hosts", "") == "process":
        return ()
    return () if library_simulator(env) else ("rng:torch", "rng:numpy", "rng:python", "host")


def library_simulator(env: Any) -> bool:
    """Whether a simulator and everything inside it comes from a library known not to touch global state."""
    module = type(env).__module__ or ""
    if not module.startswith(("gymnasium", "envpool", "rose_compiler")):
        return False
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
