"""Arguments of a function that is traced: what it is called with in their place."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.fx as fx

from rose_compiler.base import gaps
from rose_compiler.frontend.audit import storage_key
from rose_compiler.frontend.crosscheck import arrays_in
from rose_compiler.frontend.record import spec_of
from rose_compiler.frontend.recorder import Recorder
from rose_compiler.frontend.sizes import ALL, Read, watched
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

    def read_arrays(self, example_args: Sequence[Any]) -> None:
        """Take note that built-in functions may have read anything of the arrays."""
        if any(map(arrays_in, example_args)):
            for what in ALL:
                self._read(what)

    def _read(self, what: Read) -> None:
        if what == "type":
            self.recorder.typed = True
        elif what == "layout":
            self.recorder.lay("strides")
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
    detached = tensor.detach()
    return gaps.like(detached.clone(), detached).requires_grad_(tensor.requires_grad)
