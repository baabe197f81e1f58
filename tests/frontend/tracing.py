"""Functions traced or refused, and the traced graph run again."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from rose_compiler.base.remarks import Blocker
from rose_compiler.frontend.trace import Traced, trace
from rose_compiler.ir.facts import Context

NO_GRAD = (Context("no_grad"),)


def lifted_of(**modules: nn.Module) -> dict[str, Tensor]:
    return {
        f"{root}.{name}": tensor
        for root, module in modules.items()
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]
    }


def mlp(inputs: int = 5, outputs: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, outputs))


def traced(fn: Any, *args: Any, **options: Any) -> Traced:
    options.setdefault("lifted", {})
    found = trace(fn, args, **options)
    assert isinstance(found, Traced), found
    return found


def refused(code: str, fn: Any, *args: Any, **options: Any) -> Blocker:
    options.setdefault("lifted", {})
    found = trace(fn, args, **options)
    assert isinstance(found, Blocker), found.gm.code
    assert found.code == code, found
    return found


def run(t: Traced, args: tuple[Any, ...], lifted: dict[str, Tensor]) -> Any:
    return t.gm.forward(*(args[a] if isinstance(a, int) else lifted[a] for a in t.arguments))
