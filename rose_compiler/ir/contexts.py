"""The thread-local modes that operations run under, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
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
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and not made.requires_grad and made._is_view():
            return made.data
        return made


#: Kinds of contexts and what enters each. "phase" only names a stretch of the user's code.
CONTEXTS: dict[str, Callable[..., AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "inference_mode": torch.inference_mode,
    "autocast": torch.autocast,
    "phase": _phase,
    UNVERSIONED: Unversioned,
}


def make(context: Context) -> AbstractContextManager[Any]:
    """The context manager of a context. Pairs among its arguments are keywords.

    Raises:
        KeyError: for a kind that :data:`CONTEXTS` does not have.
    """
    words: dict[str, Any] = dict(a for a in context.args if isinstance(a, tuple))
    args = [a for a in context.args if not isinstance(a, tuple)]
    return CONTEXTS[context.kind](*args, **words)


@contextmanager
def entered(contexts: tuple[Context, ...]) -> Iterator[None]:
    """Enter the contexts, outermost first."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(make(context))
        yield
