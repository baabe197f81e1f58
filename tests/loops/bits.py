"""Everything that a training run leaves behind, as names and bits that can be compared.

Followed from the objects that a script returns: tensors with their gradients, arrays, optimizer
state, generators, containers, simulators down to each environment. Two runs are equal when every
path holds the same bits and the same objects are shared.
"""

from __future__ import annotations

import random
import struct
import types
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from rose_compiler.sim import ShardedEnv

#: Attributes that hold times of day, and names of logged values that hang on the clock.
_TIMES = frozenset(("episode_start_time", "time_queue"))
_CLOCK = ("SPS", "time", "fps")
_OPAQUE = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType)


def bits(owned: Any) -> dict[str, Any]:
    """The bits of all that can be reached from ``owned``, by path."""
    return dict(_Walk().walk(owned, ""))


def differing(a: dict[str, Any], b: dict[str, Any], most: int = 12) -> list[str]:
    """The first paths whose bits differ, or that only one of two runs has, with what they hold."""
    found = []
    for path in [*a, *(p for p in b if p not in a)]:
        x, y = a.get(path, "absent"), b.get(path, "absent")
        if x != y:
            found.append(f"{path}: {str(x)[:80]} and {str(y)[:80]}")
    return found[:most]


def generators() -> dict[str, Any]:
    """The states of the process's own generators."""
    return {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),  # noqa: NPY002 (the global one is one of the states)
        "random": random.getstate(),
    }


class _Walk:
    def __init__(self) -> None:
        self.seen: dict[int, str] = {}
        self.kept: list[Any] = []  # so that no id is used again
        self.storages: dict[int, str] = {}

    def walk(self, value: Any, path: str) -> Iterator[tuple[str, Any]]:
        if value is None or isinstance(value, bool | int | str | bytes | complex | slice):
            yield path, (type(value).__name__, repr(value))
            return
        if isinstance(value, float):
            yield path, ("float", struct.pack("<d", value))
            return
        if isinstance(value, np.generic | torch.dtype | torch.device | torch.Size | range):
            yield path, (type(value).__name__, repr(value))
            return
        if isinstance(value, _OPAQUE):
            yield path, getattr(value, "__qualname__", repr(type(value)))
            return
        if not isinstance(value, tuple):
            if id(value) in self.seen:
                yield path, f"same object as {self.seen[id(value)]}"
                return
            self.seen[id(value)] = path
            self.kept.append(value)
        if isinstance(value, torch.Tensor):
            yield from self.tensor(value, path)
        elif isinstance(value, np.ndarray):
            yield from self.array(value, path)
        elif isinstance(value, torch.Generator):
            yield path, value.get_state().numpy().tobytes()
        elif isinstance(value, np.random.Generator):
            yield path, repr(value.bit_generator.state)
        elif isinstance(value, random.Random):
            yield path, repr(value.getstate())
        elif isinstance(value, torch.optim.Optimizer):
            yield from self.optimizer(value, path)
        elif isinstance(value, ShardedEnv):
            yield from self.walk(value.get_attr("unwrapped"), f"{path}.envs")
        elif isinstance(value, Mapping):
            for number, (key, item) in enumerate(value.items()):
                if key in _TIMES or (isinstance(key, str) and any(c in key for c in _CLOCK)):
                    continue
                name = repr(key) if isinstance(key, str | int | tuple) else f"key {number}"
                yield from self.walk(item, f"{path}[{name}]")
            yield f"{path}.len", len(value)
        elif isinstance(value, list | tuple | deque):
            yield from self.sequence(value, path)
        elif isinstance(value, set | frozenset):
            yield path, sorted(map(repr, value))
        else:
            yield from self.thing(value, path)

    def tensor(self, value: torch.Tensor, path: str) -> Iterator[tuple[str, Any]]:
        held = value.detach()
        flat = held.contiguous().reshape(-1).cpu()
        about = (str(value.dtype), tuple(value.shape), value.stride(), value.requires_grad)
        yield path, (*about, flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
        storage = value.untyped_storage()._cdata
        first = self.storages.setdefault(storage, path)
        if first != path:
            yield f"{path}.storage", f"{first} + {value.storage_offset()}"
        if value.is_leaf and value.requires_grad:
            yield from self.walk(value.grad, f"{path}.grad")

    def array(self, value: np.ndarray, path: str) -> Iterator[tuple[str, Any]]:
        if value.dtype == object:
            yield from self.walk(value.reshape(-1).tolist(), path)
        else:
            yield path, (str(value.dtype), value.shape, value.tobytes())

    def optimizer(self, value: torch.optim.Optimizer, path: str) -> Iterator[tuple[str, Any]]:
        yield from self.walk(value.param_groups, f"{path}.param_groups")
        for i, group in enumerate(value.param_groups):
            for k, p in enumerate(group["params"]):
                yield from self.walk(dict(value.state.get(p, {})), f"{path}.state[{i}, {k}]")

    def sequence(self, value: Any, path: str) -> Iterator[tuple[str, Any]]:
        rows = list(value)
        for k, item in enumerate(rows):
            named = isinstance(item, tuple) and item and isinstance(item[0], str)
            if named and any(c in item[0] for c in _CLOCK):
                continue  # a logged value that hangs on the clock
            yield from self.walk(item, f"{path}[{k}]")
        yield f"{path}.len", (type(value).__name__, len(rows))

    def thing(self, value: Any, path: str) -> Iterator[tuple[str, Any]]:
        yield path, type(value).__qualname__
        fields = dict(getattr(value, "__dict__", {}))
        for kind in type(value).__mro__:
            slots = getattr(kind, "__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if hasattr(value, name) and name not in ("__dict__", "__weakref__"):
                    fields[name] = getattr(value, name)
        for name, item in fields.items():
            if name not in _TIMES and not name.startswith("__"):
                yield from self.walk(item, f"{path}.{name}")
