"""Losses as sums over tiles of rows on lanes: eager's values, and what is no such sum refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rose_compiler.runtime import gradients, lane_tiles
from rose_compiler.runtime.gradients import Gradients
from rose_compiler.runtime.inductor import traced
from rose_compiler.runtime.lane_tiles import form_of
from rose_compiler.runtime.row_places import Coupled
from rose_compiler.runtime.row_tiles import tiling


@pytest.fixture(autouse=True)
def _it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (gradients, lane_tiles):
        monkeypatch.setattr(module, "PAYS", float("inf"))


ROWS, WIDTH = 37, 5  # 37 rows are no two equal tiles


def arguments() -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(3)
    x, y = (torch.randn(ROWS, n, generator=generator) for n in (ROWS, WIDTH))
    advantages, values = (torch.randn(ROWS, generator=generator) for _ in range(2))
    # as many units as rows: only parameters are told apart by what they are
    sizes = ((ROWS, ROWS), (ROWS,), (WIDTH, ROWS), (WIDTH,), (WIDTH,), (1, ROWS))
    weights = [nn.Parameter(torch.randn(*size, generator=generator) / 6) for size in sizes]
    return x, y, advantages, values, *weights


def ppo(x: Any, y: Any, adv: Any, old: Any, w: Any, b: Any, v: Any, c: Any, s: Any, u: Any) -> Any:
    h = torch.tanh(F.linear(x, w, b))
    mean, std = F.linear(h, v, c), s.exp().expand(len(x), -1)
    logp = (-((y - mean) ** 2) / (2 * std**2) - std.log()).sum(1)
    adv = (adv - adv.mean()) / (adv.std() + 1e-8)
    ratio = torch.exp(logp - logp.detach() * 1.01)
    policy = -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
    value = F.linear(h, u).squeeze(-1)
    clipped = old + (value - old).clamp(-0.2, 0.2)
    error = torch.max((value - adv) ** 2, (clipped - adv) ** 2).mean()
    entropy = (0.5 + s).sum()
    loss = policy + 0.5 * error - 0.01 * entropy
    kl, outside = (ratio - 1 - ratio.log()).mean(), ((ratio - 1).abs() > 0.2).float().mean()
    return loss, loss, kl, outside, ratio, entropy


def squared(x: Any, y: Any, adv: Any, old: Any, w: Any, b: Any, v: Any, c: Any, *rest: Any) -> Any:
    made = F.linear(F.relu(F.linear(x, w, b)), v, c)
    return F.mse_loss(made, y) + F.smooth_l1_loss(made, y, reduction="sum"), made.max(1).values


def chosen(x: Any, y: Any, adv: Any, old: Any, w: Any, b: Any, v: Any, c: Any, *rest: Any) -> Any:
    logits = F.log_softmax(F.linear(torch.cat([x, y], 1)[:, :ROWS], v, c), -1)
    picked = logits.gather(1, y.argmax(1, keepdim=True)).squeeze(1)
    return -(picked * adv).sum() / ROWS + (logits.exp() * logits).sum(-1).mean(), picked


def several(x: Any, y: Any, adv: Any, old: Any, w: Any, b: Any, v: Any, c: Any, *rest: Any) -> Any:
    """Each row of the batch comes in several steps, as those of a diffusion policy do."""
    steps = x.unsqueeze(1).expand(-1, 3, -1).reshape(-1, ROWS)
    h = torch.tanh(F.linear(steps, w, b))
    error = (F.linear(h, v, c).view(-1, 3, WIDTH) - y.unsqueeze(1)).pow(2).mean(2)
    ratio = torch.exp(-error.view(-1)).view(ROWS, 3)
    return torch.max(ratio * adv[:, None], ratio.clamp(0.9, 1.1) * adv[:, None]).mean(), ratio


def layers(x: Any, y: Any, adv: Any, old: Any, w: Any, b: Any, v: Any, c: Any, *rest: Any) -> Any:
    """A convolution, a normalized layer, embedded tokens and attention among each row's own."""
    h = F.conv1d(x.unsqueeze(1), w[:4, :3].unsqueeze(1), b[:4], stride=6)
    tokens = (y > 0).long()
    h = F.layer_norm(h[:, :, :4] + F.embedding(tokens[:, :4], w[:2, :4]), (4,), b[:4], b[4:8])
    q = F.linear(h, v[:4, :4]).view(-1, 4, 2, 2).transpose(1, 2)
    made = F.scaled_dot_product_attention(q, q, h.view(-1, 4, 2, 2).transpose(1, 2))
    return made.transpose(1, 2).reshape(len(x), -1).mean(1).mul(adv).mean(), made


def eager(forward: Callable[..., Any], args: tuple[Any, ...]) -> list[Tensor]:
    loss, *others = forward(*args)
    loss.backward()
    return [o.detach() for o in others]


@pytest.mark.parametrize("tiles", [2, 3])
@pytest.mark.parametrize("forward", [ppo, squared, chosen, several, layers])
def test_tiles_make_eagers_gradients_and_results(forward: Any, tiles: int) -> None:
    notes: list[Any] = []
    ours, theirs = arguments(), arguments()
    loss = Gradients(forward, form_of(tiles))
    for _ in range(2):  # gradients add up
        made, expected = loss(ours, notes.append), eager(forward, theirs)
        made = made if isinstance(made, tuple) else (made,)
        for a, b in zip(made, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        for a, b in zip(ours[4:], theirs[4:], strict=True):
            if b.grad is None:
                assert a.grad is None
            else:
                torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6)
    assert [(n.kind, n.why) for n in notes] == [("tiles", "")]


def batch_norm(x: Any, w: Any) -> Any:
    h = F.linear(x, w)
    return (((h - h.mean(0)) / h.std(0)) ** 4).mean()


#: Losses of rows ``x`` and a weight that are no sums over rows, by how their rows meet.
COUPLED: dict[str, Callable[[Any, Any], Any]] = {
    "square of a mean": lambda x, w: F.linear(x, w).mean() ** 2,
    "exponential of a mean": lambda x, w: F.linear(x, w).mean().exp(),
    "product of sums": lambda x, w: F.linear(x, w).sum() * F.linear(x, w).tanh().sum(),
    "quotient of sums": lambda x, w: F.linear(x, w).sum() / F.linear(x, w).tanh().sum(),
    "clipped mean": lambda x, w: F.linear(x, w).mean().clamp(max=0.1),
    "deviation": lambda x, w: F.linear(x, w).std(),
    "normalised rows": batch_norm,
    "greatest row": lambda x, w: F.linear(x, w).amax(0).sum(),
    "softmax over rows": lambda x, w: (F.linear(x, w).softmax(0) * x[:, :3]).sum(),
    "running sum of rows": lambda x, w: F.linear(x, w).cumsum(0).pow(2).mean(),
    "rows among each other": lambda x, w: (F.linear(x, w) @ F.linear(x, w).T).tanh().mean(),
    "next row": lambda x, w: (F.linear(x, w)[1:] - F.linear(x, w)[:-1]).pow(2).mean(),
    "reversed rows": lambda x, w: (F.linear(x, w) * F.linear(x, w).flip(0)).mean(),
    "number of rows": lambda x, w: F.linear(x, w).view(-1, 2).tanh().prod(1).sum(),
    "draws": lambda x, w: F.dropout(F.linear(x, w)).sum(),
}


@pytest.mark.parametrize("why", COUPLED)
def test_what_takes_rows_together_is_left_whole(why: str) -> None:
    x, w = torch.randn(34, 6), torch.randn(3, 6, requires_grad=True)
    graph = traced(lambda x, w: [torch.autograd.grad(COUPLED[why](x, w), w)[0]], [x, w])
    with pytest.raises(Coupled):
        tiling(graph, {1}, 16)


def test_sizes_that_change_and_errors_are_left_to_the_whole() -> None:
    notes: list[Any] = []
    loss = Gradients(squared, form_of(2))
    ours, theirs = arguments(), arguments()
    for rows in (ROWS, 20):
        short = [
            tuple(a[:rows] if k < 4 else a for k, a in enumerate(args)) for args in (ours, theirs)
        ]
        loss(short[0], notes.append)
        eager(squared, short[1])
    for a, b in zip(ours[4:8], theirs[4:8], strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6)
    target = torch.arange(40) % 3
    weight = nn.Parameter(torch.randn(3, 4))
    loss = Gradients(lambda x, y, w: (F.cross_entropy(F.linear(x, w), y),), form_of(2))
    loss((torch.randn(40, 4), target, weight), notes.append)
    target[-1] = 7  # the error of a tile that is not the first
    with pytest.raises(IndexError, match="Target 7 is out of bounds"):
        loss((torch.randn(40, 4), target, weight), notes.append)
    target[-1] = 0
    loss((torch.randn(40, 4), target, weight), notes.append)
