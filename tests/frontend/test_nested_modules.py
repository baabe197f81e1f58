"""Modules of the user's inside torch's containers; what the user's functions read outside."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rose_compiler

WORDS = {"push": 1, "pull": 2}


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.up(x))


class Counting(Residual):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.seen = torch.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return super().forward(x)


class Attention(nn.Module):
    """Attention of rows to each other."""

    def forward(self, x: Tensor) -> Tensor:
        q = x.unsqueeze(0)
        return F.scaled_dot_product_attention(q, q, q).squeeze(0)


class Dropping(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        q = x.unsqueeze(0)
        return F.scaled_dot_product_attention(q, q, q, dropout_p=0.5).squeeze(0)


class Chain(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        encoded: Tensor = self.blocks(x)
        return encoded


class Loop(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def encode_each_time(net: nn.Module, buf: Tensor, x: Tensor) -> None:
    for t in range(3):
        with torch.no_grad():
            y = net(x)
        buf[t] = y
        buf.mul_(0.5)


def hoisted(net: nn.Module) -> list[str]:
    """Lines of what leaves the loop; buffers as eager leaves them."""
    x = torch.linspace(-1, 1, 20).view(5, 4)
    bufs = [torch.zeros(3, 5, 4), torch.zeros(3, 5, 4)]
    compiled = rose_compiler.compile(encode_each_time, tune=False)
    torch.manual_seed(0)
    for _ in range(2):
        compiled(net, bufs[0], x)
    torch.manual_seed(0)
    for _ in range(2):
        encode_each_time(net, bufs[1], x)
    assert torch.equal(*bufs)
    lines: list[str] = compiled.explain(width=200).splitlines()
    compiled.close()
    return [line for line in lines if "y = net(x)" in line and "same on every trip" in line]


def test_blocks_of_the_users_in_a_sequential_are_looked_into() -> None:
    assert hoisted(Chain(Residual(4), nn.ReLU(), Residual(4)))


def test_blocks_of_the_users_in_a_module_list_are_looked_into() -> None:
    assert hoisted(Loop(Residual(4), Residual(4)))


def test_what_such_a_block_writes_is_seen() -> None:
    for kind in (Chain, Loop):
        net = kind(Residual(4), Counting(4))
        assert not hoisted(net)
        assert net.blocks[1].seen == 12  # two times two calls of three trips


def test_attention_draws_only_if_it_is_told_to_drop() -> None:
    assert hoisted(Chain(Attention(), Residual(4)))
    assert not hoisted(Chain(Dropping(), Residual(4)))


def word(seed: int) -> int:
    return seed % len(WORDS)


def prompt(seed: int) -> list[int]:
    return [word(seed), 1]


def encode(seeds: list[int], buf: Tensor) -> None:
    buf[:] = torch.tensor([prompt(s) for s in seeds])
    for t in range(2):
        buf[t] += 1


def test_a_function_may_read_a_dict_outside_of_it() -> None:
    compiled = rose_compiler.compile(encode, tune=False)
    buf = torch.zeros(2, 2)
    for _ in range(2):
        compiled([3, 4], buf)
    assert buf.tolist() == [[2.0, 2.0], [1.0, 2.0]]
    compiled.close()


class Middle:
    """Has a method of a name that tensors have too, so that the name tells nothing."""

    def mean(self, x: Tensor) -> Tensor:
        return x * 0.5


def larger(opt: torch.optim.Optimizer, w: Tensor, a: Tensor, middle: Middle) -> None:
    for _ in range(3):
        clipped = middle.mean(w).clamp(0.8, 1.2)
        loss = torch.max(-a * w, -a * clipped).mean()
        other = torch.where(a > 0, w, clipped).mean()
        opt.zero_grad()
        (loss + other).backward()
        opt.step()


def test_the_larger_of_two_tensors_is_a_tensor() -> None:
    compiled = rose_compiler.compile(larger, tune=False)
    a = torch.linspace(-1, 1, 5)
    weights = [torch.linspace(0.5, 1.5, 5).requires_grad_() for _ in range(2)]
    for fn, w in zip((larger, compiled), weights, strict=True):
        opt = torch.optim.SGD([w], lr=0.1)
        for _ in range(2):
            fn(opt, w, a, Middle())
    assert torch.equal(*weights)
    assert "reads and writes everything" not in compiled.explain(width=200)
    compiled.close()


class Outer(nn.Module):
    """As ``torch.compile`` wraps a module: ``training`` is the inner one's."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.forward = inner.__call__

    training = property(lambda self: self.inner.training, lambda self, value: None)


def test_a_module_whose_mode_is_that_of_another_is_taken() -> None:
    def iteration(net: nn.Module, x: Tensor) -> Tensor:
        for _ in range(2):
            x = net(x)
        return x

    net, fast = Outer(Residual(2)), rose_compiler.compile(iteration, tune=False)
    x = torch.ones(3, 2)
    for mode in (True, True, False, False):
        net.inner.train(mode)
        assert torch.equal(fast(net, x), iteration(net, x))
