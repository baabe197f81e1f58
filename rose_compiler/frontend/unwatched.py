"""Probing without telling anybody: hooks of the user's are not called for what he did not ask."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch


@contextmanager
def unwatched(leaves: Iterable[torch.Tensor]) -> Iterator[None]:
    """No hook of these tensors is called when gradients of them are taken, and none that packs
    what graphs save."""
    hooked = [(t, t._backward_hooks) for t in leaves if t._backward_hooks]
    try:
        for leaf, _ in hooked:
            leaf._backward_hooks = None
        # the innermost pair is the one that is called
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
            yield
        else:
            with torch.autograd.graph.saved_tensors_hooks(_itself, _itself):
                yield
    finally:
        for leaf, hooks in hooked:
            leaf._backward_hooks = hooks


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
