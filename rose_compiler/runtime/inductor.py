"""What losses and graphs that are compiled have in common: makes of arguments, and who may be
compiled for one; and Inductor, by which most of them are."""

from __future__ import annotations

import copy
import math
import os
import statistics
import time
import types
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from rose_compiler.base import gaps

Forward = Callable[..., Any]

#: Makes of arguments that one function is compiled for; others run by torch's own operations.
MAX_MAKES = 4
#: Functions of this process that are kept compiled, those used last; a compiled function of the
#: user's keeps its own.
MAX_FUNCTIONS = 64
#: Results may differ from those of torch's own operations by so many times what rounding the
#: arguments otherwise changes, beside the tolerance of ``numerics="close"``.
LEEWAY = 4.0
#: Calls of each kind that are timed when something was compiled, at most and at least, and the
#: seconds after which it is enough.
ROUNDS = 30
LEAST_ROUNDS = 5
ROUNDS_S = 0.2
#: Share of the time of the plain form that what is faster may take at most.
PAYS = 0.95
#: Compilers of C++ at once, at most.
MAX_COMPILERS = 8
_PLAIN = (bool, int, float, str, type(None))
_KINDS = (Tensor, torch.nn.Parameter)


class Refused(Exception):
    """Why a function is left to torch's own operations."""


@dataclass(frozen=True)
class Note:
    """One attempt to compile a function, or to capture what it was compiled to (``kind``:
    ``"inductor"``, ``"script"``, ``"tiles"``, ``"cuda-graph"``): how long it took, ``why`` it was
    given up, if it was, and what is gained by it where that was measured."""

    name: str
    seconds: float
    why: str = ""
    kind: str = "inductor"
    gain: str = ""


class Built:
    """What was made of the ATen operations of ``graph``; called by ``run``."""

    def __init__(self, run: Callable[..., Any], graph: fx.Graph) -> None:
        self.run = run
        self.graph = graph

    def __call__(self, *given: Tensor) -> Any:
        return self.run(*given)


@dataclass(frozen=True)
class Form:
    """A way to compile: ``build`` makes a function of tensors for tensors of one make, if it is not
    Inductor. ``kind`` is that of its notes. ``exact``: bits must be those of torch's own operations
    one by one. ``tiled``, in its place: makes one that is told the positions of parameters, too.
    ``otherwise``: what is tried where this is refused."""

    kind: str
    build: Callable[[Callable[..., list[Tensor]], list[Tensor]], Built] | None = None
    exact: bool = False
    tiled: Callable[[Callable[..., list[Tensor]], list[Tensor], set[int]], Built] | None = None
    otherwise: Form | None = None


INDUCTOR = Form("inductor")


class Fitting(Protocol):
    """What a function was compiled to for arguments of one make."""

    @property
    def threads(self) -> int:
        """Of torch, when it was compiled."""

    @property
    def known(self) -> tuple[Any, ...]:
        """What must hold of each argument."""

    @property
    def gain(self) -> str:
        """What a call takes, and took before, in words."""


M = TypeVar("M", bound=Fitting)


class Makes(Generic[M]):
    """What one function is compiled to, by make of its arguments, in the order last used."""

    def __init__(
        self,
        forward: Forward,
        compiler: Callable[[Forward, tuple[Any, ...], Form], M],
        form: Form,
    ) -> None:
        self.forward = forward
        self.compiler = compiler
        self.form = form
        self.found: list[M] = []
        self._refused: list[tuple[Any, ...]] = []

    def get(self, args: tuple[Any, ...], tell: Callable[[Note], object]) -> M | None:
        """What holds for ``args``, compiled where there is none; ``None``: torch's own operations
        do it. ``tell`` is given a note of each attempt to compile."""
        found = self.found
        if found and fits(found[0], args):
            return found[0]
        for make in found:
            if fits(make, args):
                # a new list: functions of other threads may be looking through this one
                self.found = [make, *(other for other in found if other is not make)]
                return make
        known = (torch.get_num_threads(), *map(known_of, args))
        if known in self._refused or len(found) + len(self._refused) >= MAX_MAKES:
            return None
        if any(_shapes(known) == _shapes((m.threads, *m.known)) for m in found):
            return None  # a number that counts trips would have every trip compiled
        started = time.perf_counter()
        why = ""
        made: M | None = None
        try:
            made = self.compiler(self.forward, args, self.form)
            self.found = [made, *self.found]
        except Exception as error:
            # whatever keeps it from being compiled, torch's own operations do the same
            self._refused.append(known)
            said = str(error).strip().split("\n")[0]
            why = said if isinstance(error, Refused) else f"{type(error).__name__}: {said}"
        gain = "" if made is None else made.gain
        seconds = time.perf_counter() - started
        tell(Note(name_of(self.forward), seconds, why, self.form.kind, gain))
        return made


def fits(make: Fitting, args: Sequence[Any]) -> bool:
    """Whether arguments are of the make that something was compiled for."""
    return make.threads == torch.get_num_threads() and all(map(_is, args, make.known))


def known_of(value: Any) -> Any:
    """What is known of an argument: of a tensor all but its numbers, else the value."""
    if isinstance(value, Tensor):
        strides = gaps.strides_of(value)
        return value.shape, strides, value.dtype, value.device, value.requires_grad
    return value


def _is(value: Any, known: Any) -> bool:
    """Whether an argument is of the make that is known."""
    if known is float:
        return type(value) is float
    if type(known) is tuple:
        return isinstance(value, Tensor) and known == (
            value.shape,
            value.stride(),
            value.dtype,
            value.device,
            value.requires_grad,
        )
    if type(value) is not type(known) or value != known:
        return False
    return value != 0 or not isinstance(value, float) or _sign(value) == _sign(known)


def _sign(value: float) -> float:
    return math.copysign(1.0, value)  # 0.0 and -0.0 are equal, but computed with they are not


def _shapes(known: tuple[Any, ...]) -> tuple[Any, ...]:
    """What is known of arguments, numbers left out."""
    return known[0], *(k if type(k) is tuple else None for k in known[1:])


def intercepted(args: tuple[Any, ...]) -> bool:
    """Whether modes, or hooks for what graphs save, see or change what torch computes here, or
    arguments are more than tensors and numbers."""
    for value in args:
        if type(value) not in _KINDS and not isinstance(value, _PLAIN):
            return True
    return (
        torch.is_autocast_enabled("cpu")
        or torch.is_autocast_enabled("cuda")
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    )


def attempted(run: Callable[..., Any], given: Sequence[Tensor]) -> Any:
    """What a compiled function makes; ``None`` where it raises: torch's own operations then raise
    what they always raised."""
    try:
        return run(*given)
    except Exception:
        return None


def unchecked(forward: Forward, conditions: list[Tensor]) -> Forward:
    """The function with its checks replaced: they only note their conditions.

    Functions with an attribute ``condition`` among its globals are checks: ``condition(*args)`` is
    the truth value that they raise without.
    """
    if not isinstance(forward, types.FunctionType):
        return forward
    known = forward.__globals__
    changed = {
        name: _noting(known[name].condition, conditions)
        for name in forward.__code__.co_names
        if callable(getattr(known.get(name), "condition", None))
    }
    return types.FunctionType(
        forward.__code__, {**known, **changed}, forward.__name__, forward.__defaults__
    )


def _noting(condition: Callable[..., Tensor], conditions: list[Tensor]) -> Callable[..., None]:
    return lambda *args: conditions.append(condition(*args))


def holding(conditions: Sequence[Tensor], device: torch.device) -> Tensor:
    """Whether all conditions that were noted hold, as a tensor of one truth value."""
    valid = torch.ones((), dtype=torch.bool, device=device)
    for condition in conditions:
        valid = valid & condition.detach().all()
    return valid


def traced(function: Callable[..., list[Tensor]], given: list[Tensor]) -> fx.GraphModule:
    """The function of tensors as a graph of ATen operations.

    Raises:
        Refused: where one of them makes nothing, but may raise: compilers leave it out.
    """
    graph = make_fx(function)(*given)
    for node in graph.graph.nodes:
        if isinstance(node.target, OpOverload) and not node.target._schema.returns:
            raise Refused(f"{node.target} may raise, and would be left out")
    return graph


def built(function: Callable[..., list[Tensor]], given: list[Tensor]) -> Built:
    """The function of tensors as Inductor compiles it for tensors like ``given``."""
    # the import alone takes seconds
    import torch._inductor.config as config
    from torch._inductor import compile as inductor

    # without a shape environment Inductor leaves its cache on disk alone, in which another run of
    # the same training finds everything but the trace
    fake = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    with torch.no_grad(), warnings.catch_warnings(), config.patch(_settings(given)):
        warnings.simplefilter("ignore")
        graph = traced(function, given)
        kept = copy.deepcopy(graph.graph)  # Inductor rewrites what it is given
        like = [fake.from_tensor(value, static_shapes=True) for value in given]
        made: Callable[..., Any] = inductor(graph, list[Any](like))
        made(*given)
    return Built(made, kept)


def _settings(given: list[Tensor]) -> dict[str, Any]:
    """Options of Inductor: no pool of processes that would outlive the run, as it would start for a
    GPU's kernels; compilers of C++ are run by threads. What is kept on disk is for one number of
    torch's threads."""
    beside = all(value.device.type == "cpu" for value in given)
    return {
        "compile_threads": min(MAX_COMPILERS, os.cpu_count() or 1) if beside else 1,
        "cpp.threads": torch.get_num_threads(),
    }


def faster(
    own: Callable[[], object], other: Callable[[], object], wait: Callable[[], object]
) -> tuple[float, float]:
    """Median seconds of the plain form and of another one, timed in turn; ``wait`` until a device
    has done what was asked of it."""
    taken: tuple[list[float], list[float]] = ([], [])
    began = time.perf_counter()
    while len(taken[0]) < LEAST_ROUNDS or (
        len(taken[0]) < ROUNDS and time.perf_counter() - began < ROUNDS_S
    ):
        for run, seconds in zip((own, other), taken, strict=True):
            start = time.perf_counter()
            run()
            wait()
            seconds.append(time.perf_counter() - start)
    before, after = map(statistics.median, taken)
    return before, after


def finished() -> None:
    """Wait until a device has done what was asked of it."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def instead(before: float, after: float) -> str:
    """Seconds of a call before and after, in words."""
    return f"{1e6 * after:.0f} us a call instead of {1e6 * before:.0f}"


def name_of(forward: Forward) -> str:
    """The name of a function, for people."""
    return str(getattr(forward, "__name__", type(forward).__name__))


def identity(forward: Forward) -> Any:
    """What is the same for functions of the same code and globals, so that code emitted anew finds
    what was compiled."""
    if not isinstance(forward, types.FunctionType):
        return id(forward)
    code, known = forward.__code__, forward.__globals__
    return (
        code.co_name,
        code.co_code,
        # numbers that are equal are not the same: 1 and 1.0, 0.0 and -0.0
        tuple(c if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts),
        code.co_varnames,
        tuple((n, id(known.get(n))) for n in code.co_names),
    )
