# ruff: noqa: NPY002 (the global generator is what is tested)
"""What tracing refuses: whatever could make the graph wrong on other values."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal

from rose_compiler.base.remarks import Blocker
from rose_compiler.frontend.trace import trace
from tests.frontend.tracing import NO_GRAD, lifted_of, refused


class TestRefusals:
    @pytest.mark.parametrize(
        "read",
        [
            lambda x: x * x.sum().item(),
            lambda x: x if x.sum() > 0 else -x,
            lambda x: x * float(x[0]),
            lambda x: x[: int(x[0].abs()) + 1].sum(),
            lambda x: x.sum() + len(str(x.tolist())),
            lambda x: x + float(x.numpy()[0]),
            lambda x: x + float(np.asarray(x)[0]),
            lambda x: x + len(f"{x}"),
            lambda x: x * torch.equal(x, x),
            lambda x: x + (x.data_ptr() % 2),
        ],
    )
    def test_host_reads(self, read: Any) -> None:
        refused("host-read", read, torch.rand(3) + 0.1)

    @pytest.mark.parametrize(
        "select",
        [
            lambda x: x[x > 0].sum(),
            lambda x: x.nonzero(),
            lambda x: torch.unique(x),
            lambda x: torch.masked_select(x, x > 0),
        ],
    )
    def test_sizes_that_hang_on_data(self, select: Any) -> None:
        refused("not-traceable", select, torch.randn(3))

    def test_written_argument(self) -> None:
        x = torch.ones(3)
        refused("not-pure", lambda x: x.add_(1), x)
        refused("not-pure", lambda x: x.view(-1)[0].zero_(), x)
        refused("not-pure", lambda x: x.__setitem__(0, 3.0), x)
        refused("not-pure", lambda x: x.data.mul_(2), x)
        assert torch.equal(x, torch.ones(3))

    def test_written_array(self) -> None:
        a = np.ones(3)
        refused("not-pure", lambda a: torch.from_numpy(a).add_(1), a)
        assert (a == 1).all()

    def test_written_component(self) -> None:
        net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        before = {name: b.clone() for name, b in net.named_buffers()}
        refused("not-pure", net, torch.randn(4, 3), lifted=lifted_of(net=net))
        assert all(torch.equal(before[name], b) for name, b in net.named_buffers())

    def test_unknown_tensor(self) -> None:
        hidden = torch.ones(3)
        refused("not-traceable", lambda x: x + hidden, torch.ones(3))

    def test_attribute_of_a_component(self) -> None:
        class Counting(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.calls = 0
                self.seen: list[int] = []

            def forward(self, x: Tensor) -> Tensor:
                self.calls += 1
                self.seen.append(self.calls)
                return x + 1

        net = Counting()
        blocker = refused("not-pure", net, torch.ones(2), roots=[net])
        assert "Counting." in blocker.why
        assert net.calls == 0
        assert net.seen == []

    def test_host_calls(self, capsys: pytest.CaptureFixture[str]) -> None:
        def shouting(x: Tensor) -> Tensor:
            print("hello")
            return x + 1

        refused("opaque-call", shouting, torch.ones(2))
        refused("opaque-call", lambda x: x + time.time(), torch.ones(2))

    def test_other_generators(self) -> None:
        assert isinstance(
            trace(lambda x: x + np.random.rand(), [torch.ones(2)], lifted={}), Blocker
        )
        assert isinstance(trace(lambda x: x * random.random(), [torch.ones(2)], lifted={}), Blocker)

    def test_seeding(self) -> None:
        def f(x: Tensor) -> Tensor:
            torch.manual_seed(1)
            return x + torch.randn(2)

        refused("draw-order", f, torch.ones(2))

    def test_number_that_is_compared(self) -> None:
        refused("host-read", lambda x, k: x if k == 0 else -x, torch.ones(2), 1)

    def test_number_that_is_fixed_unseen(self) -> None:
        import math

        blocker = refused("not-traceable", lambda x, k: x * math.sqrt(k), torch.ones(2), 2.0)
        assert "fixed in the graph" in blocker.why

    def test_number_that_counts_a_loop(self) -> None:
        def f(x: Tensor, n: int) -> Tensor:
            for _ in range(n):
                x = x * 2
            return x

        refused("not-traceable", f, torch.ones(2), 3)

    def test_array_made_inside(self) -> None:
        blocker = refused("not-traceable", lambda a: torch.from_numpy(a * 2) + 1, np.ones(3))
        assert "numpy" in blocker.why

    def test_array_element(self) -> None:
        assert isinstance(
            trace(lambda a, x: x * a[0], [np.ones(3), torch.ones(2)], lifted={}), Blocker
        )
        assert isinstance(
            trace(lambda a, x: x * float(a[0]), [np.ones(3), torch.ones(2)], lifted={}), Blocker
        )

    def test_gradient_modes(self) -> None:
        def f(x: Tensor) -> Tensor:
            with torch.inference_mode():
                return x + 1

        refused("mode-change", f, torch.ones(2))
        w = nn.Parameter(torch.ones(2))

        def g(x: Tensor) -> Tensor:
            with torch.enable_grad():
                return x * w

        refused("probe-values-differ", g, torch.ones(2), lifted={"w": w}, contexts=NO_GRAD)

    def test_autograd(self) -> None:
        w = nn.Parameter(torch.ones(2))
        refused("grad-graph", lambda x: (x * w).sum().backward(), torch.ones(2), lifted={"w": w})
        assert w.grad is None

    def test_swallowed_stop(self) -> None:
        def f(x: Tensor) -> Tensor:
            try:
                return x * x.sum().item()
            except BaseException:
                return x

        refused("host-read", f, torch.ones(2))

    def test_caught_error_of_a_call(self) -> None:
        def f(x: Tensor) -> Tensor:
            try:
                return torch.linalg.cholesky(x)
            except RuntimeError:
                return x

        blocker = refused("not-traceable", f, -torch.eye(2))
        assert "linalg_cholesky" in blocker.why

    def test_custom_function(self) -> None:
        class Double(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return x * 2

            @staticmethod
            def backward(ctx: Any, g: Tensor) -> Tensor:
                return g * 2

        found = trace(lambda x: Double.apply(x) + 1, [torch.ones(2)], lifted={})
        assert isinstance(found, Blocker) or "2" in found.gm.code

    def test_raising(self) -> None:
        def f(x: Tensor) -> Tensor:
            raise KeyError("no")

        refused("not-traceable", f, torch.ones(2))

    def test_returned_object(self) -> None:
        refused("not-traceable", lambda x: Normal(x, torch.ones(2)), torch.ones(2))
