"""A stand-in for what captures CUDA graphs, on the CPU: a replay runs the recorded operations again
on the memory that they were recorded with, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "equal")


class Recorder(TorchDispatchMode):
    """Keeps every operation with its arguments and the memory of its results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.removeprefix("aten::") in WAITS:
            raise RuntimeError("operation not permitted when stream is capturing")
        made = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, made))
        return made


class Graph:
    """What was recorded; the memory of its results holds nothing until it is replayed."""

    def __init__(self, calls: list[tuple[Any, Any, Any, Any]], log: list[str]) -> None:
        self.calls = calls
        self.log = log
        self.gone = False

    def replay(self) -> None:
        assert not self.gone, "a graph that was reset is replayed"
        self.log.append("replay")
        for func, args, kwargs, made in self.calls:
            found = func(*args, **kwargs)
            for new, old in zip(_tensors(found), _tensors(made), strict=True):
                if new.untyped_storage().data_ptr() != old.untyped_storage().data_ptr():
                    old.copy_(new)  # a view, or what is done in place, lies there already

    def reset(self) -> None:
        self.log.append("reset")
        self.gone = True


class StandIn:
    """In place of :class:`rose_compiler.runtime.cuda_graphs.Cuda`. ``log`` says what was done."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.refuses = ""
        self.streams = 0
        self.stream: Any = "main"

    def why_not(self, given: Sequence[Tensor]) -> str:
        return self.refuses

    def capture(self, run: Callable[[], Sequence[Tensor]]) -> tuple[Any, list[Tensor]]:
        self.log.append("warm up")
        run()
        with Recorder() as recorder:
            made = list(run())
        self.log.append("capture")
        given = {a.untyped_storage().data_ptr() for c in recorder.calls for a in _tensors(c[1])}
        for value in made:
            if value.untyped_storage().data_ptr() not in given:
                value.fill_(0)  # nothing has run
        return Graph(recorder.calls, self.log), made

    def follow(self, stream: Any) -> Any:
        if stream not in (None, self.stream):
            self.log.append(f"{self.stream} waits for {stream}")
        return self.stream

    def wait(self) -> None:
        pass


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [t for v in value for t in _tensors(v)]
    return []
