"""Fused optimizer steps: the same training to rounding, and nothing left behind."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

from rose_compiler.runtime.optimizers import Fused, why_not_fused
from rose_compiler.runtime.support import Runtime

MAKERS: dict[str, Callable[[Any], Optimizer]] = {
    "adam": lambda ps: Adam(ps, lr=1e-2),
    "adamw": lambda ps: AdamW(ps, lr=1e-2, weight_decay=0.1, amsgrad=True),
    "sgd": lambda ps: SGD(ps, lr=1e-2, momentum=0.9),
}


def train(net: torch.nn.Module, optimizer: Optimizer, steps: int) -> None:
    for k in range(steps):
        optimizer.zero_grad()
        net(torch.full((3, 4), 0.1 * k + 0.1)).pow(2).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("kind", MAKERS)
def test_training_is_the_same_to_rounding(kind: str) -> None:
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 4)
    other = copy.deepcopy(net)
    plain, fused = MAKERS[kind](net.parameters()), MAKERS[kind](other.parameters())
    train(net, plain, 2)
    train(other, fused, 2)  # state from unfused steps is taken over
    rt = Runtime()
    rt.fuse(fused)
    seen: list[Any] = []
    fused.register_step_pre_hook(lambda o, *_: seen.append(o.param_groups[0]["fused"]))
    train(net, plain, 5)
    train(other, fused, 5)
    rt.drain()
    assert seen == [True] * 5
    for a, b in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    train(net, plain, 1)
    train(other, fused, 1)
    assert seen[-1] is None
    assert fused.param_groups[0]["fused"] is None
    assert len(fused._optimizer_step_post_hooks) == 0


def test_a_checkpoint_between_steps_shows_nothing() -> None:
    net = torch.nn.Linear(4, 4)
    optimizer = Adam(net.parameters())
    before = copy.deepcopy(optimizer.state_dict()["param_groups"])
    fused = Fused(optimizer)
    train(net, optimizer, 2)
    assert optimizer.state_dict()["param_groups"] == before
    fused.restore()


def test_a_step_that_raises_leaves_nothing_behind() -> None:
    net = torch.nn.Linear(4, 4)
    optimizer = Adam(net.parameters())
    rt = Runtime()
    rt.fuse(optimizer)

    def closure() -> float:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        optimizer.step(closure)
    rt.drain()
    assert optimizer.param_groups[0]["fused"] is None
    assert not optimizer._optimizer_step_pre_hooks


def test_a_learning_rate_scheduler_is_no_obstacle() -> None:
    net = torch.nn.Linear(4, 4)
    optimizer = Adam(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    assert why_not_fused(optimizer) is None
    rt = Runtime()
    rt.fuse(optimizer)
    fused: list[Any] = []
    optimizer.register_step_pre_hook(lambda o, *_: fused.append(o.param_groups[0]["fused"]))
    train(net, optimizer, 1)
    scheduler.step()
    rt.drain()
    assert fused == [True]


def _replaced(ps: Any) -> Optimizer:
    made = Adam(ps)
    made.step = made.step  # type: ignore[method-assign]
    return made


REFUSED: dict[str, Callable[[Any], Optimizer]] = {
    "no fused kernel": torch.optim.RMSprop,
    "foreach=False": lambda ps: Adam(ps, foreach=False),
    "fused=True": lambda ps: Adam(ps, fused=True),
    "capturable": lambda ps: Adam(ps, differentiable=True),
    "a tensor": lambda ps: Adam(ps, lr=torch.tensor(0.1)),
    "replaced": _replaced,
}


@pytest.mark.parametrize("why", REFUSED)
def test_refused(why: str) -> None:
    optimizer = REFUSED[why](torch.nn.Linear(2, 2).parameters())
    reason = why_not_fused(optimizer)
    assert reason is not None
    assert why.replace("capturable", "differentiable") in reason
    rt = Runtime()
    rt.fuse(optimizer)
    assert not optimizer._optimizer_step_pre_hooks


def test_other_dtypes_are_refused() -> None:
    assert "bfloat16" in (why_not_fused(Adam(torch.nn.Linear(2, 2).bfloat16().parameters())) or "")
    torch.set_default_dtype(torch.float64)
    try:
        assert "float64" in (why_not_fused(Adam(torch.nn.Linear(2, 2).parameters())) or "")
    finally:
        torch.set_default_dtype(torch.float32)
