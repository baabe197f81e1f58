"""CUDA tensors handed to another process by handle, where the machine lets that be done.

Where it does not, a CUDA tensor travels through shared memory of the host, and back to its device.
"""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any


@functools.cache
def available() -> bool:
    """Whether this process can share the memory of a CUDA tensor; found out by doing it once."""
    torch = import_module("torch")
    if not torch.cuda.is_available():
        return False
    try:
        torch.empty(1, device="cuda").untyped_storage()._share_cuda_()
    except RuntimeError:  # containers and some drivers refuse
        return False
    return True


def handle(tensor: Any) -> Any:
    """What the other process opens. The tensor must live until it has answered.

    Its stream is waited for first: the other process knows nothing of this one's streams.
    """
    torch = import_module("torch")
    torch.cuda.current_stream(tensor.device).synchronize()
    return import_module("torch.multiprocessing.reductions").reduce_tensor(tensor.detach())


def opened(made: Any) -> Any:
    """A tensor of this process's own, copied from the memory behind a handle."""
    rebuild, arguments = made
    return rebuild(*arguments).clone()
