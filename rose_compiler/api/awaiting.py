"""Devices that an iteration leaves work on, waited for where lengths of iterations are compared.

A call that only issues kernels returns before they have run. What is not waited for would be part
of an iteration that comes later and may run another schedule. So an iteration that is compared with
others lasts until the devices are through with it; once a schedule is settled on, nobody waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from rose_compiler.ir.program import Program
from rose_compiler.passes.stream_work import devices_of

#: Kinds of devices on which nothing is left to run when a call returns.
_AT_ONCE = frozenset({"", "cpu", "meta"})


def in_use() -> list[torch.device]:
    """Devices that this process issues to already, as torch says without starting any: of each kind
    the current one, and those with memory of torch's on them."""
    found = []
    for kind in ("cuda", "xpu"):
        module = getattr(torch, kind, None)
        if module is not None and module.is_initialized():
            current = module.current_device()
            numbers = range(module.device_count())
            used = [n for n in numbers if n == current or _occupied(module, n)]
            found += [torch.device(kind, n) for n in used]
    return found


def _occupied(module: Any, number: int) -> bool:
    try:
        return bool(module.memory_reserved(number))
    except RuntimeError:  # an allocator of somebody else's keeps no books
        return False


def synchronize(device: torch.device) -> None:
    """Wait for a device, if it is of the kind that this torch can wait for."""
    kind = torch.accelerator.current_accelerator()
    if kind is not None and kind.type == device.type:
        torch.accelerator.synchronize(device)


class Awaiting:
    """Waits for all devices that a program works on: those that its values were seen on, and those
    that anything else in this process may have used, as components do whose values lie elsewhere.
    """

    def __init__(
        self,
        synchronize: Callable[[torch.device], None] = synchronize,
        others: Callable[[], Iterable[torch.device]] = in_use,
    ) -> None:
        self._synchronize = synchronize
        self._others = others
        self._program: Program | None = None
        self._known: list[torch.device] = []

    def __call__(self, program: Program) -> None:
        """Return once all that was issued has run. Raises what the device reports."""
        if program is not self._program:
            names = [n for n in sorted(devices_of(program)) if n.partition(":")[0] not in _AT_ONCE]
            self._program, self._known = program, [torch.device(name) for name in names]
        for device in dict.fromkeys([*self._known, *self._others()]):
            self._synchronize(device)
