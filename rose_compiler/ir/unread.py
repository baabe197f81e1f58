"""``backward`` without gradients that nobody reads."""

from __future__ import annotations

from typing import Any

import torch


def backward_without(loss: torch.Tensor, *dropped: Any) -> None:
    """Go backward from a loss, and leave the parameters of optimizers alone whose gradients are
    dropped unread.

    ``dropped`` holds four values for each optimizer: itself, the trip of the loop in whose next
    trip its gradients are dropped, the loop's ``stop`` and its ``step``; in the last trip
    everything is computed. So it is where a hook wants to see a gradient.
    """
    unread: dict[int, torch.Tensor] = {}
    for k in range(0, len(dropped), 4):
        optimizer, trip, stop, step = dropped[k : k + 4]
        following = trip + step
        if following >= stop if step > 0 else following <= stop:
            continue
        for group in optimizer.param_groups:
            unread.update((id(p), p) for p in group["params"])
    leaves = leaves_of(loss) if unread and not _watched(unread) else {}
    if unread.keys().isdisjoint(leaves):
        loss.backward()
        return
    wanted = [leaf for key, leaf in leaves.items() if key not in unread]
    if wanted:
        loss.backward(inputs=wanted)


def leaves_of(loss: torch.Tensor) -> dict[int, torch.Tensor]:
    """The tensors to whose gradients ``backward`` adds, by their ids."""
    found: dict[int, torch.Tensor] = {}
    stack = [loss.grad_fn]
    seen = set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)  # what AccumulateGrad has
        if leaf is not None:
            found[id(leaf)] = leaf
        stack += [following for following, _ in node.next_functions]
    return found


def _watched(tensors: dict[int, torch.Tensor]) -> bool:
    """Whether somebody may be called when gradients are there."""
    if torch.is_anomaly_enabled() or (
        torch.distributed.is_available() and torch.distributed.is_initialized()
    ):
        return True
    return any(t._backward_hooks or t._post_accumulate_grad_hooks for t in tensors.values())
