"""Optimizer steps by torch's fused kernels: all parameters of a group in one call.

An optimizer built without ``fused=True`` updates its parameters one by one on a CPU; for small
networks that is a good part of a training step. Here the flag is on only while ``step`` runs, so
neither a checkpoint nor the user's own code sees it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

#: Optimizers whose fused kernels do on a CPU what their loops over parameters do, to rounding.
FUSABLE: tuple[type[Optimizer], ...] = (Adam, AdamW, SGD)


def why_not_fused(optimizer: Any) -> str | None:
    """Why an optimizer can't step by the fused kernel; ``None`` if it can."""
    kind = type(optimizer)
    if kind not in FUSABLE:
        return f"no fused kernel is known for {kind.__name__}"
    step = vars(optimizer).get("step")
    # a learning rate scheduler counts the steps by a wrapper around the optimizer's own
    if step is not None and getattr(step, "__wrapped__", None) is not kind.step:
        return "its step was replaced"
    for group in optimizer.param_groups:
        for flag in ("foreach", "fused"):
            if group.get(flag) is not None:
                return f"it was built with {flag}={group[flag]}"
        for flag in ("capturable", "differentiable"):
            if group.get(flag):
                return f"it was built with {flag}=True"
        if isinstance(group["lr"], torch.Tensor):
            return "its learning rate is a tensor"
        for p in group["params"]:
            if p.device.type != "cpu":
                return f"its parameters are on {p.device.type}, where steps are grouped already"
            if p.dtype not in (torch.float32, torch.float64):
                return f"it has parameters of {p.dtype}"
    if torch.get_default_dtype() != torch.float32:
        return f"the default dtype is {torch.get_default_dtype()}; fused steps count in float32"
    return None


class Fused:
    """Makes the steps of one optimizer fused ones until :meth:`restore`."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._fused: list[dict[str, Any]] = []
        self._handles = (
            optimizer.register_step_pre_hook(self._on),
            optimizer.register_step_post_hook(self._off),
        )

    def _on(self, *_: object) -> None:
        for group in self.optimizer.param_groups:
            if group["fused"] is None and group["foreach"] is None:
                self._fused.append(group)
                group["fused"] = True

    def _off(self, *_: object) -> None:
        for group in self._fused:
            group["fused"] = None
        self._fused.clear()

    def restore(self) -> None:
        """Leave the optimizer as it was found, also when its step has raised."""
        for handle in self._handles:
            handle.remove()
        self._off()
