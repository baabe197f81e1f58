"""A loss and its gradients by one function that was compiled, forward and backward together.

Without the autograd engine in between, one call computes the loss and the gradients of all
parameters: for small networks most of an update is what torch spends around its kernels. What is
compiled holds for one make of arguments; every call checks them, and is done by torch's own
operations where they differ. So is a call whose values a check of the user's code would refuse: it
then raises what it always raised.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rose_compiler.base.latest import latest
from rose_compiler.runtime.cuda_graphs import Replays, replays_of
from rose_compiler.runtime.freed import gone_through, leaf
from rose_compiler.runtime.inductor import (
    INDUCTOR,
    LEEWAY,
    MAX_FUNCTIONS,
    PAYS,
    Form,
    Forward,
    Makes,
    Note,
    Refused,
    attempted,
    faster,
    finished,
    holding,
    identity,
    instead,
    intercepted,
    known_of,
    name_of,
    unchecked,
)
from rose_compiler.runtime.inductor import built as _built
from rose_compiler.runtime.probe import compare_outputs, same_bits
from rose_compiler.runtime.rounding import difference, reference, rounding


@dataclass(frozen=True)
class Make:
    """A loss compiled for arguments of one make.

    ``known`` is what must hold of each argument, ``run`` takes the ``tensors`` among them (by
    position), then the ``numbers`` as tensors, and makes a truth value, ``results`` results and the
    gradients of the ``leaves``. ``names``: of the nodes that made the results. Gradients at the
    positions ``copied`` share memory with another one. ``checked``: whether the truth value may be
    false. ``gain``: what a call takes and took, timed by itself.
    """

    threads: int
    known: tuple[Any, ...]
    tensors: tuple[int, ...]
    numbers: tuple[int, ...]
    leaves: tuple[int, ...]
    results: int
    names: tuple[str, ...]
    run: Callable[..., Sequence[Tensor]]
    replays: Replays
    copied: frozenset[int]
    checked: bool
    gain: str


class Gradients:
    """One loss of a compiled function, and what it is compiled to for each make of arguments."""

    def __init__(self, forward: Forward, form: Form = INDUCTOR) -> None:
        self.forward = forward
        self.form = form
        self.makes = Makes(forward, compiled, form)
        self._partial: dict[tuple[int, ...], Makes[Make]] = {}  # by what is left out
        self.otherwise = None if form.otherwise is None else of(forward, form.otherwise)

    def __call__(
        self,
        args: tuple[Any, ...],
        tell: Callable[[Note], object],
        quiet: Callable[[], bool] | None = None,
        dropped: Any = None,
        recorded: tuple[int, ...] = (),
    ) -> Any:
        """Compute the loss, and add its gradients to ``.grad`` of the leaves among ``args``.

        Returns the results behind the loss: ``None``, one, or a tuple of several. They are
        detached, but for those at ``recorded``: these are as they are after a backward, they
        require grad, and going backward from them raises.
        ``tell`` is given a note of each attempt to compile. With ``quiet`` it is replayed as a CUDA
        graph where it can be (see :mod:`rose_compiler.runtime.cuda_graphs`). ``dropped`` leaves out
        the gradients of the arguments at ``dropped.positions(args)``, and goes ``backward(loss)``.
        """
        if any(type(a) is np.ndarray for a in args):
            # arrays only index tensors here
            args = tuple(torch.from_numpy(a) if type(a) is np.ndarray else a for a in args)
        if not torch.is_grad_enabled() or torch.is_anomaly_enabled() or intercepted(args):
            return self.eager(args, dropped, recorded)
        without = dropped.positions(args) if dropped is not None else ()
        make = self._makes(without).get(args, tell)
        if make is None and self.otherwise is not None:
            return self.otherwise(args, tell, quiet, dropped, recorded)
        if make is None or not _plain(args, make):
            return self.eager(args, dropped, recorded)
        with torch.no_grad():
            given = [args[k] for k in make.tensors]
            given += [_number(args[k]) for k in make.numbers]
            replayed = None
            if quiet is not None:
                replayed = make.replays(given, lambda m: _taken(make, args, m), quiet, tell)
            made = attempted(make.run, given) if replayed is None else None
            results = _added(make, args, made) if replayed is None else replayed[0]
            if results is None:
                with torch.enable_grad():
                    return self.eager(args, dropped, recorded)
            results = list(results)
        for k in recorded:
            if name := make.names[k]:
                results[k] = gone_through(name).apply(results[k].detach(), leaf())
        return tuple(results) if len(results) > 1 else results[0] if results else None

    def _makes(self, without: tuple[int, ...]) -> Makes[Make]:
        found = self._partial.get(without) if without else self.makes
        if found is None:

            def compiler(forward: Forward, args: tuple[Any, ...], form: Form) -> Make:
                return compiled(forward, args, form, without)

            found = self._partial[without] = Makes(self.forward, compiler, self.form)
        return found

    def eager(
        self, args: tuple[Any, ...], dropped: Any = None, recorded: tuple[int, ...] = ()
    ) -> Any:
        """The same by torch's own operations and its autograd engine."""
        loss, *others = self.forward(*args)
        if dropped is None:
            loss.backward()
        else:
            dropped.backward(loss)
        freed = tuple(r if k in recorded else r.detach() for k, r in enumerate(others))
        return freed if len(freed) > 1 else freed[0] if freed else None


def _added(
    make: Make, args: tuple[Any, ...], made: Sequence[Tensor] | None
) -> Sequence[Tensor] | None:
    """The results, with gradients added to the leaves; ``None`` where a check refuses the values,
    or nothing was made, and nothing is done."""
    if made is None or (make.checked and not made[0]):
        return None
    first = 1 + make.results
    for number, k in enumerate(make.leaves):
        leaf, gradient = args[k], made[first + number]
        if leaf.grad is not None:
            leaf.grad.add_(gradient)
        else:
            # the engine's are no views, of which their bases would be kept
            whole = gradient.detach() if gradient._is_view() else gradient
            leaf.grad = whole.clone() if number in make.copied else whole
    return made[1:first]


def _taken(make: Make, args: tuple[Any, ...], made: Sequence[Tensor]) -> Sequence[Tensor] | None:
    """The same for memory that the next replay writes: nobody keeps any of it."""
    if make.checked and not made[0]:
        return None
    first = 1 + make.results
    sums: tuple[list[Tensor], list[Tensor]] = ([], [])
    news: tuple[list[Tensor], list[Tensor]] = ([], [])
    again: list[tuple[Tensor, Tensor]] = []
    seen: set[int] = set()
    for k, gradient in zip(make.leaves, made[first:], strict=True):
        leaf = args[k]
        if id(leaf) in seen:  # handed over twice: one kernel must not write a tensor twice
            again.append((leaf, gradient))
            continue
        seen.add(id(leaf))
        into = news if leaf.grad is None else sums
        if leaf.grad is None:
            leaf.grad = torch.empty_like(gradient)
        into[0].append(leaf.grad)
        into[1].append(gradient)
    # a kernel for many tensors each
    if sums[0]:
        torch._foreach_add_(*sums)
    if news[0]:
        torch._foreach_copy_(*news)
    for leaf, gradient in again:
        leaf.grad.add_(gradient)  # type: ignore[union-attr]  # it has one by now
    return [value.clone() for value in made[1:first]]


def _names(forward: Forward, args: tuple[Any, ...], wanted: tuple[int, ...]) -> tuple[str, ...]:
    """What the nodes of the graph are called that made the results behind the loss; empty where
    they have none."""
    copies = [a.detach() if isinstance(a, Tensor) else a for a in args]
    for k in wanted:
        copies[k].requires_grad_()
    _, *others = forward(*copies)
    return tuple(type(r.grad_fn).__name__ if r.requires_grad else "" for r in others)


def compiled(
    forward: Forward,
    args: tuple[Any, ...],
    form: Form = INDUCTOR,
    without: tuple[int, ...] = (),
) -> Make:
    """Compile a loss for arguments of the make of ``args``, and leave out the gradients of those
    at the positions ``without``.

    It is used only if what it computes from them agrees with torch's own operations to the
    tolerance of ``numerics="close"``, or in every bit where the form promises that; then also only
    if it is faster.

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
    wanted = tuple(k for k in tensors if args[k].requires_grad and k not in without)
    if not wanted:
        raise Refused("nobody reads any gradient of it")
    loss, expected, found = reference(forward, args, wanted)
    leaves = tuple(k for k, g in zip(wanted, found, strict=True) if g is not None)
    expected += [g for g in found if g is not None]
    if loss.numel() != 1:
        raise Refused("the loss is not one number")
    if any(not args[k].is_contiguous() for k in leaves):
        raise Refused("a parameter is not contiguous")
    results = len(expected) - len(leaves)
    # of some numbers torch's own operations make a special case, `x ** 2.0`; of tensors they do not
    numbers = () if form.exact else tuple(k for k, a in enumerate(args) if type(a) is float)
    checks: list[bool] = []
    try:
        run, made = _run(forward, args, tensors, numbers, leaves, checks, form)
    except (TypeError, ValueError, RuntimeError):
        if not numbers:
            raise
        # torch takes no tensor in place of some numbers
        numbers = ()
        run, made = _run(forward, args, tensors, numbers, leaves, checks, form)
    valid, *made = made
    if not valid:
        raise Refused("its checks fail")
    laid_out = [*expected[:results], *(args[k] for k in leaves)]
    if not all(a.stride() == b.stride() for a, b in zip(laid_out, made, strict=True)):
        raise Refused("compiled, its results lie otherwise in memory")
    if form.exact and not all(map(same_bits, expected, made)):
        raise Refused("its bits differ from those of torch's own operations one by one")
    wrong = [k for k, a in enumerate(expected) if compare_outputs(a, made[k]) == "differ"]
    if wrong:
        allowed = rounding(forward, args, wanted, expected)
        for k in wrong:
            off = difference(expected[k], made[k])
            if not off <= LEEWAY * allowed[k]:
                raise Refused(f"compiled, it differs by {off:.2g}, more than rounding does")
    return Make(
        torch.get_num_threads(),
        tuple(float if k in numbers else known_of(a) for k, a in enumerate(args)),
        tensors,
        numbers,
        leaves,
        results,
        _names(forward, args, tuple(k for k in tensors if args[k].requires_grad)),
        run,
        replays_of(name_of(forward), run),
        _sharing(given, made, results),
        any(checks),
        _timed(forward, args, wanted, run, (*tensors, *numbers), form),
    )


def _run(
    forward: Forward,
    args: tuple[Any, ...],
    tensors: tuple[int, ...],
    numbers: tuple[int, ...],
    leaves: tuple[int, ...],
    checks: list[bool],
    form: Form,
) -> tuple[Callable[..., Sequence[Tensor]], list[Tensor]]:
    """The compiled function, and what it makes of the arguments; ``checks`` is told whether the
    user's code has any."""
    given = [args[k].detach() for k in tensors] + [_number(args[k]) for k in numbers]
    joint = _joint(forward, args, (*tensors, *numbers), leaves, checks)
    if form.tiled is not None:
        whole = {
            k
            for k, position in enumerate((*tensors, *numbers))
            if position in leaves or isinstance(args[position], torch.nn.Parameter)
        }
        run = form.tiled(joint, given, whole)
    else:
        run = (form.build or _built)(joint, given)
    with torch.no_grad():
        return run, list(run(*given))


def _timed(
    forward: Forward,
    args: tuple[Any, ...],
    wanted: tuple[int, ...],
    run: Callable[..., Sequence[Tensor]],
    positions: tuple[int, ...],
    form: Form,
) -> str:
    """What the loss and its gradients take by themselves, by torch's own operations and compiled.

    Whether to keep what rounds otherwise is for whole iterations to say; what does not is kept
    where it is faster.
    """
    given = [a.detach() if isinstance(a := args[k], Tensor) else _number(a) for k in positions]
    with torch.no_grad():

        def own() -> None:
            with torch.enable_grad():
                reference(forward, args, wanted)

        before, after = faster(own, lambda: run(*given), finished)
    if form.exact and after > PAYS * before:
        raise Refused(f"too little is won: {instead(before, after)}")
    return instead(before, after)


def _number(value: float) -> Tensor:
    """A number as a tensor that takes part in arithmetic the way a number does."""
    return torch.scalar_tensor(value, dtype=torch.float64, device="cpu")


def _joint(
    forward: Forward,
    args: tuple[Any, ...],
    tensors: tuple[int, ...],
    leaves: tuple[int, ...],
    checks: list[bool],
) -> Callable[..., list[Tensor]]:
    """Forward and backward as one function of the tensors among the arguments."""

    def joint(*given: Tensor) -> list[Tensor]:
        values = list(args)
        for k, value in zip(tensors, given, strict=True):
            values[k] = value.detach().requires_grad_() if k in leaves else value.detach()
        conditions: list[Tensor] = []
        with torch.enable_grad():
            loss, *others = unchecked(forward, conditions)(*values)
            gradients = torch.autograd.grad(loss, [values[k] for k in leaves])
        checks.append(bool(conditions))
        valid = holding(conditions, loss.device)
        return [valid, *(o.detach() for o in others), *(g.contiguous() for g in gradients)]

    return joint


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


def _plain(args: tuple[Any, ...], make: Make) -> bool:
    """Whether gradients arrive at leaves, at each once, without somebody who watches, and what was
    made in inference mode is not to be saved for them."""
    leaves = [args[k] for k in make.leaves]
    if any(p._backward_hooks or p._post_accumulate_grad_hooks or not p.is_leaf for p in leaves):
        return False
    if any(args[k].is_inference() for k in make.tensors):
        return False
    return len(set(map(id, leaves))) == len(leaves)


_known_losses: dict[Any, Gradients] = {}


def of(forward: Forward, form: Form = INDUCTOR) -> Gradients:
    """The losses of a function; one and the same for functions of the same code and globals, so
    that code emitted anew finds what was compiled."""
    key = form, identity(forward)
    return latest(_known_losses, key, lambda: Gradients(forward, form), MAX_FUNCTIONS)
