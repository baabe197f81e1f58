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
        run_all = _Traced(graph).run
        made = torch.jit.trace(lambda *args: tuple(run_all(*args)), tuple(given), check_trace=False)
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


class _Traced(fx.Interpreter):
    """Runs a graph for the tracer, which can't note flags in a list: of an operation with such, as
    a convolution's backward, it notes the call of a function that has them."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        #: made before anything is traced: what the tracer sees compiled it takes for its own
        self.functions = {n: _function(n) for n in graph.graph.nodes if _has_flags(n)}

    def run_node(self, node: fx.Node) -> Any:
        """What a node makes; of what nobody uses, ``None``."""
        function = self.functions.get(node)
        if function is None:
            return super().run_node(node)
        used = _used(node)
        values = function(*(self.env[n] for n in node.all_input_nodes))
        made = dict(zip(used, values if len(used) > 1 else (values,), strict=True))
        return [made.get(k) for k in range(max(used) + 1)]


def _has_flags(node: fx.Node) -> bool:
    return any(isinstance(a, list | tuple) and a and type(a[0]) is bool for a in node.args)


def _used(node: fx.Node) -> list[int]:
    """Which of its results are used."""
    items: list[Any] = [user.args[1] for user in node.users]
    return sorted(set(items))


def _function(node: fx.Node) -> Callable[..., Any]:
    """A function of TorchScript that calls an operation with all that is no tensor."""
    names = {n: f"given_{k}" for k, n in enumerate(node.all_input_nodes)}
    given = ", ".join(names[a] if isinstance(a, fx.Node) else repr(a) for a in node.args)
    target: Any = node.target
    made = [f"made_{k}" for k in range(len(target._schema.returns))]
    text = (
        f"def call({', '.join(f'{n}: Tensor' for n in names.values())}):\n"
        f"    {', '.join(made)} = torch.ops.{target._schema.name.replace('::', '.')}({given})\n"
        f"    return {', '.join(made[k] for k in _used(node))}\n"
    )
    function: Callable[..., Any] = torch.jit.CompilationUnit(text).call
    return function


def available() -> bool:
    """Whether TorchScript is there, and can be told to leave operations as they are."""
    return hasattr(torch.jit, "trace") and all(
        hasattr(torch._C, f"_{verb}_graph_executor_optimize") for verb in ("get", "set")
    )


#: Bits are eager's, or it is not used; nor where it is not faster.
SCRIPT = Form("script", scripted, exact=True)
