"""Sizes of tensors that traced code reads: a graph holds them, or takes them from its operands."""

from __future__ import annotations

import math
import os
import types
from collections.abc import Callable
from typing import Any, Literal

import torch

#: Sizes that may be others when a graph runs: none, those of first axes, or any.
Vary = Literal["none", "rows", "all"]
#: What reads them, of a tensor.
NAMES = frozenset(("shape", "size", "numel", "nelement", "__len__"))
_TORCH = os.path.dirname(str(torch.__file__)) + os.sep


class Sizes(tuple[Any, ...]):
    """The shape of a tensor, some of it numbers that stand for nodes."""

    def numel(self) -> Any:
        """How many elements there are."""
        return math.prod(self)


def read_by_torch(frame: types.FrameType) -> bool:
    """Whether torch's own Python code reads a size: for checks and for sizes of its own, which
    only other sizes put to the test."""
    return frame.f_code.co_filename.startswith(_TORCH)


def sizes_read(
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: Any,
    vary: Vary,
    number: Callable[[int, Callable[..., Any], tuple[Any, ...]], Any],
) -> Any:
    """What a read of sizes gives where some may vary; ``number`` makes the number that stands for a
    call. ``None`` where it can't stand for one: Python makes a plain number of ``len(x)``."""
    tensor = args[0]
    if name == "__len__":
        return None
    if name in ("numel", "nelement"):
        return number(result, torch.numel, (tensor,))

    def one(axis: int, size: int) -> Any:
        if axis and vary == "rows":
            return size
        return number(size, torch.Tensor.size, (tensor, axis))

    if isinstance(result, int):
        axis = args[1] if len(args) > 1 else kwargs["dim"]
        return one(axis % tensor.dim(), result)
    return Sizes(one(k, size) for k, size in enumerate(result))
