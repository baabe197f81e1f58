"""Graphs as one call that needs no Python: TorchScript makes torch's own calls in the same order.

For small networks most of an update is what Python and the autograd engine spend around torch's
kernels, and a thread that holds the GIL for it keeps all others waiting. A graph of operations that
was traced once, forward and backward together, needs neither: its kernels run one after the other
while other threads have the GIL. They are the kernels of eager execution in its order, nothing is
fused, folded or batched, so the bits are the same; that is compared when a graph is made.

TorchScript is part of torch up to the versions known here, and has no new owner: where a version of
torch or Python is without it, graphs run as before.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from rose_compiler.runtime.inductor import Built, Form, Refused, traced


def scripted(function: Callable[..., list[Tensor]], given: list[Tensor]) -> Built:
    """The function of tensors as TorchScript runs it for tensors like ``given``.

    Raises:
        Refused: where this torch has no TorchScript that leaves operations as they are, or it
            would leave one out.
    """
    if not available():
        raise Refused("this torch has no TorchScript that leaves operations as they are")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is deprecated
        graph = traced(function, given)
        return Built(script_of(graph, given), graph.graph)


def script_of(graph: fx.GraphModule, given: list[Tensor]) -> Callable[..., Any]:
    """A graph of ATen operations as TorchScript runs it for tensors like ``given``."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph.graph.eliminate_dead_code()
        graph.recompile()
        made = torch.jit.trace(lambda *args: tuple(graph(*args)), tuple(given), check_trace=False)
    asked, ask = torch._C._get_graph_executor_optimize, torch._C._set_graph_executor_optimize

    def run(*args: Tensor) -> Any:
        # it would batch products of matrices, among others; the flag is one of this thread
        before = asked()
        ask(False)
        try:
            return made(*args)
        finally:
            ask(before)

    return run


def available() -> bool:
    """Whether TorchScript is there, and can be told to leave operations as they are."""
    return hasattr(torch.jit, "trace") and all(
        hasattr(torch._C, f"_{verb}_graph_executor_optimize") for verb in ("get", "set")
    )


#: Bits are eager's, or it is not used; nor where it is not faster.
SCRIPT = Form("script", scripted, exact=True)
