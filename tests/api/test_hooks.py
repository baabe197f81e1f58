"""Hooks of the user's are called as often as in eager, whatever the compiler tries out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook, saved_tensors_hooks

import rose_compiler
from rose_compiler.base.decision import Decision
from rose_compiler.frontend.record import saved_tensors
from rose_compiler.testing.losses import as_traced

LOG: list[Any] = []


def packed(tensor: Tensor) -> Tensor:
    LOG.append(("pack", tuple(tensor.shape)))
    return tensor * 1.5


def unpacked(tensor: Tensor) -> Tensor:
    LOG.append(("unpack", tuple(tensor.shape)))
    return tensor


class Learner:
    """A net with hooks for its gradients, and what it learns from."""

    def __init__(self, *hooked: str) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.obs = torch.randn(5, 3)
        if "tensor" in hooked:
            self.net[0].weight.register_hook(lambda g: LOG.append(("tensor", tuple(g.shape))))
        if "several" in hooked:
            register_multi_grad_hook(
                list(self.net.parameters()), lambda gs: LOG.append(("several", len(gs)))
            )


def iteration(s: Learner) -> None:
    for _ in range(2):
        loss = s.net(s.obs).pow(2).mean()
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()


def packing(s: Learner) -> None:
    for _ in range(2):
        with saved_tensors_hooks(packed, unpacked):
            loss = s.net(s.obs).pow(2).mean()
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()


@pytest.mark.parametrize(
    ("fn", "hooked", "around"),
    [
        (iteration, ("tensor",), (False, False, False)),
        (iteration, ("several",), (False, False, False)),
        (packing, (), (False, False, False)),
        (iteration, (), (True, True, False)),
        (iteration, (), (False, False, True)),
    ],
    ids=["tensor", "several", "packing", "packed-from-the-first-call", "packed-later"],
)
def test_hooks_are_called_as_often(
    fn: Any, hooked: tuple[str, ...], around: tuple[bool, ...], tmp_path: Path
) -> None:
    Decision(compile=True).save(tmp_path / "decision.json")
    left = []
    with as_traced():
        for compiled in (False, True):
            s = Learner(*hooked)
            run = fn
            if compiled:
                run = rose_compiler.compile(fn, tune=tmp_path / "decision.json")
            for inside in around:
                if inside:
                    with saved_tensors_hooks(packed, unpacked):
                        run(s)
                else:
                    run(s)
            left.append((LOG[:], [p.detach().clone() for p in s.net.parameters()]))
            LOG.clear()
            if compiled:
                run.close()
    assert left[0][0], "a hook is called in eager"
    assert left[0][0] == left[1][0]
    for a, b in zip(left[0][1], left[1][1], strict=True):
        torch.testing.assert_close(a, b)


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.also = kept
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * ctx.saved_tensors[0], None


def test_what_a_function_of_the_users_saves_is_found() -> None:
    x, kept = torch.randn(3, requires_grad=True), torch.randn(3)
    made = Own.apply(x, kept).exp()
    found = {t.data_ptr() for t in saved_tensors(made)}
    assert {x.data_ptr(), kept.data_ptr(), made.data_ptr()} <= found
    made.sum().backward()
    assert made.data_ptr() not in {t.data_ptr() for t in saved_tensors(made)}, "it is freed"
