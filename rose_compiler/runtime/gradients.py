"""A loss and its gradients by one function that Inductor compiled, forward and backward together.

Without the autograd engine in between, one call computes the loss and the gradients of all
parameters: for small networks most of an update is what torch spends around its kernels. What is
compiled holds for one make of arguments; every call checks them, and is done by torch's own
operations where they differ. So is a call whose values a check of the user's code would refuse: it
then raises what it always raised.
"""

from __future__ import annotations

import time
import types
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from rose_compiler.runtime.probe import compare_outputs
from rose_compiler.runtime.rounding import difference, reference, rounding

Forward = Callable[..., Any]

#: Makes of arguments that are compiled for one loss; others run by torch's own operations.
MAX_MAKES = 4
#: No pool of compiler processes that would outlive the run.
_SETTINGS = {"compile_threads": 1}
#: Results may differ from those of torch's own operations by so many times what rounding the
#: arguments otherwise changes, beside the tolerance of ``numerics="close"``.
LEEWAY = 4.0
_PLAIN = (bool, int, float, str, type(None))


class Refused(Exception):
    """Why a loss is left to torch's own operations."""


@dataclass(frozen=True)
class Note:
    """One attempt to compile a loss: how long it took, and ``why`` it was given up, if it was."""

    name: str
    seconds: float
    why: str = ""


@dataclass(frozen=True)
class Make:
    """A loss compiled for arguments of one make.

    ``known`` is what must hold of each argument, ``run`` takes the ``tensors`` among them (by
    position), then the ``numbers`` as tensors, and makes a truth value, ``results`` results and the
    gradients of the ``leaves``. Gradients at the positions ``copied`` share memory with another
    one.
    """

    threads: int
    known: tuple[Any, ...]
    tensors: tuple[int, ...]
    numbers: tuple[int, ...]
    leaves: tuple[int, ...]
    results: int
    run: Callable[..., Sequence[Tensor]]
    copied: frozenset[int]

    def fits(self, args: Sequence[Any]) -> bool:
        """Whether arguments are of the make it was compiled for."""
        return self.threads == torch.get_num_threads() and all(map(_is, args, self.known))


class Gradients:
    """One loss of a compiled function, and what it is compiled to for each make of arguments."""

    def __init__(self, forward: Forward) -> None:
        self.forward = forward
        self.makes: list[Make] = []
        self._refused: list[tuple[Any, ...]] = []

    def __call__(self, args: tuple[Any, ...], tell: Callable[[Note], object]) -> Any:
        """Compute the loss, and add its gradients to ``.grad`` of the leaves among ``args``.

        Returns the results behind the loss, detached: ``None``, one, or a tuple of several.
        ``tell`` is given a note of each attempt to compile.
        """
        if any(type(a) is np.ndarray for a in args):
            # arrays only index tensors here
            args = tuple(torch.from_numpy(a) if type(a) is np.ndarray else a for a in args)
        make = self._make(args, tell)
        if make is None or _hooked(args, make.leaves):
            return self.eager(args)
        with torch.no_grad():
            given = [args[k] for k in make.tensors]
            given += [_number(args[k]) for k in make.numbers]
            valid, *made = make.run(*given)
            if not valid:
                with torch.enable_grad():
                    return self.eager(args)
            count = make.results
            for number, k in enumerate(make.leaves):
                leaf, gradient = args[k], made[count + number]
                if leaf.grad is not None:
                    leaf.grad.add_(gradient)
                else:
                    leaf.grad = gradient.clone() if number in make.copied else gradient
        return tuple(made[:count]) if count > 1 else made[0] if count else None

    def eager(self, args: tuple[Any, ...]) -> Any:
        """The same by torch's own operations and its autograd engine."""
        loss, *others = self.forward(*args)
        loss.backward()
        freed = tuple(each.detach() for each in others)
        return freed if len(freed) > 1 else freed[0] if freed else None

    def _make(self, args: tuple[Any, ...], tell: Callable[[Note], object]) -> Make | None:
        if not torch.is_grad_enabled() or torch.is_anomaly_enabled() or _intercepted(args):
            return None
        for make in self.makes:
            if make.fits(args):
                if make is not self.makes[0]:
                    self.makes.remove(make)
                    self.makes.insert(0, make)
                return make
        known = (torch.get_num_threads(), *map(_known, args))
        if known in self._refused or len(self.makes) + len(self._refused) >= MAX_MAKES:
            return None
        if any(_shapes(known) == _shapes((m.threads, *m.known)) for m in self.makes):
            return None  # a number that counts trips would have every trip compiled
        started = time.perf_counter()
        why = ""
        try:
            self.makes.insert(0, compiled(self.forward, args))
        except Exception as error:
            # whatever keeps it from being compiled, torch's own operations do the same
            self._refused.append(known)
            said = str(error).strip().split("\n")[0]
            why = said if isinstance(error, Refused) else f"{type(error).__name__}: {said}"
        tell(Note(_name(self.forward), time.perf_counter() - started, why))
        return None if why else self.makes[0]


class _Freed(torch.autograd.Function):
    """A graph that has been gone backward through."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, graph: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError(
            "Trying to backward through the graph a second time (or directly access saved tensors "
            "after they have already been freed). Saved intermediate values of the graph are freed "
            "when you call .backward() or autograd.grad(). Specify retain_graph=True if you need "
            "to backward through the graph a second time or if you need to access saved tensors "
            "after calling backward."
        )


def gone_through(made: Any, recorded: tuple[int, ...]) -> Any:
    """Results of a loss, those at ``recorded`` as they are after a backward: they require grad, and
    going backward from them raises."""
    results = list(made) if isinstance(made, tuple) else [made]
    for k in recorded:
        with torch.enable_grad():
            results[k] = _Freed.apply(results[k], torch.empty(0, requires_grad=True))
    return tuple(results) if len(results) > 1 else results[0]


def compiled(forward: Forward, args: tuple[Any, ...]) -> Make:
    """Compile a loss for arguments of the make of ``args``.

    It is used only if what it computes from them agrees with torch's own operations to the
    tolerance of ``numerics="close"``.

    Args:
        forward: returns the loss, then further results, as a tuple. Functions with an attribute
            ``condition`` among its globals are checks: ``condition(*args)`` is the truth value that
            they raise without.

    Raises:
        Refused: when that is not possible; Inductor raises errors of its own.
    """
    tensors = tuple(k for k, a in enumerate(args) if isinstance(a, Tensor))
    given = [args[k] for k in tensors]
    if any(a.requires_grad and not a.is_leaf for a in given):
        raise Refused("it goes back through what was computed before")
    if len({id(a) for a in given if a.requires_grad}) < sum(a.requires_grad for a in given):
        raise Refused("it takes one parameter twice")
    wanted = tuple(k for k in tensors if args[k].requires_grad)
    loss, expected, found = reference(forward, args, wanted)
    leaves = tuple(k for k, g in zip(wanted, found, strict=True) if g is not None)
    expected += [g for g in found if g is not None]
    if loss.numel() != 1:
        raise Refused("the loss is not one number")
    if any(not args[k].is_contiguous() for k in leaves):
        raise Refused("a parameter is not contiguous")
    results = len(expected) - len(leaves)
    numbers = tuple(k for k, a in enumerate(args) if type(a) is float)
    try:
        run, made = _run(forward, args, tensors, numbers, leaves)
    except (TypeError, ValueError, RuntimeError):
        if not numbers:
            raise
        # torch takes no tensor in place of some numbers
        numbers = ()
        run, made = _run(forward, args, tensors, numbers, leaves)
    valid, *made = made
    if not valid:
        raise Refused("its checks fail")
    laid_out = [*expected[:results], *(args[k] for k in leaves)]
    if not all(a.stride() == b.stride() for a, b in zip(laid_out, made, strict=True)):
        raise Refused("compiled, its results lie otherwise in memory")
    wrong = [k for k, a in enumerate(expected) if compare_outputs(a, made[k]) == "differ"]
    if wrong:
        allowed = rounding(forward, args, wanted, expected)
        for k in wrong:
            off = difference(expected[k], made[k])
            if not off <= LEEWAY * allowed[k]:
                raise Refused(f"compiled, it differs by {off:.2g}, more than rounding does")
    return Make(
        torch.get_num_threads(),
        tuple(float if k in numbers else _known(a) for k, a in enumerate(args)),
        tensors,
        numbers,
        leaves,
        results,
        run,
        _sharing(given, made, results),
    )


def _run(
    forward: Forward,
    args: tuple[Any, ...],
    tensors: tuple[int, ...],
    numbers: tuple[int, ...],
    leaves: tuple[int, ...],
) -> tuple[Callable[..., Sequence[Tensor]], list[Tensor]]:
    """The compiled function, and what it makes of the arguments."""
    given = [args[k].detach() for k in tensors] + [_number(args[k]) for k in numbers]
    joint = _joint(forward, args, (*tensors, *numbers), leaves)
    run = _built(joint, given)
    with torch.no_grad():
        return run, list(run(*given))


def _number(value: float) -> Tensor:
    """A number as a tensor that takes part in arithmetic the way a number does."""
    return torch.scalar_tensor(value, dtype=torch.float64)


def _joint(
    forward: Forward, args: tuple[Any, ...], tensors: tuple[int, ...], leaves: tuple[int, ...]
) -> Callable[..., list[Tensor]]:
    """Forward and backward as one function of the tensors among the arguments."""

    def joint(*given: Tensor) -> list[Tensor]:
        values = list(args)
        for k, value in zip(tensors, given, strict=True):
            values[k] = value.detach().requires_grad_() if k in leaves else value.detach()
        conditions: list[Tensor] = []
        with torch.enable_grad():
            loss, *others = _unchecked(forward, conditions)(*values)
            gradients = torch.autograd.grad(loss, [values[k] for k in leaves])
        valid = torch.ones((), dtype=torch.bool, device=loss.device)
        for condition in conditions:
            valid = valid & condition.detach().all()
        return [valid, *(o.detach() for o in others), *(g.contiguous() for g in gradients)]

    return joint


def _unchecked(forward: Forward, conditions: list[Tensor]) -> Forward:
    """The function with its checks replaced: they only note their conditions."""
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


def _built(function: Callable[..., list[Tensor]], given: list[Tensor]) -> Callable[..., Any]:
    # the import alone takes seconds
    import torch._inductor.config as config
    from torch._inductor import compile as inductor

    with torch.no_grad(), warnings.catch_warnings(), config.patch(_SETTINGS):
        warnings.simplefilter("ignore")
        graph = make_fx(function)(*given)
        built: Callable[..., Any] = inductor(graph, list[Any](given))
        built(*given)
    return built


def _sharing(given: list[Tensor], made: list[Tensor], results: int) -> frozenset[int]:
    """Which gradients share memory with an argument, a result or an earlier gradient."""
    taken = {a.untyped_storage().data_ptr() for a in given}
    shared = set()
    for number, value in enumerate(made):
        where = value.untyped_storage().data_ptr()
        if where in taken and value.numel():
            if number < results:
                raise Refused("a result shares memory with another one")
            shared.add(number - results)
        taken.add(where)
    return frozenset(shared)


def _known(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device, value.requires_grad
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
    return type(value) is type(known) and bool(value == known)


def _shapes(known: tuple[Any, ...]) -> tuple[Any, ...]:
    """What is known of arguments, numbers left out."""
    return known[0], *(k if type(k) is tuple else None for k in known[1:])


def _hooked(args: tuple[Any, ...], leaves: tuple[int, ...]) -> bool:
    """Whether somebody watches a gradient arrive."""
    return any(args[k]._backward_hooks or args[k]._post_accumulate_grad_hooks for k in leaves)


def _intercepted(args: tuple[Any, ...]) -> bool:
    """Whether modes see or change what torch computes here, or arguments are more than tensors and
    numbers."""
    if any(not isinstance(a, (Tensor, *_PLAIN)) for a in args):
        return True
    return (
        torch.is_autocast_enabled("cpu")
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or any(type(a) not in _KINDS and isinstance(a, Tensor) for a in args)
    )


_KINDS = (Tensor, torch.nn.Parameter)


def _name(forward: Forward) -> str:
    return str(getattr(forward, "__name__", type(forward).__name__))


_known_losses: dict[Any, Gradients] = {}


def of(forward: Forward) -> Gradients:
    """The losses of a function; one and the same for functions of the same code and globals, so
    that code emitted anew finds what was compiled."""
    key = _identity(forward)
    return _known_losses.setdefault(key, Gradients(forward))


def _identity(forward: Forward) -> Any:
    if not isinstance(forward, types.FunctionType):
        return id(forward)
    code, known = forward.__code__, forward.__globals__
    return (
        code.co_name,
        code.co_code,
        code.co_consts,
        code.co_varnames,
        tuple((n, id(known.get(n))) for n in code.co_names),
    )
