"""Sees every torch operator that runs while code is recorded, and stops what can't be recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rose_compiler.base.remarks import Blocker


class Blocked(BaseException):
    """Leaves the traced code. No ``Exception``, so that its own handlers let it through."""

    def __init__(self, blocker: Blocker) -> None:
        super().__init__(blocker.why)
        self.blocker = blocker


def blocked(code: str, why: str, allow: str | None = None) -> Blocked:
    return Blocked(Blocker(code, why, allow))


def storage_key(tensor: torch.Tensor) -> int:
    """Identity of a tensor's storage, valid while a tensor of it lives."""
    return int(tensor.untyped_storage()._cdata)


class Effects:
    """What the operators inside one recorded call did."""

    def __init__(self) -> None:
        self.writes = False  # a tensor made by an earlier call
        self.device_draw = False  # from a generator whose state can't be watched


class Audit(TorchDispatchMode):
    """Checks every operator before it runs. ``foreign`` holds the storages that the code was given;
    ``stop`` makes the exception that ends the trace."""

    def __init__(self, stop: Callable[[str, str], Blocked]) -> None:
        super().__init__()
        self.foreign: set[int] = set()
        self._stop = stop
        self._made: dict[int, torch.Tensor] = {}
        self.current: Effects | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # the wrapper that torch would put around __torch_dispatch__ imports torch._dynamo: seconds
        return False

    def inside(self) -> _Inside:
        """Operators run in this context belong to a recorded call."""
        return _Inside(self)

    def fresh(self, tensor: torch.Tensor) -> None:
        """A tensor made inside; its memory may be written inside."""
        key = storage_key(tensor)
        if key not in self.foreign:
            self._made[key] = tensor

    def __torch_dispatch__(
        self, func: Any, types_: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            self._check(func, args, kwargs)
            return func(*args, **kwargs)

    def _check(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = func._schema.name.partition("::")[2]
        effects = self.current
        if effects is None:
            raise self._stop("opaque-call", f"`{name}` runs outside a call that can be recorded")
        if torch.Tag.dynamic_output_shape in func.tags and _size_hangs_on_data(name, args):
            raise self._stop("not-traceable", f"`{name}`: the size of its result hangs on data")
        if torch.Tag.nondeterministic_seeded in func.tags:
            tensors = (a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor))
            devices = {t.device.type for t in tensors}
            devices.add(torch.device(kwargs.get("device") or "cpu").type)
            effects.device_draw |= bool(devices - {"cpu", "cuda"})
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            for tensor in value if isinstance(value, list | tuple) else [value]:
                if not isinstance(tensor, torch.Tensor):
                    continue
                key = storage_key(tensor)
                if key in self.foreign:
                    raise self._stop("not-pure", f"`{name}` writes a tensor the block was given")
                # memory that the running call itself made is nobody else's
                effects.writes |= key in self._made


class _Inside:
    def __init__(self, audit: Audit) -> None:
        self.audit = audit

    def __enter__(self) -> Effects:
        effects = Effects()
        self.outer, self.audit.current = self.audit.current, effects
        return effects

    def __exit__(self, *exc: object) -> None:
        self.audit.current = self.outer


def _size_hangs_on_data(name: str, args: tuple[Any, ...]) -> bool:
    if name != "index":
        return True
    indices = args[1] if len(args) > 1 else ()
    return any(
        isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices
    )
