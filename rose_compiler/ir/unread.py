"""``backward`` without gradients that nobody reads."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

#: What lies between an operation and a parameter of it: a transposed weight, one cast by autocast.
#: Of these and of what adds to a gradient nobody is told that it did not run.
_PLAIN = frozenset({"AccumulateGrad", "TBackward0", "ToCopyBackward0"})


def backward_without(loss: Tensor, *dropped: Any) -> None:
    """Go backward from a loss, and leave the parameters of optimizers alone whose gradients are
    dropped unread: see :class:`Dropped`."""
    Dropped(*dropped).backward(loss)


class Dropped:
    """Parameters whose gradients nobody reads before they are dropped, in this trip.

    ``dropped`` holds four values for each optimizer: itself, the trip of the loop in whose next
    trip its gradients are dropped, the loop's ``stop`` and its ``step``; in the last trip
    everything is computed. So it is where somebody could see that a part did not run: a hook,
    a function of the user's own in the graph, who holds a gradient that would be added to.
    """

    def __init__(self, *dropped: Any) -> None:
        unread: dict[int, Tensor] = {}
        for k in range(0, len(dropped), 4):
            optimizer, trip, stop, step = dropped[k : k + 4]
            following = trip + step
            if following >= stop if step > 0 else following <= stop:
                continue
            for group in optimizer.param_groups:
                unread.update((id(p), p) for p in group["params"])
        #: The parameters, by id.
        self.unread = {} if unread and _watched(unread) else unread

    def backward(self, loss: Tensor) -> None:
        """Go backward from a loss to all other leaves."""
        wanted = wanted_of(loss, self.unread) if self.unread else []
        if wanted:
            loss.backward(inputs=wanted)
        else:
            loss.backward()

    def positions(self, args: Sequence[Any]) -> tuple[int, ...]:
        """Which of the arguments of a loss are such parameters; none if somebody holds the gradient
        of one."""
        unread = self.unread
        found = tuple(k for k, a in enumerate(args) if id(a) in unread) if unread else ()
        return () if any(_held(args[k]) for k in found) else found


def wanted_of(loss: Tensor, unread: dict[int, Tensor]) -> list[Tensor]:
    """The leaves whose gradients a ``backward`` has to compute if nobody reads those of
    ``unread``, by id; none where it is to compute all, since there is nothing to leave out, or
    what would not run might be seen."""
    if type(loss) is not Tensor or loss.grad_fn is None:
        return []
    before: dict[Any, list[Any]] = {loss.grad_fn: []}  # what leads to a node
    stack: list[Any] = [loss.grad_fn]
    wanted: dict[Any, Tensor] = {}
    left: list[Tensor] = []
    while stack:
        node = stack.pop()
        if isinstance(node, BackwardCFunction):
            return []  # it may do anything, and hide leaves of a graph of its own
        leaf = getattr(node, "variable", None)  # what AccumulateGrad has
        if leaf is not None and id(leaf) in unread:
            left.append(leaf)
        elif leaf is not None:
            wanted[node] = leaf
        for following, _ in node.next_functions:
            if following is None:
                continue
            if following not in before:
                before[following] = []
                stack.append(following)
            before[following].append(node)
    if not left or not wanted or any(map(_held, left)):
        return []
    runs = set(wanted)
    queue = list(wanted)
    while queue:
        for node in before[queue.pop()]:
            if node not in runs:
                runs.add(node)
                queue.append(node)
    if any(type(node).__name__ not in _PLAIN for node in before if node not in runs):
        return []
    return list(wanted.values())


def _watched(tensors: dict[int, Tensor]) -> bool:
    """Whether somebody may be called when gradients are there."""
    if torch.is_anomaly_enabled() or torch._C._len_torch_dispatch_stack():
        return True
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return True
    return any(t._backward_hooks or t._post_accumulate_grad_hooks for t in tensors.values())


def _held(leaf: Tensor) -> bool:
    """Whether somebody else may hold a leaf's gradient, which ``backward`` adds to in place."""
    return leaf.grad is not None and _counts(leaf) not in _alone()


def _counts(leaf: Tensor) -> tuple[int, int]:
    """How many references there are to a gradient, and to its memory."""
    gradient = leaf.grad
    assert gradient is not None
    memory = gradient.untyped_storage()
    return sys.getrefcount(gradient), torch._C._storage_Use_Count(memory._cdata)


@functools.cache
def _alone() -> frozenset[tuple[int, int]]:
    """The counts of a gradient that only its leaf holds."""
    leaf = torch.zeros(2, device="cpu", requires_grad=True)
    with torch.enable_grad():
        leaf.square().sum().backward()
    return frozenset(_counts(leaf) for _ in range(3))
