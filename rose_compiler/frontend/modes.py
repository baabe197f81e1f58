"""Context managers that are thread-local modes of torch, or markers of this package."""

from __future__ import annotations

from typing import Any

import torch

from rose_compiler.ir import facts


def context_of(
    target: Any, args: tuple[Any, ...], keywords: tuple[Any, ...]
) -> facts.Context | None:
    """The context a call of ``target`` enters, if it is a thread-local mode of torch or a marker of ours."""
    if target in (torch.no_grad, torch.enable_grad, torch.inference_mode):
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
    return None
