"""How much an iteration does."""

from __future__ import annotations

import threading

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from rose_compiler.base import phases


class WorkMeter:
    """Whether an iteration did what a usual one does, so that one that stopped early is not taken
    for a fast one: optimizer steps are counted while tuning, those of this thread and of lanes.
    Other threads may train beside it."""

    #: Iterations in a row of another length after which that length is the usual one.
    PATIENCE = 3

    def __init__(self) -> None:
        self._handle: torch.utils.hooks.RemovableHandle | None = None
        self._steps = 0
        self._thread = 0
        self._usual: int | None = None
        self._others = 0

    def start(self) -> None:
        """Count from here."""
        self.drop()
        self._steps, self._thread = 0, threading.get_ident()
        self._handle = register_optimizer_step_post_hook(self._count)

    def _count(self, *_: object) -> None:
        self._steps += threading.get_ident() == self._thread or phases.in_lane()

    def drop(self) -> None:
        """Count no longer: what has begun did not get to its end, and says nothing."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def stop(self) -> bool:
        """Whether the iteration since :meth:`start` was a usual one."""
        if self._handle is None:
            return True
        self.drop()
        if self._usual is None or self._steps == self._usual:
            self._usual, self._others = self._steps, 0
            return True
        self._others += 1
        if self._others >= self.PATIENCE:
            self._usual, self._others = self._steps, 0
        return False
