"""Context managers and decorators that are thread-local modes of torch, or change nothing; and what
of torch's state is looked at while code is traced."""

from __future__ import annotations

import contextlib
import types
from typing import Any

import torch
from torch.amp import autocast_mode
from torch.utils import _contextlib

from rose_compiler.ir import facts

#: A context manager that changes nothing for what runs inside.
NOTHING = facts.Context("phase")

_MODES = (torch.no_grad, torch.enable_grad, torch.inference_mode)
_LABELS = (
    torch.profiler.record_function,
    torch.autograd.profiler.record_function,
)


def context_of(
    target: Any, args: tuple[Any, ...], keywords: tuple[tuple[str, Any], ...]
) -> facts.Context | None:
    """The context that ``with target(*args, **keywords)`` enters, if it is a thread-local mode of
    torch or a marker that changes nothing."""
    if target in _MODES:
        if target is torch.inference_mode and (args or keywords):
            mode = args[0] if args else keywords[0][1]
            return facts.Context("inference_mode", (bool(mode),))
        return facts.Context(target.__name__)
    if target is torch.set_grad_enabled and len(args) == 1:
        return facts.Context("enable_grad" if args[0] else "no_grad")
    if target is torch.autocast:
        return facts.Context("autocast", (*args, *keywords))
    if getattr(target, "__rose_phase__", False):
        return facts.Context("phase", args)
    if target in _LABELS or (target is contextlib.nullcontext and not args and not keywords):
        return NOTHING
    return None


def context_of_instance(manager: Any) -> facts.Context | None:
    """The context of a context manager that exists already; ``None`` if it is no mode of torch."""
    kind = type(manager)
    if kind in (torch.no_grad, torch.enable_grad):
        return facts.Context(kind.__name__)
    if kind is torch.inference_mode:
        return facts.Context("inference_mode", (bool(manager.mode),))
    if kind is torch.set_grad_enabled:
        return facts.Context("enable_grad" if manager.mode else "no_grad")
    if kind is torch.autocast:
        keywords = (
            ("dtype", manager.fast_dtype),
            ("enabled", manager._enabled),
            ("cache_enabled", manager._cache_enabled),
        )
        return facts.Context("autocast", (manager.device, *keywords))
    if kind is contextlib.nullcontext and manager.enter_result is None:
        return NOTHING
    return None


def undecorated(
    function: types.FunctionType,
) -> tuple[types.FunctionType, tuple[facts.Context, ...]]:
    """The function inside decorators like ``@torch.no_grad()``, and the modes that they enter."""
    contexts: list[facts.Context] = []
    while (found := _inside(function)) is not None:
        function, context = found
        contexts.append(context)
    return function, tuple(contexts)


def _inside(function: types.FunctionType) -> tuple[types.FunctionType, facts.Context] | None:
    code = function.__code__
    cells = {}
    if code.co_filename in (_contextlib.__file__, autocast_mode.__file__):
        closure = function.__closure__ or ()
        cells = {n: c.cell_contents for n, c in zip(code.co_freevars, closure, strict=True)}
    if code.co_name == "decorate_context":
        manager = getattr(cells.get("ctx_factory"), "__self__", None)
    elif code.co_name == "decorate_autocast":
        manager = cells.get("autocast_instance")
    else:
        return None
    inner = cells.get("func")
    context = context_of_instance(manager)
    if context is None or not isinstance(inner, types.FunctionType):
        return None
    return inner, context


def device_offsets() -> tuple[int, ...]:
    """How far the generators of CUDA devices have gone."""
    if not torch.cuda.is_initialized():
        return ()
    return tuple(g.get_offset() for g in torch.cuda.default_generators)


def other_modes() -> tuple[bool, bool]:
    """Whether autocast and inference mode are on."""
    cast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    return cast, torch.is_inference_mode_enabled()
