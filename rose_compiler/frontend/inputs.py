"""Arguments of a function that is traced: what it is called with in their place."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import torch
import torch.fx as fx

from rose_compiler.frontend.audit import storage_key
from rose_compiler.frontend.record import spec_of
from rose_compiler.frontend.recorder import Recorder
from rose_compiler.frontend.sizes import watched
from rose_compiler.ir import facts


class Inputs:
    """The arguments of a traced function as it is given them, and their placeholders."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.placeholders: dict[fx.Node, int] = {}
        self.tensors: dict[str, list[torch.Tensor]] = {}
        self.fixed = False  # whether a size of an array is a number in the graph

    def add(self, name: str, value: Any, position: int) -> Any:
        """What to call the function with in place of ``value``."""
        if not _is_data(value):
            return value
        node = self.recorder.placeholder(name)
        self.placeholders[node] = position
        facts.put(node, spec=spec_of(value))
        return self._given(value, node, node.name)

    def _given(self, value: Any, node: fx.Node, name: str) -> Any:
        copied: Any
        if isinstance(value, torch.Tensor):
            copied = copy_of(value)
            self.recorder.audit.foreign.add(storage_key(copied))
            self.tensors.setdefault(name, []).append(copied)
            self.recorder.know(copied, node)
            return copied
        if isinstance(value, np.ndarray | np.generic):
            copied = watched(value, self._read)
            self.recorder.know(copied, node)
            return copied
        if type(value) in (int, float):
            return self.recorder.number(value, node)
        if isinstance(value, dict):
            return {k: self._item(v, node, k, name) for k, v in value.items()}
        if isinstance(value, tuple | list):
            items = [self._item(v, node, i, name) for i, v in enumerate(value)]
            if isinstance(value, list):
                return items
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        return value

    def _read(self, typed: bool) -> None:
        if typed:
            self.recorder.typed = True
        else:
            self.recorder.sized = self.recorder.read = self.fixed = True

    def _item(self, value: Any, node: fx.Node, key: Any, name: str) -> Any:
        if not _is_data(value):
            return value
        inner = self.recorder.emit(operator.getitem, (node, key))
        facts.put(inner, spec=spec_of(value))
        return self._given(value, inner, name)


def _is_data(value: Any) -> bool:
    """Whether a value becomes an input of the graph, rather than being fixed in it."""
    if isinstance(value, torch.Tensor | np.ndarray | np.generic) or type(value) in (int, float):
        return True
    if type(value) is dict:
        return any(map(_is_data, value.values()))
    if type(value) in (tuple, list) or (isinstance(value, tuple) and hasattr(value, "_fields")):
        return any(map(_is_data, value))
    return False


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """A leaf of the same values, strides and ``requires_grad``."""
    copied = tensor.detach().clone()
    if copied.stride() != tensor.stride() and not _overlapping(tensor):
        copied = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
        ).copy_(tensor.detach())
    return copied.requires_grad_(tensor.requires_grad)


def _overlapping(tensor: torch.Tensor) -> bool:
    return any(n > 1 and s == 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True))
