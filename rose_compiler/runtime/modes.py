"""The thread-local modes of torch, carried from the thread that issues to the one that runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext


class Modes(NamedTuple):
    """The modes of a thread. ``autocast`` has (device type, dtype) where it is on;
    ``threads`` is how many threads its operations may use, ``device`` where it makes tensors, if
    that was set (``torch.set_default_device``, ``with torch.device(...)``)."""

    threads: int
    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    device: torch.device | None


_ACCELERATOR = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
_DEVICES = ("cpu",) if _ACCELERATOR is None else ("cpu", _ACCELERATOR.type)


def current() -> Modes:
    """The modes of this thread, now."""
    autocast: tuple[tuple[str, torch.dtype], ...] = ()
    for device in _DEVICES:
        if torch.is_autocast_enabled(device):
            autocast += ((device, torch.get_autocast_dtype(device)),)
    return Modes(
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        autocast,
        _default_device(),
    )


def _default_device() -> torch.device | None:
    # it stands at the bottom of all modes, and most programs have none
    if not torch._C._len_torch_function_stack():
        return None
    mode = torch._C._get_function_stack_at(0)
    return mode.device if isinstance(mode, DeviceContext) else None


@contextmanager
def entered(modes: Modes) -> Iterator[None]:
    """Run a block under these modes, thread counts apart, and put the thread's own back."""
    with ExitStack() as stack:
        if modes.inference != torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(modes.inference))
        stack.enter_context(torch.set_grad_enabled(modes.grad))
        if modes.autocast:
            # casts of weights are kept for the whole process: this thread neither uses those of
            # the submitter's region nor forgets them when it leaves its own
            torch.autocast_increment_nesting()
            stack.callback(torch.autocast_decrement_nesting)
        for device, dtype in modes.autocast:
            stack.enter_context(torch.autocast(device, dtype=dtype, cache_enabled=False))
        if modes.device is not None:
            stack.enter_context(modes.device)
        yield


class Unversioned(TorchFunctionMode):
    """Gives views of plain tensors versions of their own.

    A view has the version of all that it is a view of: writes elsewhere in it, which a pass has
    proven to be elsewhere, would have ``backward`` raise.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _unversioned(func(*args, **(kwargs or {})))


def _unversioned(made: Any) -> Any:
    """A view of a plain tensor, with a version of its own.

    One that carries a tangent, or belongs to a transform of ``torch.func``, stays as it is: what is
    known of it besides its numbers would be lost.
    """
    if not isinstance(made, torch.Tensor) or made.requires_grad or not made._is_view():
        return made
    if torch._C._functorch.is_functorch_wrapped_tensor(made) or _tangent(made):
        return made
    return made.data


def _tangent(made: torch.Tensor) -> bool:
    return forward_ad.unpack_dual(made).tangent is not None
