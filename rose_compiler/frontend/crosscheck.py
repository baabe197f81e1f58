"""Compares a traced graph with the function it was traced from, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.fx as fx

from rose_compiler.base import gaps
from rose_compiler.base.remarks import Blocker
from rose_compiler.ir.contexts import entered
from rose_compiler.ir.facts import Context


def crosscheck(
    fn: Callable[..., Any],
    example_args: Sequence[Any],
    gm: fx.GraphModule,
    arguments: Sequence[int | str],
    lifted: Sequence[torch.Tensor],
    contexts: tuple[Context, ...],
) -> Blocker | None:
    """``None`` if graph and function agree on the examples, on fresh data and other numbers.

    ``arguments`` and ``lifted`` are as in :class:`~rose_compiler.frontend.trace.Traced`. Torch's
    generator is left advanced.
    """
    check = _Check(fn, gm, [a for a in arguments if isinstance(a, int)], lifted, contexts)
    seed = generator_states()
    if why := check.differs(list(example_args), seed):
        return Blocker("probe-values-differ", f"on the recorded inputs {why}")
    generator = torch.Generator().manual_seed(0)
    tried = 0
    for wide in (True, False):
        fresh = [vary(a, generator, wide) for a in example_args]
        why = check.differs(fresh, seed, or_raises=True)
        if why:
            return Blocker("probe-values-differ", f"on other inputs of the same shape {why}")
        tried += why is not None
    has_data = any(isinstance(a, torch.Tensor | np.ndarray) for a in example_args)
    if has_data and not tried:
        return Blocker("not-traceable", "it raises for every other input that was tried")
    for position, value in enumerate(example_args):
        is_number = type(value) in (int, float) or isinstance(value, np.generic)
        if is_number and (blocker := _other_number(check, list(example_args), position, seed)):
            return blocker
    return None


def fixes_sizes(
    fn: Callable[..., Any],
    example_args: Sequence[Any],
    gm: fx.GraphModule,
    arguments: Sequence[int | str],
    lifted: Sequence[torch.Tensor],
    contexts: tuple[Context, ...],
    axes: Sequence[int] = (0,),
) -> str:
    """How graph and function differ where a size of the arguments, along one of these axes, or the
    length of a list is one less; empty if they don't. What the function raises for is no size that
    it can be handed."""
    check = _Check(fn, gm, [a for a in arguments if isinstance(a, int)], lifted, contexts)
    seed = generator_states()
    shapes = [tuple(t.shape) for a in example_args for t in tensors_in(a)]
    shapes += [a.shape for value in example_args for a in arrays_in(value)]
    for axis in axes:
        for size in {s[axis] for s in shapes if len(s) > axis and s[axis] > 1}:
            fewer = [shortened(a, axis, size) for a in example_args]
            if why := check.differs(fewer, seed, or_raises=True):
                return why
    for position, value in enumerate(example_args):
        if type(value) is list and len(value) > 1:
            fewer = [*example_args[:position], value[:-1], *example_args[position + 1 :]]
            if why := check.differs(fewer, seed, or_raises=True):
                return why
    return ""


def _other_number(
    check: _Check, args: list[Any], position: int, seed: list[torch.Tensor]
) -> Blocker | None:
    value = args[position]
    others = (
        [value + 1, value - 1]
        if isinstance(value, int | np.integer)
        else [value * 1.0625 + 0.03125, value * 0.875]
    )
    for other in others:
        changed = [*args[:position], type(value)(other), *args[position + 1 :]]
        why = check.differs(changed, seed, or_raises=True)
        if why is None:
            continue
        if why:
            return Blocker(
                "not-traceable",
                f"a Python number it is given (argument {position}) is fixed in the graph: {why}",
                allow="hand it in as a tensor, or keep it constant",
            )
        return None
    return Blocker("not-traceable", f"argument {position} can't be varied: it raises for others")


class _Check:
    def __init__(
        self,
        fn: Callable[..., Any],
        gm: fx.GraphModule,
        positions: Sequence[int],
        lifted: Sequence[torch.Tensor],
        contexts: tuple[Context, ...],
    ) -> None:
        self.fn, self.gm, self.positions = fn, gm, positions
        self.lifted, self.contexts = lifted, contexts

    def run(self, function: bool, args: list[Any], seed: list[torch.Tensor]) -> Any:
        """The result, and the gradients of a weighted sum of it where it has any."""
        set_generator_states(seed)
        args = [fresh_leaves(a) for a in args]
        with entered(self.contexts):
            if function:
                result = self.fn(*args)
            else:
                result = self.gm.forward(*(args[i] for i in self.positions), *self.lifted)
        drawn = generator_states()
        return result, drawn, self._gradients(result, args)

    def _gradients(self, result: Any, args: list[Any]) -> tuple[Any, ...]:
        roots = [t for t in tensors_in(result) if t.requires_grad and t.grad_fn is not None]
        wanted = [t for a in args for t in tensors_in(a) if t.requires_grad]
        wanted += [t for t in self.lifted if t.requires_grad]
        if not roots or not wanted:
            return ()
        weights = [
            torch.linspace(0.5, 1.5, t.numel(), dtype=t.dtype, device="cpu").view(t.shape)
            for t in roots
        ]
        weights = [w.to(t.device) for w, t in zip(weights, roots, strict=True)]
        with torch.enable_grad():
            return torch.autograd.grad(roots, wanted, weights, allow_unused=True)

    def differs(
        self, args: list[Any], seed: list[torch.Tensor], *, or_raises: bool = False
    ) -> str | None:
        """How the graph differs from the function, empty if it doesn't; ``None`` if the function
        raises, which made-up values may well make it do (``or_raises``)."""
        try:
            expected, drawn, gradients = self.run(True, args, seed)
        except Exception:  # the user's own code, on values of ours: it may raise whatever it likes
            if or_raises:
                return None
            raise
        try:
            found, drawn_too, gradients_too = self.run(False, args, seed)
        except Exception as error:  # a graph that raises is as wrong as one that differs
            return f"the graph raises {type(error).__name__}: {error}"
        if not same_bits(expected, found):
            return "the graph's results differ"
        if [t.requires_grad for t in tensors_in(expected)] != [
            t.requires_grad for t in tensors_in(found)
        ]:
            return "the graph's results differ in requires_grad"
        if not same_bits(drawn, drawn_too):
            return "the graph draws other random numbers"
        return "" if same_bits(gradients, gradients_too) else "the graph's gradients differ"


def generator_states() -> list[torch.Tensor]:
    """The states of torch's default generators: the CPU's, then those of devices in use."""
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *devices]


def set_generator_states(states: list[torch.Tensor]) -> None:
    """Set what :func:`generator_states` gave."""
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state_all(states[1:])


def same_bits(a: Any, b: Any) -> bool:
    """Whether two results are of the same types and shapes and equal in every bit."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape or a.device != b.device:
            return False
        x, y = (t.detach().resolve_conj().contiguous().reshape(-1) for t in (a, b))
        return torch.equal(x.view(torch.uint8), y.view(torch.uint8))
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        same_kind = isinstance(a, list) == isinstance(b, list)
        return same_kind and len(a) == len(b) and all(map(same_bits, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_bits(a[k], b[k]) for k in a)
    return type(a) is type(b) and (bool(a == b) or (a != a and b != b))


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in nested containers, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for v in value.values() for t in tensors_in(v)]
    if isinstance(value, tuple | list):
        return [t for v in value for t in tensors_in(v)]
    return []


def arrays_in(value: Any) -> list[np.ndarray[Any, Any]]:
    """The arrays in nested containers, in order."""
    found: list[np.ndarray[Any, Any]] = []

    def note(array: np.ndarray[Any, Any]) -> Any:
        found.append(array)
        return array

    _mapped(value, lambda t: t, note)
    return found


def shortened(value: Any, axis: int, size: int) -> Any:
    """The same without the last of what has this size along an axis."""

    def tensor(t: torch.Tensor) -> torch.Tensor:
        if t.dim() <= axis or t.shape[axis] != size:
            return t
        kept = t.detach().narrow(axis, 0, size - 1).clone()
        return kept.requires_grad_(t.requires_grad)

    def array(a: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        if a.ndim <= axis or a.shape[axis] != size:
            return a
        return np.take(a, range(size - 1), axis)

    return _mapped(value, tensor, array)


def fresh_leaves(value: Any) -> Any:
    """The same values, with leaf tensors of their own where gradients are taken."""
    return _mapped(
        value,
        lambda t: (
            gaps.like(t.detach().clone(), t.detach()).requires_grad_() if t.requires_grad else t
        ),
        lambda a: a,
    )


def vary(value: Any, generator: torch.Generator, wide: bool) -> Any:
    """Other data of the same types, shapes and scale; ``wide`` leaves the range of the examples."""

    def tensor(t: torch.Tensor) -> torch.Tensor:
        if t.numel() == 0:
            return t
        order = torch.randperm(t.numel(), generator=generator, device="cpu").to(t.device)
        if t.dtype == torch.bool and wide:
            return _like(t, torch.rand(t.shape, generator=generator, device="cpu") < 0.5)
        if not t.is_floating_point():
            return _like(t, t.detach().reshape(-1)[order].reshape(t.shape))
        noise = torch.randn(t.shape, generator=generator, device="cpu").to(t.device, t.dtype)
        data = t.detach()
        if wide:
            # both signs, of examples that are all alike too
            spread = data.abs().mean() + (data.std() if t.numel() > 1 else 0.0)
            made = data.mean() + noise * (spread + 1e-3)
        else:
            # between two of the example's own values: inside whatever range is allowed
            mixed, share = data.reshape(-1)[order].reshape(t.shape), noise.sigmoid()
            made = data * share + mixed * (1 - share)
        return _like(t, made).requires_grad_(t.requires_grad)

    def array(a: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        if a.dtype == object or a.size == 0:
            return a
        flat = torch.from_numpy(np.ascontiguousarray(a).reshape(-1))
        made = tensor(flat).numpy().reshape(a.shape).astype(a.dtype)
        copied = a.copy(order="K") if 0 in a.strides else gaps.like(a.copy(order="K"), a)
        np.copyto(copied, made)
        return copied

    return _mapped(value, tensor, array)


def _like(example: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    made = torch.empty_like(example, requires_grad=False)
    if 0 not in example.stride():
        made = gaps.like(made, example.detach())
    return made.copy_(data)


def _mapped(value: Any, tensor: Callable[[Any], Any], array: Callable[[Any], Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return tensor(value)
    if isinstance(value, np.ndarray):
        return array(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(v, tensor, array) for v in value))
    if type(value) in (tuple, list):
        return type(value)(_mapped(v, tensor, array) for v in value)
    if type(value) is dict:
        return {k: _mapped(v, tensor, array) for k, v in value.items()}
    return value
