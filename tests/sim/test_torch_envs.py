"""The simulators written in torch: physics, autoreset, independence of rows, traceability."""

from __future__ import annotations

import math
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from rose_compiler.sim import TorchCartPole, TorchPendulum

KINDS: tuple[Any, ...] = (TorchCartPole, TorchPendulum)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_cart_pole_follows_gymnasiums_equations() -> None:
    reference: Any = gymnasium.make("CartPole-v1").unwrapped
    reference.kinematics_integrator = "semi-implicit"
    reference.reset(seed=0)
    env = TorchCartPole(1, dtype=torch.float64, limit=10_000)
    start = np.array([0.1, -0.2, 0.05, 0.1])
    reference.state = tuple(start)
    env.state = torch.from_numpy(start)[None]
    for t in range(40):
        force = 1.0 if t % 3 else -1.0
        reference.step(1 if force > 0 else 0)
        obs, reward, terminated, _, _ = env.step(torch.tensor([[force]], dtype=torch.float64))
        if bool(terminated):
            break
        np.testing.assert_allclose(obs[0].numpy(), np.array(reference.state), rtol=1e-9)
        assert reward.item() == 1.0
    assert t > 10


def test_pendulum_follows_gymnasiums_equations() -> None:
    reference: Any = gymnasium.make("Pendulum-v1").unwrapped
    reference.reset(seed=0)
    env = TorchPendulum(1, dtype=torch.float64, limit=10_000)
    env.state = torch.tensor([[2.5, -0.4]], dtype=torch.float64)
    reference.state = np.array([2.5, -0.4])
    rng = np.random.default_rng(0)
    for _ in range(200):
        torque = rng.uniform(-1, 1)
        _, expected, _, _, _ = reference.step(np.array([2.0 * torque]))
        obs, reward, _, _, _ = env.step(torch.tensor([[torque]], dtype=torch.float64))
        angle, speed = reference.state
        truth = [math.cos(angle), math.sin(angle), speed]
        np.testing.assert_allclose(obs[0].numpy(), truth, atol=1e-9)
        np.testing.assert_allclose(reward.item(), expected, atol=1e-9)


def test_cart_pole_terminates_out_of_bounds() -> None:
    env = TorchCartPole(2, generator=generator())
    env.state = torch.tensor([[2.39, 2.0, 0.0, 0.0], [0.0, 0.0, 0.2, 2.0]])
    _, _, terminated, truncated, infos = env.step(torch.zeros(2, 1))
    assert terminated.tolist() == [True, True]
    assert truncated.tolist() == [False, False]
    assert infos["final_obs"][0, 0] > 2.4
    assert infos["final_obs"][1, 2] > env.max_angle
    assert env.state.abs().max() <= 0.05  # both have been restarted


@pytest.mark.parametrize("kind", KINDS)
def test_autoreset_within_the_step(kind: Any) -> None:
    env = kind(3, limit=5, generator=generator(), bank=4)
    first, infos = env.reset(seed=1)
    assert infos == {}
    starts = env.starts.clone()
    seen = 0
    for t in range(1, 31):
        obs, _, terminated, truncated, infos = env.step(torch.zeros(3, 1))
        done = terminated | truncated
        assert torch.equal(infos["_final_obs"], done)
        assert torch.equal(infos["final_obs"][~done], obs[~done])
        if t % 5 == 0 and kind is TorchPendulum:
            seen += 1
            assert done.all()
            assert torch.equal(obs, env.observe(starts[seen % 4]))
            assert not torch.equal(infos["final_obs"], obs)
    assert first.shape == (3, kind.obs_dim)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_types_and_shapes(kind: Any, dtype: torch.dtype) -> None:
    env = kind(4, dtype=dtype, generator=generator())
    obs, _ = env.reset(seed=2)
    result = env.step(torch.zeros(4, kind.act_dim, dtype=dtype))
    assert obs.dtype == result[0].dtype == result[1].dtype == dtype
    assert result[0].shape == (4, kind.obs_dim)
    assert [item.shape for item in result[1:4]] == [(4,)] * 3
    assert result[2].dtype == result[3].dtype == torch.bool


@pytest.mark.parametrize("kind", KINDS)
def test_same_seed_same_run(kind: Any) -> None:
    def run(env: Any) -> list[torch.Tensor]:
        out = [env.reset(seed=9)[0]]
        for t in range(60):
            actions = torch.sin(torch.arange(5.0)[:, None] + t)
            out += env.step(actions)[:2]
        return out

    one, other = (run(kind(5, limit=11, generator=generator(s))) for s in (0, 1))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    with pytest.raises(ValueError, match="generator"):
        kind(2).reset(seed=1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_draws_nothing_and_writes_into_nothing(kind: Any) -> None:
    env = kind(3, limit=4)
    obs, _ = env.reset()
    state = torch.get_rng_state()
    kept = [(obs, obs.clone())]
    for _ in range(20):
        result = env.step(torch.ones(3, 1))
        kept += [(item, item.clone()) for item in (*result[:4], *result[4].values())]
        result[0].mul_(1.0)  # writing into an observation must not reach the state
        before = env.state.clone()
        result[0].add_(0.0).zero_()
        kept[-6] = (kept[-6][1], kept[-6][1])
        assert torch.equal(env.state, before)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(item, copied) for item, copied in kept)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_independent(kind: Any) -> None:
    """Half of the batch alone gives the bits it gives within the whole."""
    whole = kind(8, limit=7, generator=generator(3), dtype=torch.float64)
    part = kind(3, limit=7, generator=generator(3), dtype=torch.float64)
    rows = slice(2, 5)
    state = whole.get_state()
    part.set_state(
        {
            "state": state["state"][rows],
            "steps": state["steps"][rows],
            "restarts": state["restarts"][rows],
            "starts": state["starts"][:, rows],
        }
    )
    for t in range(40):
        actions = torch.cos(torch.arange(8.0, dtype=torch.float64)[:, None] * t)
        left, right = whole.step(actions), part.step(actions[rows])
        assert all(torch.equal(a[rows], b) for a, b in zip(left[:4], right[:4], strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_state_round_trip(kind: Any) -> None:
    env = kind(3, limit=6, generator=generator(4))
    for _ in range(9):
        env.step(torch.ones(3, 1))
    saved = env.get_state()
    first = [env.step(torch.ones(3, 1))[0] for _ in range(9)]
    env.set_state(saved)
    again = [env.step(torch.ones(3, 1))[0] for _ in range(9)]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_can_be_traced(kind: Any) -> None:
    """State in, state out: the traced graph gives the bits of the step, across restarts."""
    env = kind(4, limit=3, generator=generator(5))

    def pure(state: Any, steps: Any, restarts: Any, actions: Any) -> Any:
        env.state, env.steps, env.restarts = state, steps, restarts
        obs, reward, terminated, truncated, infos = env.step(actions)
        done = infos["_final_obs"]
        return env.state, env.steps, env.restarts, obs, reward, terminated, truncated, done

    def inputs() -> Any:
        return env.state, env.steps, env.restarts

    saved = env.get_state()
    graph = make_fx(pure)(*inputs(), torch.ones(4, 1))
    env.set_state(saved)
    state = inputs()
    for t in range(10):
        actions = torch.sin(torch.arange(4.0)[:, None] + t)
        traced = graph(*state, actions)
        env.state, env.steps, env.restarts = state
        eager = pure(*state, actions)
        assert all(torch.equal(a, b) for a, b in zip(traced, eager, strict=True))
        state = traced[:3]
    written = [
        node
        for node in graph.graph.nodes
        if str(node.target).split(".")[-2:-1] and str(node.target).split(".")[-2].endswith("_")
    ]
    assert not written


def test_arguments() -> None:
    for kwargs in ({"num_envs": 0}, {"num_envs": 1, "limit": 0}, {"num_envs": 1, "bank": 0}):
        with pytest.raises(ValueError, match="at least 1"):
            TorchCartPole(**kwargs)
