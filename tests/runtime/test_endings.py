"""What a run leaves when it has ended, or Ctrl-C came as it was about to."""

from __future__ import annotations

import sys
import threading
from functools import partial
from typing import Any

import pytest
import torch

import rose_compiler
from rose_compiler.api.specialize import Specialization
from rose_compiler.runtime.optimizers import Fused
from rose_compiler.runtime.support import Runtime


def test_the_last_run_to_end_puts_the_switch_interval_back() -> None:
    found = sys.getswitchinterval()
    runs = [Runtime(), Runtime()]
    for runtime in runs:
        runtime.lane("thread:0")
        assert sys.getswitchinterval() < found
    runs[0].drain()
    assert sys.getswitchinterval() < found
    runs[1].drain()
    assert sys.getswitchinterval() == found
    for runtime in runs:
        runtime.close()


def test_ctrl_c_as_a_run_ends_leaves_nothing_switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    found = sys.getswitchinterval()
    optimizer = torch.optim.Adam([torch.zeros(2, requires_grad=True)])
    runtime = Runtime()
    runtime.lane("thread:0")
    runtime.fuse(optimizer)
    restore = Fused.restore

    def interrupted(self: Fused) -> None:
        self.restore = partial(restore, self)  # type: ignore[method-assign]
        raise KeyboardInterrupt

    monkeypatch.setattr(Fused, "restore", interrupted)
    with pytest.raises(KeyboardInterrupt):
        runtime.drain()
    assert not optimizer._optimizer_step_pre_hooks
    assert sys.getswitchinterval() == found
    runtime.close()


def twice(x: int) -> int:
    return 2 * x


def test_ctrl_c_in_front_of_the_end_of_a_run_leaves_nothing_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may come as the function begins that lets all lanes come to rest."""
    found, before = sys.getswitchinterval(), {*threading.enumerate()}
    begun, optimizer = threading.Event(), torch.optim.Adam([torch.zeros(2, requires_grad=True)])

    def call(of: Any, arguments: Any, runtime: Runtime, eager: Any) -> Any:
        runtime.fuse(optimizer)
        tasks.append(runtime.lane("thread:0").submit(1, begun.wait, 0.2))
        raise KeyboardInterrupt

    tasks: list[Any] = []
    monkeypatch.setattr(Specialization, "call", call)
    fast = rose_compiler.compile(twice)
    with pytest.raises(KeyboardInterrupt):
        fast(1)
    assert tasks[0].done
    assert not optimizer._optimizer_step_pre_hooks
    assert sys.getswitchinterval() == found
    assert {*threading.enumerate()} <= before
    monkeypatch.undo()
    assert fast(1) == 2
    fast.close()
