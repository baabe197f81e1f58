"""CUDA tensors handed to another process by handle, where both sides can do that.

The sender offers a small tensor first; only where the other process opens it, on the same device,
and reads what was written there do tensors travel by handle. Elsewhere they travel through shared
memory of the host, and back to their device.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any

#: What stands in an offered tensor.
_NUMBER = 20_773
#: Number and identity of a device, and the handle of a tensor there.
Offer = tuple[int, str, Any]


def available() -> bool:
    """Whether this process can share the memory of a CUDA tensor."""
    torch = import_module("torch")
    if not torch.cuda.is_available():
        return False
    try:
        handle(torch.zeros(1, device="cuda"))
    except RuntimeError:  # containers and some drivers refuse
        return False
    return True


def offer(device: Any) -> tuple[Any, Offer]:
    """A tensor on a device, and what another process needs to show that it can open it.

    The tensor must live until it has answered. Raises ``RuntimeError`` where memory can't be
    shared.
    """
    torch = import_module("torch")
    tensor = torch.full((1,), _NUMBER, device=device, dtype=torch.int64)
    index = tensor.device.index
    return tensor, (index, _identity(index), handle(tensor))


def why_not(made: Offer) -> str | None:
    """Why this process can't open tensors like the offered one, or None."""
    index, identity, tensor = made
    try:
        mine = _identity(index)
        if mine != identity:
            return f"device {index} is {mine} there and {identity} here"
        if int(opened(tensor)) != _NUMBER:
            return "it reads something else there than was written here"
    except Exception as error:  # whatever the driver says: there is another way
        return f"it can't be opened there: {error}"
    return None


def refusal(device: Any, opens: Callable[[Offer], str | None]) -> str | None:
    """Why tensors on a device can't be handed to the process that ``opens`` asks, or None."""
    try:
        kept, made = offer(device)
    except RuntimeError as error:
        return f"this process can't share its memory: {error}"
    why = opens(made)
    del kept  # not before it has answered
    return why


def handle(tensor: Any) -> Any:
    """What the other process opens. The tensor must live as long as it is used there.

    Its stream is waited for first: the other process knows nothing of this one's streams.
    """
    settle(tensor.device)
    return import_module("torch.multiprocessing.reductions").reduce_tensor(tensor.detach())


def opened(made: Any) -> Any:
    """The memory behind a handle, as a tensor."""
    rebuild, arguments = made
    return rebuild(*arguments)


def allocate(size: int, device: str) -> Any:
    """So many bytes on a device."""
    torch = import_module("torch")
    return torch.empty(size, dtype=torch.uint8, device=device)


def settle(device: Any) -> None:
    """Wait for what this thread has issued to a device."""
    import_module("torch").cuda.current_stream(device).synchronize()


class Pinned:
    """Memory of the host that the driver has been told to keep in place; let go of at the end."""

    def __init__(self, memory: Any, driver: Any, address: int) -> None:
        self._memory = memory  # unmapped only afterwards
        self._driver = driver
        self._address = address

    def __del__(self) -> None:
        with suppress(Exception):  # the driver may have gone at exit
            self._driver.cudaHostUnregister(self._address)


def pinned(memory: Any) -> Pinned | None:
    """Pin shared memory, so that a device copies from and to it at full speed; None where there is
    no device in use in this process, or its driver refuses."""
    torch = sys.modules.get("torch")
    if memory is None or torch is None or not torch.cuda.is_initialized():
        return None
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    driver = torch.cuda.cudart()
    try:
        status = int(driver.cudaHostRegister(whole.data_ptr(), whole.numel(), 0))
    except Exception:  # it is faster with, and right without
        return None
    return Pinned(memory, driver, whole.data_ptr()) if status == 0 else None


def _identity(index: int) -> str:
    properties = import_module("torch").cuda.get_device_properties(index)
    return str(getattr(properties, "uuid", properties.name))
