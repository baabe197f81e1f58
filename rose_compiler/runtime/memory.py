"""Memory while an iteration runs: of the process, of CUDA devices, and of tensors one by one.

The process counts by its resident set: what it has of the machine's memory. Linux keeps a
high-water mark (``VmHWM`` in ``/proc/self/status``, ``proc(5)``) and lets a process lower it to
what is resident now (5 into ``/proc/self/clear_refs``). Where that can't be, what is resident at
the points that are looked at is all there is to go by. CUDA devices count what torch's caching
allocator has handed out.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: The place that arrays and the CPU's tensors lie in; devices go by their own names.
PROCESS = "process"


def resident() -> tuple[int, int]:
    """The most bytes that were resident, and those that are now; 0 where nothing tells."""
    most = now = 0
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            for line in file:
                if line.startswith("VmHWM:"):
                    most = 1024 * int(line.split()[1])
                elif line.startswith("VmRSS:"):
                    now = 1024 * int(line.split()[1])
                    break
    except (OSError, ValueError, IndexError):
        return 0, 0
    return most, now


class Peaks:
    """Peaks since :meth:`begin`, or since the last :meth:`take`: bytes by place.

    Marks that others may look at are lowered: the process's ``VmHWM``, and what
    ``torch.cuda.max_memory_allocated`` tells.
    """

    def __init__(self) -> None:
        self._lowered = False

    def begin(self) -> None:
        """Forget what was before."""
        try:
            with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
                file.write("5")
            self._lowered = True
        except OSError:
            self._lowered = False
        for device in _devices():
            torch.cuda.reset_peak_memory_stats(device)

    def take(self) -> Mapping[str, int]:
        """The peaks until here; a new stretch begins."""
        most, now = resident()
        found = {PROCESS: most if self._lowered else now}
        for device in _devices():
            found[f"cuda:{device}"] = torch.cuda.max_memory_allocated(device)
        self.begin()
        return found


def _devices() -> range:
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return range(0)
    return range(torch.cuda.device_count())


class TensorBytes(TorchDispatchMode):
    """Counts the bytes of tensors that operations of this thread make, storage by storage, from
    when they are made until nothing holds them any more.

    ``now`` and ``peak`` begin at 0 inside the ``with`` block. What a kernel needs besides its
    results goes unseen. It takes microseconds an operation: for tests and measurements.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._known: set[int] = set()

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {
            leaf.untyped_storage()._cdata
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        }
        for leaf in tree_leaves(result):
            if not isinstance(leaf, torch.Tensor):
                continue
            storage = leaf.untyped_storage()
            key = storage._cdata
            if key in self._known or key in given:
                continue
            size = storage.nbytes()
            self._known.add(key)
            self.now += size
            weakref.finalize(storage, self._gone, key, size)
        self.peak = max(self.peak, self.now)
        return result
