"""CUDA tensors handed to another process by handle, where both sides can do that.

The sender offers a small tensor first; only where the other process opens it, on the same device,
and reads what was written there do tensors travel by handle. Elsewhere they travel through shared
memory of the host, and back to their device.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

#: What stands in an offered tensor.
_NUMBER = 20_773
#: The function that opens a handle; bytes that name it hold a handle.
MARK = b"rebuild_cuda_tensor"

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


def handle(tensor: Any) -> Any:
    """What the other process opens. The tensor must live until it has answered.

    Its stream is waited for first: the other process knows nothing of this one's streams.
    """
    torch = import_module("torch")
    torch.cuda.current_stream(tensor.device).synchronize()
    return import_module("torch.multiprocessing.reductions").reduce_tensor(tensor.detach())


def opened(made: Any) -> Any:
    """A tensor of this process's own, copied from the memory behind a handle.

    The copy is waited for: an answer without a tensor would tell the owner that it is done.
    """
    rebuild, arguments = made
    tensor = rebuild(*arguments).clone()
    import_module("torch").cuda.current_stream(tensor.device).synchronize()
    return tensor


def _identity(index: int) -> str:
    properties = import_module("torch").cuda.get_device_properties(index)
    return str(getattr(properties, "uuid", properties.name))
