"""Losses that are added up in short loops, lists and dicts: one graph with their backward, which
trains as eager does, bit for bit, where nothing is compiled."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rose_compiler
from rose_compiler.base.decision import Decision
from rose_compiler.runtime import inductor
from rose_compiler.testing.losses import as_traced


@pytest.fixture(autouse=True)
def _uncompiled() -> Iterator[None]:
    with as_traced():
        yield


def appended(net: Any, opt: Any, x: Any, y: Any, log: Any) -> None:
    for _ in range(2):
        losses = []
        h = torch.zeros(4, 3)
        for t in range(3):
            h = torch.tanh(net(x[t]) + h)
            losses.append(F.mse_loss(h, y[t]))
        loss = torch.stack(losses).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        log.append(loss.item())


def added(net: Any, opt: Any, x: Any, y: Any, log: Any) -> None:
    for _ in range(2):
        total = 0.0
        for t in range(3):
            total = total + F.mse_loss(net(x[t]), y[t]) / (t + 1)
        opt.zero_grad()
        total.backward()
        opt.step()


def listed(net: Any, opt: Any, x: Any, y: Any, log: Any) -> None:
    for _ in range(2):
        out = net(x)
        terms = [F.mse_loss(out, y), 0.5 * out.pow(2).mean()]
        terms.append(out.abs().mean())
        loss = sum(terms)
        opt.zero_grad()
        loss.backward()
        opt.step()


def named(net: Any, opt: Any, x: Any, y: Any, log: Any) -> None:
    for _ in range(2):
        out = net(x)
        losses = {"fit": F.mse_loss(out, y), "size": 0.5 * out.pow(2).mean()}
        loss = losses["fit"] + losses["size"]
        opt.zero_grad()
        loss.backward()
        opt.step()


def comprised(net: Any, opt: Any, x: Any, y: Any, log: Any) -> None:
    for _ in range(2):
        loss = torch.stack([F.mse_loss(net(x[t]), y[t]) for t in range(3)]).sum()
        opt.zero_grad()
        loss.backward()
        opt.step()


def kept(net: Any, opt: Any, x: Any, y: Any, log: Any) -> None:
    """The list lives on."""
    for _ in range(2):
        losses = []
        for t in range(3):
            losses.append(F.mse_loss(net(x[t]), y[t]))
        loss = torch.stack(losses).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        log.append([one.item() for one in losses])


def counted(net: Any, opt: Any, x: Any, y: Any, log: Any) -> None:
    """Nobody knows how many trips there are."""
    for n in (2, 3):
        total = torch.zeros(())
        for t in range(n):
            total = total + F.mse_loss(net(x[t]), y[t])
        opt.zero_grad()
        total.backward()
        opt.step()


def left(net: Any, opt: Any, x: Any, y: Any, log: Any) -> None:
    for _ in range(2):
        total = torch.zeros(())
        for t in range(3):
            total = total + F.mse_loss(net(x[t]), y[t])
            if total > 1e3:
                break
        opt.zero_grad()
        total.backward()
        opt.step()


def told(net: Any, opt: Any, x: Any, y: Any, log: Any) -> None:
    """A list beside the loss, of which others know."""
    for _ in range(2):
        out = net(x)
        loss = F.mse_loss(out, y)
        parts = [out.detach().abs().mean(), float(y.sum())]
        opt.zero_grad()
        loss.backward()
        opt.step()
        log.append(parts)


def trained(update: Any) -> tuple[list[Any], list[Any]]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    opt = torch.optim.Adam(net.parameters(), 0.1)
    log: list[Any] = []
    x, y = torch.randn(3, 4, 3), torch.randn(3, 4, 3)
    for _ in range(3):
        update(net, opt, x, y, log)
    return [p.detach() for p in net.parameters()], log


@pytest.mark.parametrize(
    ("update", "fused"),
    [
        (appended, True),
        (added, True),
        (listed, True),
        (named, True),
        (comprised, True),
        (told, True),
        (kept, False),
        (counted, False),
        (left, False),
    ],
)
def test_terms_of_a_loss(update: Any, fused: bool, tmp_path: Path) -> None:
    Decision(compile=True).save(tmp_path / "decision.json")
    compiled = rose_compiler.compile(update, tune=tmp_path / "decision.json")
    expected, found = trained(update), trained(compiled)
    assert all(map(torch.equal, expected[0], found[0]))
    assert str(expected[1]) == str(found[1])
    notes = [n for n in compiled.runtime.notes if isinstance(n, inductor.Note)]
    assert [n.why for n in notes if "and_gradients" in n.name] == [""] * fused
    assert ("written out" in compiled.explain()) == (update in (appended, added, kept))
