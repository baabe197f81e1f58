"""What is frozen pickles as it would have then, byte for byte."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import io
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rose_compiler.base.frozen import frozen


@dataclasses.dataclass
class Config:
    lr: float = 1e-3
    held: Any = None


class Net(nn.Module):
    """Tied parameters, buffers, a submodule under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.same = self.body
        self.log_std = nn.Parameter(torch.zeros(2))


def written(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def made() -> dict[str, Any]:
    torch.manual_seed(0)
    net = Net()
    opt = torch.optim.Adam(net.parameters())
    net.norm(net.body(torch.randn(5, 3))).sum().backward()
    opt.step()
    base = torch.arange(10.0)
    loop: list[Any] = [base]
    loop.append(loop)
    itself: list[Any] = []
    itself.append((itself, base))
    error = KeyError("a", [base])
    deep = None
    for _ in range(250):
        deep = Config(held=deep)
    return {
        "state": net.state_dict(),
        "both": {"net": net.state_dict(), "opt": opt.state_dict(), "step": 3},
        "module": net,
        "optimizer": opt,
        "views": [base, base[2:5], base.view(2, 5).t(), (base, base)],
        "array": {"a": np.arange(6).reshape(2, 3).T, "b": np.float32(3), "c": base.bfloat16()},
        "objects": [Config(held=base), argparse.Namespace(b=[base]), collections.Counter("aab")],
        "cycle": loop,
        "plain": [1, None, "x", {1, 2}, slice(1, 2), torch.float32, torch.device("cpu"), Net, max],
        "generators": [torch.get_rng_state(), np.random.default_rng(1)],
        "bytes": [bytearray(b"abc"), bytearray(), b"abc"],
        "error": [error, error.args, error.args[1]],
        "deep": deep,
        "in itself": itself[0],
        "methods": [loop.append, loop, Config(held=loop).__eq__, len, torch.tanh, dict.fromkeys],
    }


@pytest.mark.parametrize("name", made())
def test_pickles_to_the_same_bytes(name: str) -> None:
    value = made()[name]
    assert written(frozen(value)) == written(value)


def test_what_is_changed_afterwards_is_not_seen() -> None:
    whole = made()
    there = {"net": whole["module"], "state": whole["state"], "config": Config(held=[1])}
    before, kept = written(there), frozen(there)
    with torch.no_grad():
        there["net"].body.weight.add_(1)
        there["net"].norm.running_mean.add_(1)
    there["config"].held.append(2)
    there["config"].lr = 2.0
    there["state"].clear()
    assert written(there) != before
    assert written(kept) == before
    again = torch.load(io.BytesIO(written(kept)), weights_only=False)
    assert again["net"].same is again["net"].body


def test_what_can_not_be_pickled_raises_what_pickle_raises() -> None:
    with pytest.raises(TypeError, match=r"cannot pickle .*lock"):
        frozen({"lock": threading.Lock()})


class Box:
    """Makes what it holds."""

    def __init__(self, held: list[int]) -> None:
        self.held = held

    def get(self) -> tuple[int, ...]:
        return tuple(self.held)

    def __reduce__(self) -> Any:
        return Source(self.held).get, ()


class Source(Box):
    """Pickled as what it is."""

    __reduce__ = object.__reduce__


def test_what_makes_an_object_and_whose_method_one_is_are_frozen() -> None:
    held = [1]
    value = [Box(held), Source(held).get, held.append]
    before, kept = written(value), frozen(value)
    held.append(2)
    assert written(value) != before
    assert written(kept) == before
    again = torch.load(io.BytesIO(written(kept)), weights_only=False)
    assert (again[0], again[1](), again[2].__self__) == ((1,), (1,), [1])
