"""Denoising loops between an observation and its action: written out, and cut with the batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rose_compiler
from rose_compiler.base.decision import Decision
from rose_compiler.sim import ShardedEnv
from tests.api.loops import Drift

pytestmark = pytest.mark.usefixtures("one_thread")

ENVS, STEPS, DENOISE = 64, 3, 3


class Denoiser(nn.Module):
    """Where a step of denoising leads from ``x``, given an observation."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3 + 3 + 1, 32), nn.Mish(), nn.Linear(32, 3))

    def forward(self, x: torch.Tensor, obs: torch.Tensor, k: int) -> torch.Tensor:
        time = torch.full((x.shape[0], 1), k / DENOISE)
        return x + self.net(torch.cat([x, obs, time], 1)) / DENOISE


class Chains:
    """Every step of every chain, and the rewards."""

    def __init__(self) -> None:
        self.chains = torch.zeros(STEPS, DENOISE + 1, ENVS, 3)
        self.rewards = torch.zeros(STEPS, ENVS)


def train(model: Any, optimizer: Any, buf: Any) -> None:
    x = buf.chains[:, :-1].flatten(0, 2)
    weight = buf.rewards[:, None].expand(STEPS, DENOISE, ENVS).flatten()
    loss = (weight * model.net(torch.cat([x, x, x[:, :1]], 1)).pow(2).mean(1)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def iteration(model: Any, optimizer: Any, envs: Any, buf: Any, obs: Any) -> Any:
    for t in range(STEPS):
        with torch.no_grad():
            x = torch.randn(ENVS, 3)
            buf.chains[t, 0] = x
            for k in range(DENOISE):
                x = model(x, obs, k) + 0.1 * torch.randn_like(x)
                buf.chains[t, k + 1] = x
        obs, reward, _, _, _ = envs.step(x.numpy())
        buf.rewards[t] = torch.as_tensor(reward)
        obs = torch.as_tensor(obs)
    train(model, optimizer, buf)
    return obs


def mixing(model: Any, optimizer: Any, envs: Any, buf: Any, obs: Any) -> Any:
    """A step of the chain looks at all rows."""
    for t in range(STEPS):
        with torch.no_grad():
            x = torch.randn(ENVS, 3)
            for k in range(DENOISE):
                x = model(x - x.mean(0), obs, k)
                buf.chains[t, k + 1] = x
        obs, reward, _, _, _ = envs.step(x.numpy())
        buf.rewards[t] = torch.as_tensor(reward)
        obs = torch.as_tensor(obs)
    train(model, optimizer, buf)
    return obs


def leaving(model: Any, optimizer: Any, envs: Any, buf: Any, obs: Any) -> Any:
    """A chain may end early."""
    for t in range(STEPS):
        with torch.no_grad():
            x = torch.randn(ENVS, 3)
            for k in range(DENOISE):
                x = model(x, obs, k)
                buf.chains[t, k + 1] = x
                if float(x.abs().max()) > 2.0:
                    break
        obs, reward, _, _, _ = envs.step(x.numpy())
        buf.rewards[t] = torch.as_tensor(reward)
        obs = torch.as_tensor(obs)
    train(model, optimizer, buf)
    return obs


def handed_on(model: Any, optimizer: Any, envs: Any, buf: Any, obs: Any) -> Any:
    """A chain that ends where it began hands on what was there; `k` is read behind it."""
    for t in range(STEPS):
        with torch.no_grad():
            first = x = torch.randn(ENVS, 3)
            last = torch.zeros(ENVS, 3)
            for k in reversed(range(DENOISE)):
                last, x = x, model(x, obs, k)
                buf.chains[t, k] = last
            buf.chains[t, DENOISE] = first + last + k
        obs, reward, _, _, _ = envs.step(x.numpy())
        buf.rewards[t] = torch.as_tensor(reward)
        obs = torch.as_tensor(obs)
    train(model, optimizer, buf)
    return obs


def listed(model: Any, optimizer: Any, envs: Any, buf: Any, obs: Any) -> Any:
    """A list made in each trip, and one over all of them."""
    for t in range(STEPS):
        with torch.no_grad():
            x = torch.randn(ENVS, 3)
            path = [x]
            for k in range(DENOISE):
                noise = []
                noise.append(torch.randn_like(x))
                x = model(x, obs, k) + 0.1 * noise[0]
                path.append(x)
            buf.chains[t] = torch.stack(path)
        obs, reward, _, _, _ = envs.step(x.numpy())
        buf.rewards[t] = torch.as_tensor(reward)
        obs = torch.as_tensor(obs)
    train(model, optimizer, buf)
    return obs


def trained(fn: Callable[..., Any], wrap: Callable[[Any], Any]) -> tuple[list[torch.Tensor], Any]:
    torch.manual_seed(0)
    model, buf = Denoiser(), Chains()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    envs = ShardedEnv.split([Drift] * ENVS, shards=2, hosts="inline")
    try:
        obs = torch.as_tensor(envs.reset(seed=1)[0])
        run = wrap(fn)
        for _ in range(3):
            obs = run(model, optimizer, envs, buf, obs)
    finally:
        envs.close()
    found = [*model.parameters(), buf.chains, buf.rewards, obs, torch.get_rng_state()]
    return [f.detach() for f in found], run


def compiled(fn: Callable[..., Any], folder: Path) -> str:
    """Train compiled and as written: the same bits; what the compiler says of it."""
    path = folder / "decision.json"
    Decision(groups=2, late="shadow", lanes="thread").save(path)
    eager, _ = trained(fn, lambda f: f)
    mine, run = trained(fn, lambda f: rose_compiler.compile(f, tune=path, numerics="bitwise"))
    said: str = run.explain(width=200)
    run.close()
    assert all(torch.equal(a, b) for a, b in zip(eager, mine, strict=True))
    return said


@pytest.mark.parametrize("fn", [iteration, handed_on])
def test_chains_are_written_out_and_cut(fn: Callable[..., Any], tmp_path: Path) -> None:
    said = compiled(fn, tmp_path)
    applied = said.split("Missed")[0]
    assert f"makes {DENOISE} trips on the way to a step" in applied
    assert "the batch of 64 advances in 2 groups of 32, 32" in applied
    assert "late [late]" in applied


def test_lists_born_in_a_trip_are_lists_of_their_own(tmp_path: Path) -> None:
    said = compiled(listed, tmp_path)
    assert f"makes {DENOISE} trips on the way to a step" in said


def test_rows_that_meet_in_the_chain_stay_together(tmp_path: Path) -> None:
    said = compiled(mixing, tmp_path)
    assert "makes 3 trips on the way to a step" in said
    assert "advances in 2 groups" not in said


def test_a_chain_that_may_end_early_stays_a_loop(tmp_path: Path) -> None:
    said = compiled(leaving, tmp_path)
    assert "on the way to a step" not in said
    assert "advances in 2 groups" not in said


def test_long_chains_stay_loops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rose_compiler.frontend.unroll.MAX_TRIPS", DENOISE - 1)
    assert "on the way to a step" not in compiled(iteration, tmp_path)
