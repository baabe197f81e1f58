"""What Inductor made of a graph or a loss as a CUDA graph: its kernels launched by one call.

A captured graph reads and writes fixed memory. What differs from call to call is copied into
buffers of its own in front of a replay; parameters are read where they lie, so that steps of an
optimizer are seen; results are good until the next replay, so whoever replays takes what it needs
of them before that. Numbers that lie in host memory are baked into the kernels' arguments, and
hold for the values they were captured with. What does not fit is done by the plain form.

A capture is asked for only where nothing in the graph can make it fail: a failed one would leave
the device's default generator and its allocator in a state that later draws trip over. Should one
fail all the same, they are put right and nothing is captured any more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, fx

from rose_compiler.runtime.inductor import LEEWAY, PAYS, Note, Refused, faster
from rose_compiler.runtime.probe import compare_outputs
from rose_compiler.runtime.rounding import difference, moved

Run = Callable[..., Sequence[Tensor]]
T = TypeVar("T")

#: Runs on the side stream in front of a capture: libraries make their handles and workspaces in the
#: first ones.
WARM_UPS = 3
#: Times that one function is captured for one make of arguments: its parameters may be moved, and
#: its numbers may change.
MAX_CAPTURES = 4
#: Device memory that the copies of a graph's arguments may take, as a share of what is free.
SHARE = 0.1


class Device(Protocol):
    """Who captures and replays: :class:`Cuda`."""

    def why_not(self, given: Sequence[Tensor]) -> str:
        """Why nothing can be captured for these arguments; empty where it can."""

    def capture(self, run: Callable[[], Sequence[Tensor]]) -> tuple[Any, list[Tensor]]:
        """Run a function as often as it takes to warm it up, then capture it: what can be told to
        ``replay()``, and the tensors that each replay writes."""

    def follow(self, stream: Any) -> Any:
        """Let the current stream wait for ``stream``, where it is another one; the current one."""

    def wait(self) -> None:
        """Wait until the device has done what was asked of it."""


class Cuda:
    """Captures and replays on a CUDA device."""

    def __init__(self) -> None:
        self.broken = ""

    def why_not(self, given: Sequence[Tensor]) -> str:
        """Why nothing can be captured for these arguments; empty where it can."""
        if self.broken:
            return self.broken
        if not torch.cuda.is_available() or torch.version.hip is not None:
            return "there is no CUDA device"
        if not all(hasattr(torch.cuda.CUDAGraph, n) for n in ("capture_begin", "replay", "reset")):
            return "this torch captures no CUDA graphs"
        devices = {a.device for a in given if not _number(a)}
        if len(devices) != 1 or (device := devices.pop()).type != "cuda":
            return "not all of its arguments lie on one CUDA device"
        if device.index != torch.cuda.current_device():
            return "its arguments lie on a device that is not the current one"
        if torch.cuda.is_current_stream_capturing():
            return "somebody is capturing it already"
        copied = sum(a.nbytes for a in given if not isinstance(a, torch.nn.Parameter))
        if copied > SHARE * torch.cuda.mem_get_info(device)[0]:
            return f"copies of its arguments would take {copied >> 20} MiB"
        return ""

    def capture(self, run: Callable[[], Sequence[Tensor]]) -> tuple[Any, list[Tensor]]:
        """Capture a function on a stream of its own, after it ran there; see :class:`Device`."""
        main, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            # the context manager of torch would leave the side stream current after a failure
            with torch.cuda.stream(side):
                # other threads may allocate and launch meanwhile
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    made = list(run())
                finally:
                    graph.capture_end()
        except Exception as error:
            first = str(error).strip().split("\n")[0]  # which may be empty
            self.broken = f"a capture has failed before: {first}"
            _healed()
            raise
        main.wait_stream(side)
        return graph, made

    def follow(self, stream: Any) -> Any:
        """Let the current stream wait for ``stream``, where it is another one; the current one."""
        current = torch.cuda.current_stream()
        if stream is not None and stream != current:
            current.wait_stream(stream)
        return current

    def wait(self) -> None:
        """Wait until the device has done what was asked of it."""
        torch.cuda.synchronize()


def _healed() -> None:
    """Give the default generator a state that no failed capture has marked, with its numbers."""
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    generator.graphsafe_set_state(generator.clone_state())


#: Who captures in this process.
DEVICE: Device = Cuda()


class Captured:
    """One CUDA graph of a function, for arguments of one make.

    ``fixed`` are the positions of arguments that are read where they lie; they are kept alive, so
    that no other tensor can take their place in memory.
    """

    def __init__(self, run: Run, given: Sequence[Tensor], fixed: Collection[int]) -> None:
        for k, value in enumerate(given):
            if k not in fixed and not _number(value) and _overlapping(value):
                raise Refused("an argument's rows lie over each other")
        self._where = {k: given[k].data_ptr() for k in fixed}
        self._numbers = {k: a.clone() for k, a in enumerate(given) if _number(a)}
        self._copied = [k for k in range(len(given)) if k not in fixed and k not in self._numbers]
        self._given = [a.detach() for a in given]
        for k in self._copied:
            own = torch.empty_strided(
                given[k].shape, given[k].stride(), dtype=given[k].dtype, device=given[k].device
            )
            self._given[k] = own.copy_(given[k].detach())
        self._graph, self._made = DEVICE.capture(lambda: run(*self._given))
        owned = {self._given[k].untyped_storage().data_ptr() for k in self._copied}
        if any(m.untyped_storage().data_ptr() in owned for m in self._made):
            raise Refused("a result shares memory with an argument")
        self._stream: Any = None

    def fits(self, given: Sequence[Tensor]) -> bool:
        """Whether parameters lie where they were, and numbers are those that were captured."""
        if any(given[k].data_ptr() != where for k, where in self._where.items()):
            return False
        return all(torch.equal(given[k], number) for k, number in self._numbers.items())

    def __call__(self, given: Sequence[Tensor]) -> list[Tensor]:
        """Replay the graph on these arguments; its results, until it is replayed again."""
        self._stream = DEVICE.follow(self._stream)
        for k in self._copied:
            self._given[k].copy_(given[k])
        self._graph.replay()
        return self._made

    def close(self) -> None:
        """Give its memory back."""
        DEVICE.wait()
        self._graph.reset()


class Replays:
    """The CUDA graphs of one function that was compiled for one make of arguments.

    ``run`` takes tensors and returns tensors, all of them new memory or none of it touched.
    """

    def __init__(self, name: str, run: Run, why_not: str = "") -> None:
        self.name = name
        self.run = run
        self.why_not = why_not
        self.count = 0
        self.captured: Captured | None = None
        self._lock = threading.Lock()

    def __call__(
        self,
        given: Sequence[Tensor],
        take: Callable[[list[Tensor]], T],
        quiet: Callable[[], bool],
        tell: Callable[[Note], object],
    ) -> tuple[T] | None:
        """What ``take`` makes of the results of a replay, alone in a tuple; ``None``: the plain
        form has to do it. ``take`` has to copy what it keeps.

        ``quiet`` tells whether nobody else of this training draws from the device's generator: it
        can't while something is captured. ``tell`` is given a note of each capture.
        """
        if self.why_not and self.captured is None:
            if self.count == 0:
                self._refuse(self.why_not, 0.0, tell)
            return None
        if not self._lock.acquire(blocking=False):
            return None  # its buffers are in use on another thread
        try:
            found = self.captured
            if found is None or not found.fits(given):
                found = self._capture(given, quiet, tell)
            return None if found is None else (take(found(given)),)
        finally:
            self._lock.release()

    def _capture(
        self, given: Sequence[Tensor], quiet: Callable[[], bool], tell: Callable[[Note], object]
    ) -> Captured | None:
        if self.count >= MAX_CAPTURES or not quiet():
            return None
        started = time.perf_counter()
        found: Captured | None = None
        try:
            if why := DEVICE.why_not(given):
                raise Refused(why)
            fixed = {k for k, a in enumerate(given) if isinstance(a, torch.nn.Parameter)}
            with torch.no_grad():
                found = Captured(self.run, given, fixed)
                _agrees(self.run, found, given)
                # what it was timed at holds for the graph that takes its place
                gain = "" if self.count else _paid(self.run, found, given)
        except Exception as error:
            # whatever keeps it from being captured, the plain form does the same
            if found is not None:
                found.close()
            said = str(error).strip().split("\n")[0]
            why = said if isinstance(error, Refused) else f"{type(error).__name__}: {said}"
            self._refuse(why, time.perf_counter() - started, tell)
            return None
        self.count += 1
        if self.captured is not None:
            self.captured.close()
        self.captured = found
        tell(Note(self.name, time.perf_counter() - started, kind="cuda-graph", gain=gain))
        return found

    def _refuse(self, why: str, seconds: float, tell: Callable[[Note], object]) -> None:
        self.count = MAX_CAPTURES
        tell(Note(self.name, seconds, why, kind="cuda-graph"))


def replays_of(name: str, run: Run) -> Replays:
    """The CUDA graphs of what Inductor made of a graph (``run.graph``)."""
    graph = getattr(run, "graph", None)
    why = "its operations are not known" if graph is None else why_not_captured(graph)
    return Replays(name, run, why)


def copies(made: Sequence[Tensor]) -> list[Tensor]:
    """Results of a replay as memory of their own."""
    return [value.clone() for value in made]


def why_not_captured(graph: fx.Graph) -> str:
    """Why a graph of ATen operations would not be captured, or not be the same when it is replayed;
    empty where nothing speaks against it.

    Operations say of themselves, by their tags, whether the host has to wait for a number or a
    shape that they compute, and whether they draw.
    """
    for node in graph.nodes:
        target = node.target
        if not isinstance(target, torch._ops.OpOverload):
            continue
        if torch.Tag.data_dependent_output in target.tags:
            return f"the host waits for what {target} computes"
        if torch.Tag.dynamic_output_shape in target.tags and _by_values(node):
            return f"the shape of what {target} makes hangs on values"
        if torch.Tag.nondeterministic_seeded in target.tags:
            return f"{target} draws"
        if target.overloadpacket in _MOVES and len(_devices(node)) > 1:
            return f"{target} copies between the host and a device"
    return ""


_MOVES = (torch.ops.aten._to_copy, torch.ops.aten.copy_, torch.ops.aten.copy)


def _devices(node: fx.Node) -> set[str]:
    """The kinds of devices of a node's result and arguments."""
    found = (n.meta.get("val") for n in (node, *node.all_input_nodes))
    return {v.device.type for v in found if isinstance(v, Tensor)}


def _by_values(node: fx.Node) -> bool:
    """Whether an operation that may have a shape of its values has one: indexing by whole numbers
    has not."""
    if node.target is not torch.ops.aten.index.Tensor:
        return True
    given = node.args[1] if len(node.args) > 1 else node.kwargs["indices"]
    assert isinstance(given, list | tuple)
    found = [n.meta["val"] for n in given if isinstance(n, fx.Node) and "val" in n.meta]
    known = sum(n is not None for n in given) == len(found)
    return not known or any(v.dtype in (torch.bool, torch.uint8) for v in found)


def _number(value: Tensor) -> bool:
    """Whether a tensor is a number in the host's memory."""
    return value.device.type == "cpu" and value.dim() == 0


def _overlapping(value: Tensor) -> bool:
    return any(s == 0 and n > 1 for s, n in zip(value.stride(), value.shape, strict=True))


def _rolled(value: Tensor) -> Tensor:
    """The rows of a tensor, the first one last, laid out in memory as they were."""
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return made.copy_(value.detach().roll(1, 0))


def _agrees(run: Run, found: Captured, given: Sequence[Tensor]) -> None:
    """Refuse a graph that makes something else of other arguments than the plain form does: the
    first row of each goes last, so that what was baked in shows."""
    others = [a if isinstance(a, torch.nn.Parameter) or a.dim() == 0 else _rolled(a) for a in given]
    expected = [e.clone() for e in run(*others)]
    made = copies(found(others))
    wrong = [k for k, a in enumerate(expected) if compare_outputs(a, made[k]) == "differ"]
    if not wrong:
        return
    allowed = moved(lambda near: [e.clone() for e in run(*near)], tuple(others), expected)
    for k in wrong:
        off = difference(expected[k], made[k])
        if not off <= LEEWAY * allowed[k]:
            raise Refused(f"replayed, it differs by {off:.2g}, more than rounding does")


def _paid(run: Run, found: Captured, given: Sequence[Tensor]) -> str:
    """What a replay takes, copies included, beside the plain form; refused where it is no less."""
    before, after = faster(lambda: run(*given), lambda: copies(found(given)), DEVICE.wait)
    if after > PAYS * before:
        raise Refused(
            f"replayed, it takes {1e6 * after:.0f} us instead of {1e6 * before:.0f}: too little is "
            "won"
        )
    return f"{1e6 * after:.0f} us instead of {1e6 * before:.0f}"
