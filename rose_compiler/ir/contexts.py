"""The thread-local modes that operations run under, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from rose_compiler.ir.facts import Context

#: The kind of context that passes put around forwards whose saved tensors nobody overwrites.
UNVERSIONED = "unversioned"


def _phase(*name: Any) -> AbstractContextManager[Any]:
    return nullcontext()


class Unversioned(TorchFunctionMode):
    """Gives views of plain tensors versions of their own.

    A view has the version of all that it is a view of: writes elsewhere in it, which a pass has
    proven to be elsewhere, would have ``backward`` raise.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _unversioned(func(*args, **(kwargs or {})))


def _unversioned(made: Any) -> Any:
    """A view of a plain tensor, with a version of its own.

    One that carries a tangent, or belongs to a transform of ``torch.func``, stays as it is: what is
    known of it besides its numbers would be lost.
    """
    if not isinstance(made, torch.Tensor) or made.requires_grad or not made._is_view():
        return made
    if torch._C._functorch.is_functorch_wrapped_tensor(made) or _tangent(made):
        return made
    return made.data


def _tangent(made: torch.Tensor) -> bool:
    return forward_ad.unpack_dual(made).tangent is not None


#: Kinds of contexts and what enters each. "phase" only names a stretch of the user's code.
CONTEXTS: dict[str, Callable[..., AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "inference_mode": torch.inference_mode,
    "autocast": torch.autocast,
    "phase": _phase,
    UNVERSIONED: Unversioned,
}

#: Kinds of which two neighbours are as good as one, and which may stand around a loop instead of in
#: it: entering and leaving them sets a flag and puts it back. Any other kind does more. Leaving the
#: outermost ``autocast`` forgets the casts of weights that were kept since it was entered, and
#: weights may be others in the next.
ALIKE = frozenset(("no_grad", "enable_grad", "inference_mode", "phase", UNVERSIONED))


def make(context: Context) -> AbstractContextManager[Any]:
    """The context manager of a context. Pairs among its arguments are keywords.

    Raises:
        KeyError: for a kind that :data:`CONTEXTS` does not have.
    """
    return maker(context)()


def maker(context: Context) -> Callable[[], AbstractContextManager[Any]]:
    """What makes the context manager of a context whenever it is called; raises as :func:`make`."""
    words: dict[str, Any] = dict(a for a in context.args if isinstance(a, tuple))
    args = [a for a in context.args if not isinstance(a, tuple)]
    kind = CONTEXTS[context.kind]
    return partial(kind, *args, **words) if context.args else kind


def region_of(contexts: tuple[Context, ...]) -> int:
    """The number of the outermost ``autocast`` among these modes; 0 for none."""
    return next((c.region for c in contexts if c.region), 0)


class Held:
    """The region of ``autocast`` that a thread is in, while it enters modes for each operation
    anew: casts of weights are kept until the region is left, as by one ``with`` around it all."""

    def __init__(self) -> None:
        self.number = 0

    def at(self, contexts: tuple[Context, ...]) -> None:
        """Go on under these modes: leave the region unless they are in it, and be in theirs."""
        number = region_of(contexts)
        if number == self.number:
            return
        self.leave()
        if number:
            torch.autocast_increment_nesting()
            self.number = number

    def leave(self) -> None:
        """Leave the region, if there is one; the outermost one's casts are forgotten."""
        if self.number:
            self.number = 0
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()


@contextmanager
def entered(contexts: tuple[Context, ...]) -> Iterator[None]:
    """Enter the contexts, outermost first."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(make(context))
        yield
