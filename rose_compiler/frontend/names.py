"""One name for each mutable thing, whatever paths lead to it."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import torch

from rose_compiler.frontend.components import is_simulator
from rose_compiler.frontend.scope import is_scalar

_MAX_DEPTH = 5
_MAX_ITEMS = 1000
_CONTAINERS = (list, dict, set, collections.deque)
_OPAQUE = (type, str, bytes, torch.dtype, torch.device)


class StateNames:
    """Canonical state names of everything that is reachable from the roots of a program.

    A thing reached by several paths has the name of the shortest, first found. Parameters and buffers
    of a module are named below it as ``agent.params.actor.0.weight`` and ``agent.buffers.mean``; wrappers
    around a simulator share the name of the outermost one met first.
    """

    def __init__(self, roots: dict[str, Any]) -> None:
        self.names: dict[int, str] = {}
        self.memory: list[tuple[int, int, str]] = []  # address range and state
        self.modules: dict[str, torch.nn.Module] = {}
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self._keep: list[Any] = []
        queue = collections.deque((name, value, 0) for name, value in roots.items())
        while queue:
            name, value, depth = queue.popleft()
            for each in self._enter(name, value):
                if depth < _MAX_DEPTH:
                    queue.append((*each, depth + 1))

    def _enter(self, name: str, value: Any) -> list[tuple[str, Any]]:
        if (
            is_scalar(value)
            or id(value) in self.names
            or isinstance(value, _OPAQUE)
            or callable_only(value)
        ):
            return []
        self.names[id(value)] = name
        self._keep.append(value)
        if isinstance(value, torch.Tensor):
            self._tensor(name, value)
            return []
        if isinstance(value, np.ndarray):
            self.memory.append((*array_range(value), name))
            return []
        if isinstance(value, torch.nn.Module):
            return self._module(name, value)
        if isinstance(value, torch.optim.Optimizer):
            self.optimizers[name] = value
            return []
        if is_simulator(value):
            inner = value
            while (
                nested := vars(inner).get("env") or vars(inner).get("envs")
            ) is not None and is_simulator(nested):
                self.names.setdefault(id(nested), name)
                self._keep.append(nested)
                inner = nested
            return []
        if isinstance(value, dict):
            return [
                (f"{name}.{k}", v)
                for k, v in list(value.items())[:_MAX_ITEMS]
                if isinstance(k, str) and k.isidentifier()
            ]
        if isinstance(value, _CONTAINERS):
            if isinstance(value, set):
                return []
            return [
                (name, v)
                for v in list(value)[:_MAX_ITEMS]
                if isinstance(v, (torch.Tensor, np.ndarray, torch.nn.Module))
            ]
        fields = getattr(value, "__dict__", None)
        if not isinstance(fields, dict):
            return []
        return [(f"{name}.{k}", v) for k, v in fields.items()]

    def _module(self, name: str, module: torch.nn.Module) -> list[tuple[str, Any]]:
        self.modules[name] = module
        for path, inner in module.named_modules():
            if path:
                self.names.setdefault(id(inner), f"{name}.{path}")
                self._keep.append(inner)
        for path, tensor in module.named_parameters():
            self._leaf(f"{name}.params.{path}", tensor)
        for path, tensor in module.named_buffers():
            self._leaf(f"{name}.buffers.{path}", tensor)
        known = {"_parameters", "_buffers", "_modules"}
        return [
            (f"{name}.{k}", v)
            for k, v in vars(module).items()
            if k not in known and not k.startswith("_")
        ]

    def _leaf(self, name: str, tensor: torch.Tensor) -> None:
        if id(tensor) not in self.names:
            self.names[id(tensor)] = name
            self._keep.append(tensor)
            self._tensor(name, tensor)

    def _tensor(self, name: str, tensor: torch.Tensor) -> None:
        self.tensors[name] = tensor
        found = tensor_range(tensor)
        if found is not None:
            self.memory.append((*found, name))

    def name_of(self, value: Any) -> str | None:
        """The canonical name of a live object, if it is reachable from a root."""
        return self.names.get(id(value))

    def owners(self, tensors: Any) -> list[str]:
        """Names of the modules (or of the tensors themselves, outside any) that hold the tensors."""
        found: dict[str, None] = {}
        for tensor in tensors:
            name = self.names.get(id(tensor))
            if name is None:
                found.setdefault("*")
            elif ".params." in name:
                found.setdefault(name.split(".params.")[0])
            elif ".buffers." in name:
                found.setdefault(name.split(".buffers.")[0])
            else:
                found.setdefault(name)
        return list(found)

    def overlapping(self, low: int, high: int) -> list[str]:
        """States whose memory shares a byte with the given address range."""
        return [name for a, b, name in self.memory if a < high and low < b]


def tensor_range(tensor: torch.Tensor) -> tuple[int, int] | None:
    """First and last address of the bytes that a tensor's elements lie in."""
    try:
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
    except (RuntimeError, NotImplementedError):
        return None  # no memory of its own (fake, sparse, functional)
    if start == 0 or tensor.numel() == 0:
        return None
    size = tensor.element_size()
    low = start + tensor.storage_offset() * size
    span = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return low, low + (span + 1) * size


def array_range(array: np.ndarray) -> tuple[int, int]:
    """First and last address of an array's bytes."""
    low, high = np.lib.array_utils.byte_bounds(array)
    return int(low), int(high)


def callable_only(value: Any) -> bool:
    """Whether an object is a plain function or method, which holds no state of its own."""
    return type(value).__name__ in (
        "function",
        "builtin_function_or_method",
        "method",
        "module",
        "ufunc",
    )
