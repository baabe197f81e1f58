"""Tracing: the graph equals the function bit for bit, or there is a blocker."""

# ruff: noqa: NPY002 (the global generator is what is tested)

from __future__ import annotations

import enum
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, Normal

from rose_compiler.ir.facts import Context
from tests.frontend.tracing import NO_GRAD, lifted_of, mlp, refused, run, traced


class TestGraphs:
    def test_policy_with_distribution(self) -> None:
        torch.manual_seed(0)
        actor, critic = mlp(), mlp(5, 1)
        log_std = nn.Parameter(torch.zeros(1, 3))
        lifted = {**lifted_of(actor=actor, critic=critic), "log_std": log_std}

        def act(obs: Tensor) -> tuple[Tensor, ...]:
            mean = actor(obs)
            dist = Normal(mean, log_std.expand_as(mean).exp())
            action = dist.sample()
            return action, dist.log_prob(action).sum(1), critic(obs).flatten()

        obs = torch.randn(8, 5)
        t = traced(act, obs, lifted=lifted, contexts=NO_GRAD, roots=[actor, critic])
        assert t.inputs[0] == "obs"
        assert set(t.lifted.values()) == set(lifted)
        assert len(t.draws) == 1
        assert len(t.checks) == 3
        assert t.outputs == 3
        assert [s.shape for s in t.output_specs] == [(8, 3), (8,), (8,)]
        assert t.pure
        # what eager would call, nothing finer: no decomposition into matrix products
        assert sum(n.target is F.linear for n in t.gm.graph.nodes) == 4
        state = torch.get_rng_state()
        other = torch.randn(8, 5)
        state = torch.get_rng_state()
        with torch.no_grad():
            expected = act(other)
            torch.set_rng_state(state)
            found = run(t, (other,), lifted)
        for a, b in zip(expected, found, strict=True):
            assert torch.equal(a, b)

    def test_constants_have_no_class_of_the_users(self) -> None:
        class Rate(float):
            def __float__(self) -> float:
                return 7.0

        class Axis(enum.IntEnum):
            ROWS = 0

        class Mode(str):
            __slots__ = ()

        rate, mode = Rate(0.5), Mode("floor")

        def scaled(x: Tensor) -> Tensor:
            return torch.div(x * rate, 3.0, rounding_mode=mode).sum(Axis.ROWS)

        t = traced(scaled, torch.ones(3, 2))
        held = [a for n in t.gm.graph.nodes for a in (*n.args, *n.kwargs.values())]
        constants = [a for a in held if not isinstance(a, torch.fx.Node)]
        assert [(type(c), c) for c in constants] == [
            (float, 0.5),
            (float, 3.0),
            (str, "floor"),
            (int, 0),
        ]
        x = torch.arange(6.0).reshape(3, 2)
        assert torch.equal(run(t, (x,), {}), scaled(x))

    def test_a_complex_constant_is_refused(self) -> None:
        refused("not-traceable", lambda x: x * 1j, torch.ones(3))

    def test_generators_are_left_alone(self) -> None:
        torch.manual_seed(3)
        before = torch.get_rng_state(), repr(np.random.get_state()), random.getstate()
        traced(lambda x: x + torch.randn_like(x), torch.ones(3))
        assert torch.equal(before[0], torch.get_rng_state())
        assert before[1] == repr(np.random.get_state())
        assert before[2] == random.getstate()

    def test_loss_with_gradients(self) -> None:
        net = mlp(5, 1)

        def loss(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
            out = net(x).view(-1)
            with torch.no_grad():
                error = (out - target).abs().mean()
                weight = 1 / (1 + (out - target).abs())
            return (weight * (out - target).pow(2)).mean(), error

        lifted = lifted_of(net=net)
        args = torch.randn(6, 5), torch.randn(6)
        t = traced(loss, *args, lifted=lifted)
        assert [s.requires_grad for s in t.output_specs] == [True, False]
        expected = torch.autograd.grad(loss(*args)[0], list(net.parameters()))
        found = torch.autograd.grad(run(t, args, lifted)[0], list(net.parameters()))
        for a, b in zip(expected, found, strict=True):
            assert torch.equal(a, b)

    def test_categorical(self) -> None:
        net = mlp(4, 6)

        def act(obs: Tensor) -> tuple[Tensor, ...]:
            dist = Categorical(logits=net(obs))
            action = dist.sample()
            return action, dist.log_prob(action), dist.entropy()

        t = traced(act, torch.randn(7, 4), lifted=lifted_of(net=net), contexts=NO_GRAD)
        assert len(t.draws) == 1

    def test_independent(self) -> None:
        def score(mean: Tensor, action: Tensor) -> Tensor:
            return Independent(Normal(mean, torch.ones_like(mean)), 1).log_prob(action)

        assert traced(score, torch.randn(4, 3), torch.randn(4, 3)).outputs == 1

    def test_convolutions_and_python_functionals(self) -> None:
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())

        def f(x: Tensor) -> Tensor:
            return F.softmax(F.dropout(net(x), 0.5, training=False), dim=-1)

        t = traced(f, torch.randn(2, 3, 8, 8), lifted=lifted_of(net=net))
        assert not t.draws
        assert not any(
            getattr(n.target, "__module__", "") == "torch.nn.functional" and n.target is F.softmax
            for n in t.gm.graph.nodes
        )

    @pytest.mark.parametrize("training", [True, False])
    def test_attention_takes_the_path_that_eager_takes(self, training: bool) -> None:
        layer = nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True).train(training)
        t = traced(layer, torch.randn(3, 5, 16), lifted=lifted_of(l=layer), contexts=NO_GRAD)
        assert t.pure

    def test_dropout_draws(self) -> None:
        net = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
        t = traced(net, torch.randn(4, 3), lifted=lifted_of(net=net))
        assert len(t.draws) == 1

    def test_batch_norm_in_eval_mode(self) -> None:
        net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).eval()
        t = traced(net, torch.randn(4, 3), lifted=lifted_of(net=net))
        assert "net.1.running_mean" in t.lifted.values()

    def test_recurrent_cell(self) -> None:
        cell = nn.GRUCell(3, 4)
        t = traced(cell, torch.randn(2, 3), torch.randn(2, 4), lifted=lifted_of(cell=cell))
        assert t.outputs == 1

    def test_numbers_stay_inputs(self) -> None:
        def f(x: Tensor, gamma: float, k: int) -> Tensor:
            return x[k] * (1 - gamma) + gamma * 2

        t = traced(f, torch.randn(4, 3), 0.5, 1)
        assert t.inputs == ("x", "gamma", "k")
        x = torch.randn(4, 3)
        assert torch.equal(run(t, (x, 0.25, 3), {}), f(x, 0.25, 3))

    def test_containers_and_arrays(self) -> None:
        def f(step: tuple[Any, ...], more: dict[str, Tensor]) -> Tensor:
            obs, reward = step
            return torch.as_tensor(obs, dtype=torch.float32) * more["scale"] + reward

        step = (np.arange(3.0), torch.ones(3))
        t = traced(f, step, {"scale": torch.tensor(2.0)})
        assert t.inputs == ("step", "more")
        assert torch.equal(
            run(t, (step, {"scale": torch.tensor(3.0)}), {}), torch.arange(3) * 3 + 1
        )

    def test_in_place_on_temporaries(self) -> None:
        def f(x: Tensor) -> Tensor:
            y = x * 2
            y += 1
            return y.relu_()

        t = traced(f, torch.randn(3))
        assert t.pure
        assert "add_" not in t.gm.code

    def test_in_place_through_a_view_keeps_its_order(self) -> None:
        def f(x: Tensor) -> tuple[Tensor, Tensor]:
            y = x * 2
            z = y[0]
            y.add_(1)
            y[1] = 5
            return y, z * 1

        t = traced(f, torch.randn(3, 2))
        assert not t.pure
        x = torch.randn(3, 2)
        for a, b in zip(f(x), run(t, (x,), {}), strict=True):
            assert torch.equal(a, b)

    def test_aliases_of_inputs_are_reported(self) -> None:
        t = traced(lambda x, y: (x[0], x.float(), y + 1), torch.randn(2, 3), torch.randn(3))
        assert t.output_aliases == (("x",), ("x",), ())

    def test_views_that_change_nothing_are_dropped(self) -> None:
        t = traced(lambda x: x.expand(4, 3).reshape(4, 3).float() + 1, torch.randn(4, 3))
        calls = [n for n in t.gm.graph.nodes if n.op == "call_function"]
        assert len(calls) == 1

    def test_sizes_already_there_are_not_fixed(self) -> None:
        t = traced(lambda x: x.unsqueeze(1).expand(4, 2, 3) * 1, torch.randn(4, 3))
        assert torch.equal(t.gm.forward(torch.ones(7, 3)), torch.ones(7, 2, 3))

    def test_constants_made_inside(self) -> None:
        t = traced(
            lambda x: x + torch.tensor([1.0, 2.0]) + torch.zeros(2) + np.log(2.0), torch.ones(2)
        )
        assert t.inputs == ("x",)

    def test_dead_code_is_dropped(self) -> None:
        def f(x: Tensor) -> Tensor:
            x.exp().sum()
            return x + 1

        assert "exp" not in traced(f, torch.ones(2)).gm.code


class TestChecks:
    def check_message(self, good: Tensor, bad: Tensor, scale: Tensor) -> None:
        def f(mean: Tensor, scale: Tensor) -> Tensor:
            return Normal(mean, scale).log_prob(mean)

        t = traced(f, good, scale)
        with pytest.raises(ValueError, match="Expected parameter loc") as expected:
            f(bad, scale)
        with pytest.raises(ValueError, match="Expected parameter loc") as found:
            run(t, (bad, scale), {})
        assert str(found.value) == str(expected.value)

    def test_same_error(self) -> None:
        self.check_message(torch.zeros(3), torch.tensor([0.0, float("nan"), 1.0]), torch.ones(3))

    def test_same_error_where_values_are_shown(self) -> None:
        self.check_message(torch.zeros(1), torch.tensor([float("nan")]), torch.full((1,), 2.0))

    def test_support(self) -> None:
        def f(logits: Tensor, action: Tensor) -> Tensor:
            return Categorical(logits=logits).log_prob(action)

        t = traced(f, torch.zeros(2, 3), torch.tensor([0, 2]))
        with pytest.raises(ValueError, match="within the support") as expected:
            f(torch.zeros(2, 3), torch.tensor([0, 3]))
        with pytest.raises(ValueError, match="within the support") as found:
            run(t, (torch.zeros(2, 3), torch.tensor([0, 3])), {})
        assert str(found.value) == str(expected.value)


class TestContexts:
    @pytest.mark.parametrize(
        "context",
        [
            Context("inference_mode", (True,)),
            Context("no_grad"),
            Context("autocast", ("cpu", torch.bfloat16)),
        ],
    )
    def test_modes_around_the_function(self, context: Context) -> None:
        net = mlp()
        t = traced(net, torch.randn(4, 5), lifted=lifted_of(net=net), contexts=(context,))
        assert t.contexts == (context,)
        expected = {"autocast": "bfloat16"}.get(context.kind, "float32")
        assert t.output_specs[0].dtype == expected

    def test_other_threads_are_not_recorded(self) -> None:
        import threading

        stop = threading.Event()
        failures: list[BaseException] = []

        def elsewhere() -> None:
            while not stop.is_set():
                try:
                    assert torch.from_numpy(np.ones(2)).sum() == 2
                except BaseException as error:
                    failures.append(error)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        try:
            t = traced(lambda a: torch.from_numpy(a) * 2, np.ones(3))
        finally:
            stop.set()
            thread.join()
        assert not failures
        assert sum(n.op == "call_function" for n in t.gm.graph.nodes) == 2
