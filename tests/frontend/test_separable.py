"""Separability proofs: what is proven holds on real rows, what couples rows is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, Normal

from rose_compiler.base.remarks import Blocker
from rose_compiler.frontend.draws import Hoisted, hoist_draws
from rose_compiler.frontend.trace import Traced, trace
from rose_compiler.ir.facts import Context
from rose_compiler.ir.separable import any_rows, row_axes, separable
from rose_compiler.runtime.probe import compare_outputs

NO_GRAD = (Context("no_grad"),)
ROWS = 6
TILES = (1, 3, 2)


def tensors_of(*modules: nn.Module) -> dict[str, Tensor]:
    return {
        f"m{i}.{name}": tensor
        for i, module in enumerate(modules)
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]
    }


def traced(fn: Any, args: tuple[Any, ...], modules: tuple[nn.Module, ...] = ()) -> Traced:
    found = trace(fn, args, lifted=tensors_of(*modules), contexts=NO_GRAD)
    assert isinstance(found, Traced), found
    return found


def proven(fn: Any, *args: Tensor, modules: tuple[nn.Module, ...] = ()) -> dict[str, int]:
    """Prove, and run tiles of other sizes against the whole."""
    t = traced(fn, args, modules)
    tensors = tensors_of(*modules)
    inputs = {
        name: args[a] if isinstance(a, int) else tensors[a]
        for name, a in zip(t.inputs, t.arguments, strict=True)
    }
    hoisted = hoist_draws(t, list(inputs.values()))
    assert isinstance(hoisted, Hoisted), hoisted
    batched = {n: 0 for n, a in zip(t.inputs, t.arguments, strict=True) if isinstance(a, int)}
    batched |= {n.name: 0 for n in hoisted.noises}
    inputs |= {n.name: n.draw() for n in hoisted.noises}
    graph = any_rows(hoisted.gm, batched)
    assert not isinstance(graph, Blocker), graph
    axes = separable(graph, batched)
    assert not isinstance(axes, Blocker), axes
    assert row_axes(graph, batched) == {**batched, **axes}
    whole = graph.forward(*inputs.values())
    assert compare_outputs(hoisted.gm.forward(*inputs.values()), whole) == "bits"
    results = whole if isinstance(whole, tuple) else (whole,)
    low = 0
    for rows in TILES:
        tile = {n: v.narrow(0, low, rows) if n in batched else v for n, v in inputs.items()}
        found = graph.forward(*tile.values())
        found = found if isinstance(found, tuple) else (found,)
        for k, (part, all_rows) in enumerate(zip(found, results, strict=True)):
            axis = axes.get(f"return.{k}")
            expected = all_rows if axis is None else all_rows.narrow(axis, low, rows)
            assert compare_outputs(expected, part, 1e-4, 1e-5) != "differ"
        low += rows
    return axes


def refused(fn: Any, *args: Tensor, code: str = "", modules: tuple[nn.Module, ...] = ()) -> Blocker:
    t = traced(fn, args, modules)
    batched = {n: 0 for n, a in zip(t.inputs, t.arguments, strict=True) if isinstance(a, int)}
    graph = any_rows(t.gm, batched)
    found = separable(t.gm, batched) if not isinstance(graph, Blocker) else graph
    assert isinstance(found, Blocker), t.gm.code
    assert not code or found.code == code, found
    return found


class TestGraphs:
    def test_gaussian_policy(self) -> None:
        actor, critic = nn.Linear(5, 3), nn.Linear(5, 1)
        spread = nn.ParameterList([nn.Parameter(torch.zeros(1, 3))])

        def act(obs: Tensor) -> tuple[Tensor, ...]:
            mean = torch.tanh(actor(obs))
            dist = Normal(mean, spread[0].expand_as(mean).exp())
            action = dist.sample()
            return action, dist.log_prob(action).sum(1), critic(obs).flatten(), dist.entropy()

        axes = proven(act, torch.randn(ROWS, 5), modules=(actor, critic, spread))
        assert axes == {f"return.{k}": 0 for k in range(4)}

    def test_categorical_policy(self) -> None:
        net = nn.Linear(5, 4)

        def act(obs: Tensor) -> tuple[Tensor, ...]:
            dist = Categorical(logits=net(obs))
            action = dist.sample()
            return action, dist.log_prob(action), dist.entropy(), dist.probs.argmax(-1)

        assert len(proven(act, torch.randn(ROWS, 5), modules=(net,))) == 4

    def test_squashed_policy(self) -> None:
        net = nn.Linear(5, 6)

        def act(obs: Tensor) -> tuple[Tensor, ...]:
            mean, log_std = net(obs).chunk(2, dim=-1)
            log_std = -5 + 0.5 * 7 * (torch.tanh(log_std) + 1)
            normal = Normal(mean, log_std.exp())
            x = normal.rsample()
            y = torch.tanh(x)
            log_prob = normal.log_prob(x) - torch.log(1 - y.pow(2) + 1e-6)
            return y, log_prob.sum(1, keepdim=True)

        assert len(proven(act, torch.randn(ROWS, 5), modules=(net,))) == 2

    def test_independent(self) -> None:
        def score(mean: Tensor, action: Tensor) -> Tensor:
            return Independent(Normal(mean, torch.ones_like(mean)), 1).log_prob(action)

        proven(score, torch.randn(ROWS, 3), torch.randn(ROWS, 3))

    def test_convolutions(self) -> None:
        net = nn.Sequential(
            *(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.GroupNorm(2, 8)),
            *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.LayerNorm(32), nn.Linear(32, 4)),
        )
        proven(net, torch.randn(ROWS, 3, 10, 10), modules=(net,))

    def test_batch_norm_in_eval_mode(self) -> None:
        net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).eval()
        proven(net, torch.randn(ROWS, 3), modules=(net,))

    @pytest.mark.parametrize("training", [True, False])
    def test_transformer(self, training: bool) -> None:
        layer = nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True).train(training)
        proven(layer, torch.randn(ROWS, 5, 16), modules=(layer,))

    def test_attention_by_hand(self) -> None:
        qkv = nn.Linear(16, 48)

        def attend(x: Tensor) -> Tensor:
            rows, tokens, width = x.shape
            q, k, v = qkv(x).reshape(rows, tokens, 3, 4, 4).permute(2, 0, 3, 1, 4).unbind(0)
            out = F.scaled_dot_product_attention(q, k, v)
            weights = (q @ k.transpose(-2, -1) / 2).softmax(-1)
            return (out + weights @ v).transpose(1, 2).reshape(rows, tokens, width)

        proven(attend, torch.randn(ROWS, 5, 16), modules=(qkv,))

    def test_recurrent_cell(self) -> None:
        cell = nn.GRUCell(3, 4)
        proven(cell, torch.randn(ROWS, 3), torch.randn(ROWS, 4), modules=(cell,))

    def test_embedding(self) -> None:
        table = nn.Embedding(7, 4)
        proven(lambda i: table(i).mean(1), torch.randint(7, (ROWS, 3)), modules=(table,))

    @pytest.mark.parametrize(
        "fn",
        [
            lambda x: x.view(ROWS, -1).sum(1),
            lambda x: x.reshape(x.shape[0], 6) * 2,
            lambda x: x.flatten(1),
            lambda x: x[:, 0] + x[..., 1, :],
            lambda x: x[:, None].expand(ROWS, 4, 3, 2),
            lambda x: torch.cat([x, x * 2], dim=-1).unsqueeze(0),
            lambda x: torch.stack([x, x], 1).mean((1, 2)),
            lambda x: x.permute(2, 0, 1).softmax(0),
            lambda x: x / x.norm(dim=-1, keepdim=True) + F.normalize(x, dim=-1),
            lambda x: torch.where(x > 0, x, torch.zeros_like(x)).cumsum(1),
            lambda x: x.transpose(0, 2).max(0).values,
            lambda x: torch.einsum("bij,bik->bjk", x, x),
            lambda x: x.repeat(1, 2, 1).topk(2, dim=1).indices,
            lambda x: x * torch.tensor([1.0, 2.0]) + torch.ones(3, 1),
            lambda x: (x.std(1), x.var(-1, keepdim=True), x.any(1), (x > 0).all(-1)),
            lambda x: x.movedim(1, 0)[1:],
            lambda x: F.one_hot((x[:, 0, 0] > 0).long(), 2),
            lambda x: x.gather(1, (x > 0).long()),
            lambda x: F.pad(x, (1, 1)).sort(-1).values,
            lambda x: torch.cat([x, torch.ones(3, 1).expand(ROWS, 3, 1)], 2),
            lambda x: torch.cat([torch.full((ROWS, 3, 1), 0.5), x], -1),
            lambda x: torch.cat([torch.zeros(ROWS, 1, 2), x, torch.ones((ROWS, 1, 2))], 1),
            lambda x: torch.cat([x, torch.ones(1).broadcast_to((ROWS, 3, 1))], 2),
        ],
    )
    def test_calls(self, fn: Callable[[Tensor], Any]) -> None:
        assert proven(fn, torch.randn(ROWS, 3, 2))

    def test_fixed_sizes_are_found_and_mended(self) -> None:
        t = traced(lambda x: x.view(3, ROWS, -1), (torch.randn(3, ROWS, 2, 2),))
        found = separable(t.gm, {"x": 1})
        assert isinstance(found, Blocker)
        assert found.code == "not-proven-separable"
        assert "-1" in (found.allow or "")
        graph = any_rows(t.gm, {"x": 1})
        assert not isinstance(graph, Blocker)
        assert separable(graph, {"x": 1}) == {"return.0": 1}
        assert graph.forward(torch.ones(3, 11, 2, 2)).shape == (3, 11, 4)

    def test_a_first_size_is_not_fixed_unless_the_code_leaves_another_one_open(self) -> None:
        t = traced(lambda x: x.view(ROWS, 6).reshape(ROWS, 2, 3), (torch.randn(ROWS, 3, 2),))
        assert separable(t.gm, {"x": 0}) == {"return.0": 0}
        assert t.gm.forward(torch.ones(11, 3, 2)).shape == (11, 2, 3)
        t = traced(lambda x: x.view(ROWS, -1).reshape(ROWS, 2, 3), (torch.randn(ROWS, 3, 2),))
        graph = any_rows(t.gm, {"x": 0})
        assert not isinstance(graph, Blocker)
        assert separable(graph, {"x": 0}) == {"return.0": 0}
        assert graph.forward(torch.ones(11, 3, 2)).shape == (11, 2, 3)

    def test_what_does_not_depend_on_the_batch(self) -> None:
        table = nn.Linear(3, 3)
        axes = proven(lambda x: (x + 1, table.weight * 2), torch.randn(ROWS, 3), modules=(table,))
        assert axes == {"return.0": 0}

    @pytest.mark.parametrize(
        "fn",
        [
            lambda x: x - x.mean(0),
            lambda x: (x - x.mean()) / x.std(),
            lambda x: x.softmax(0),
            lambda x: x @ x.transpose(0, 1),
            lambda x: x.flip(0),
            lambda x: x.roll(1, 0),
            lambda x: x[0] + x,
            lambda x: x[1:],
            lambda x: x.cumsum(0),
            lambda x: x.reshape(-1),
            lambda x: x.t().reshape(ROWS, 3),
            lambda x: torch.cat([x, x]),
            lambda x: x.sort(dim=0).values,
            lambda x: x.max(),
            lambda x: F.batch_norm(x, None, None, training=True),
            lambda x: torch.einsum("ij,kj->ik", x, x),
            lambda x: x.repeat(2, 1),
            lambda x: x / x.norm(),
            lambda x: (x > 0).any(),
            lambda x: (x > 0).all(),
        ],
    )
    def test_coupling(self, fn: Callable[[Tensor], Any]) -> None:
        refused(fn, torch.randn(ROWS, 3), code="batch-coupling")

    @pytest.mark.parametrize(
        "fn",
        [
            lambda x: x + torch.arange(float(ROWS)).unsqueeze(1),  # values of the whole batch
            lambda x: x.unsqueeze(1).squeeze(),  # one row would lose its axis
            lambda x: torch.linalg.svdvals(x.unsqueeze(-1)),  # no rule
            lambda x: F.one_hot(x.long().abs()),
            lambda x: torch.cat([x, torch.arange(float(ROWS)).unsqueeze(1)], 1),
            lambda x: torch.cat([x, (ones := torch.ones(ROWS, 1))], 1) * ones.sum(),
            lambda x: torch.cat([x, torch.arange(float(ROWS))[:, None].expand(ROWS, 2)], 1),
        ],
    )
    def test_unknown(self, fn: Callable[[Tensor], Any]) -> None:
        refused(fn, torch.randn(ROWS, 3))

    def test_draws(self) -> None:
        refused(lambda x: x + torch.randn_like(x), torch.randn(ROWS, 3), code="draw-order")

    def test_different_rows(self) -> None:
        t = traced(lambda x, y: x.sum() + y.sum(), (torch.ones(4), torch.ones(3)))
        assert isinstance(separable(t.gm, {"x": 0, "y": 0}), Blocker)
