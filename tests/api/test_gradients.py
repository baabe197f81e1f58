"""Operations that record gradients stay where they are: their order is that in which gradients add
up, and a graph can be gone back through once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import rose_compiler
from rose_compiler.passes import hoist


def accumulating(encoder: Any, head: Any, optimizer: Any, tokens: Any, xs: Any) -> float:
    """A backward on every trip, through a prompt that is the same on every trip."""
    optimizer.zero_grad()
    total = 0.0
    for i in range(3):
        prefix = encoder(tokens)
        loss = (head(xs[i]) * prefix).sum()
        loss.backward()
        total += loss.item()
    optimizer.step()
    return total


def in_order(encoder: Any, head: Any, optimizer: Any, tokens: Any, xs: Any) -> float:
    """One backward; the encoder's gradients are sums of several calls."""
    optimizer.zero_grad()
    loss = torch.zeros(())
    for i in range(3):
        y = head(xs[i])
        prefix = encoder(tokens)
        loss = loss + (y * prefix * encoder(xs[i])).sum()
    loss.backward()
    optimizer.step()
    return loss.item()


def frozen(encoder: Any, head: Any, optimizer: Any, tokens: Any, xs: Any) -> float:
    """The same prompt without gradients."""
    optimizer.zero_grad()
    loss = torch.zeros(())
    for i in range(3):
        with torch.no_grad():
            prefix = encoder(tokens)
        loss = loss + (head(xs[i]) * prefix).sum()
    loss.backward()
    optimizer.step()
    return loss.item()


def _made() -> tuple[Any, ...]:
    torch.manual_seed(0)
    encoder, head = nn.Linear(17, 17), nn.Linear(17, 17)
    optimizer = torch.optim.SGD([*encoder.parameters(), *head.parameters()], lr=1e-3)
    return encoder, head, optimizer, torch.randn(33, 17), torch.randn(3, 33, 17)


@pytest.mark.parametrize("fn", [accumulating, in_order, frozen])
def test_gradients_are_those_of_eager(fn: Any) -> None:
    plain, arguments = _made(), _made()
    compiled = rose_compiler.compile(fn, numerics="bitwise", tune=False)
    for _ in range(4):
        assert fn(*plain) == compiled(*arguments)
        for mine, other in zip(plain[:2], arguments[:2], strict=True):
            for p, q in zip(mine.parameters(), other.parameters(), strict=True):
                assert torch.equal(p, q)
                assert (p.grad is None) == (q.grad is None)
                assert p.grad is None or torch.equal(p.grad, q.grad)
    remarks = compiled._schedule().history.remarks
    hoisted = any("encoder(tokens)" in r.why for r in remarks.applied())
    assert hoisted == (fn is frozen), compiled.explain()
    assert (fn is frozen) != any(r.code == "grad-graph" for r in remarks.missed())


def test_hoisting_what_records_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hoist, "records", lambda node: False)
    plain, arguments = _made(), _made()
    compiled = rose_compiler.compile(in_order, numerics="bitwise", tune=False)
    losses = [(in_order(*plain), compiled(*arguments)) for _ in range(4)]
    remarks = compiled._schedule().history.remarks
    assert any("encoder(tokens)" in r.why for r in remarks.applied())
    assert any(a != b for a, b in losses) or not torch.equal(plain[0].weight, arguments[0].weight)
