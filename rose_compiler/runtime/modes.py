"""The thread-local modes of torch, carried from the thread that issues to the one that runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode


class Modes(NamedTuple):
    """The modes of a thread. ``autocast`` has (device type, dtype, weight cache) where it is on;
    ``threads`` is how many threads its operations may use."""

    threads: int
    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype, bool], ...]


_ACCELERATOR = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
_DEVICES = ("cpu",) if _ACCELERATOR is None else ("cpu", _ACCELERATOR.type)


def current() -> Modes:
    """The modes of this thread, now."""
    autocast: tuple[tuple[str, torch.dtype, bool], ...] = ()
    for device in _DEVICES:
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            autocast += ((device, dtype, torch.is_autocast_cache_enabled()),)
    return Modes(
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        autocast,
    )


@contextmanager
def entered(modes: Modes) -> Iterator[None]:
    """Run a block under these modes, thread counts apart, and put the thread's own back."""
    with ExitStack() as stack:
        if modes.inference != torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(modes.inference))
        stack.enter_context(torch.set_grad_enabled(modes.grad))
        for device, dtype, cache in modes.autocast:
            stack.enter_context(torch.autocast(device, dtype=dtype, cache_enabled=cache))
        yield


class Unversioned(TorchFunctionMode):
    """Gives views of plain tensors versions of their own.

    A view has the version of all that it is a view of: writes elsewhere in it, which a pass has
    proven to be elsewhere, would have ``backward`` raise.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and not made.requires_grad and made._is_view():
            return made.data
        return made
