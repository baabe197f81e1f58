"""Policies with a prompt encoder: instructions are encoded once a rollout, and the rest is cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rose_compiler
from rose_compiler.base.decision import Decision
from rose_compiler.sim import ShardedEnv
from tests.api.loops import Drift

pytestmark = pytest.mark.usefixtures("one_thread")

ENVS, STEPS = 64, 3


class Encoder(nn.Module):
    """Tokens (rows, 4) to rows of 8."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.norm = nn.Embedding(16, 8), nn.Linear(8, 8), nn.LayerNorm(8)
        self.calls = 0

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.norm(x + F.gelu(self.mix(x))).mean(1)


class Policy(nn.Module):
    """A Gaussian around a mean that an observation and an instruction make."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.mean = nn.Sequential(nn.Linear(3 + 8, 32), nn.Tanh(), nn.Linear(32, 3))

    def act(self, obs: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        mean = self.mean(torch.cat([obs, self.encoder(tokens)], 1))
        noise = torch.randn_like(mean)
        return mean + 0.1 * noise, -0.5 * noise.pow(2).sum(1)


class Rollouts:
    """What an iteration leaves; the instructions are the first thing in it."""

    def __init__(self) -> None:
        self.tokens = torch.zeros(ENVS, 4, dtype=torch.int64)
        self.obs = torch.zeros(STEPS, ENVS, 3)
        self.actions = torch.zeros(STEPS, ENVS, 3)
        self.scores = torch.zeros(STEPS, ENVS)
        self.rewards = torch.zeros(STEPS, ENVS)


def train(policy: Any, optimizer: Any, buf: Any) -> None:
    loss = torch.zeros(())
    for t in range(STEPS):
        mean = policy.mean(torch.cat([buf.obs[t], policy.encoder(buf.tokens)], 1))
        loss = loss + ((buf.actions[t] - mean).pow(2).sum(1) * buf.rewards[t]).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def iteration(policy: Any, optimizer: Any, envs: Any, buf: Any, obs: Any) -> Any:
    buf.tokens[:] = torch.randint(16, (ENVS, 4))
    for t in range(STEPS):
        with torch.no_grad():
            action, score = policy.act(obs, buf.tokens)
        buf.obs[t], buf.actions[t], buf.scores[t] = obs, action, score
        obs, reward, _, _, _ = envs.step(action.numpy())
        buf.rewards[t] = torch.as_tensor(reward)
        obs = torch.as_tensor(obs)
    train(policy, optimizer, buf)
    return obs


def new_tokens(policy: Any, optimizer: Any, envs: Any, buf: Any, obs: Any) -> Any:
    """Another instruction on every trip."""
    for t in range(STEPS):
        with torch.no_grad():
            action, score = policy.act(obs, buf.tokens)
        buf.obs[t], buf.actions[t], buf.scores[t] = obs, action, score
        obs, reward, _, _, _ = envs.step(action.numpy())
        buf.rewards[t] = torch.as_tensor(reward)
        obs = torch.as_tensor(obs)
        buf.tokens.copy_((buf.tokens + 1) % 16)
    train(policy, optimizer, buf)
    return obs


def training_weights(policy: Any, optimizer: Any, envs: Any, buf: Any, obs: Any) -> Any:
    """The encoder is trained on every trip."""
    for t in range(STEPS):
        with torch.no_grad():
            action, score = policy.act(obs, buf.tokens)
        buf.obs[t], buf.actions[t], buf.scores[t] = obs, action, score
        obs, reward, _, _, _ = envs.step(action.numpy())
        buf.rewards[t] = torch.as_tensor(reward)
        obs = torch.as_tensor(obs)
        loss = policy.encoder(buf.tokens).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return obs


def with_gradients(policy: Any, optimizer: Any, envs: Any, buf: Any, obs: Any) -> Any:
    """Every trip goes back through the encoder: its gradients add up trip by trip."""
    for t in range(STEPS):
        encoded = policy.encoder(buf.tokens)
        mean = policy.mean(torch.cat([obs, encoded], 1))
        buf.actions[t] = mean.detach()
        obs, reward, _, _, _ = envs.step(mean.detach().numpy())
        buf.rewards[t] = torch.as_tensor(reward)
        (mean.pow(2).sum(1) * buf.rewards[t]).mean().backward()
        obs = torch.as_tensor(obs)
    optimizer.step()
    optimizer.zero_grad()
    return obs


def trained(fn: Callable[..., Any], wrap: Callable[[Any], Any]) -> tuple[list[Tensor], Any]:
    torch.manual_seed(0)
    policy, buf = Policy(), Rollouts()
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    envs = ShardedEnv.split([Drift] * ENVS, shards=2, hosts="inline")
    try:
        obs = torch.as_tensor(envs.reset(seed=1)[0])
        run = wrap(fn)
        for _ in range(3):
            obs = run(policy, optimizer, envs, buf, obs)
    finally:
        envs.close()
    found = [*policy.parameters(), *vars(buf).values(), obs, torch.get_rng_state()]
    return [f.detach() for f in found], run


def compiled(fn: Callable[..., Any], folder: Path, groups: int = 2, **options: Any) -> str:
    """Train compiled and as written: the same bits; what the compiler says of it."""
    path = folder / "decision.json"
    Decision(groups=groups, late="shadow", lanes="thread").save(path)
    eager, _ = trained(fn, lambda f: f)
    wrap = lambda f: rose_compiler.compile(f, tune=path, numerics="bitwise", **options)  # noqa: E731
    mine, run = trained(fn, wrap)
    said: str = run.explain(width=200)
    lines = run.source.splitlines()
    run.close()
    if "makes them once" in said:
        call = next(k for k, line in enumerate(lines) if "act_fixed(" in line)
        assert call < next(k for k, line in enumerate(lines) if line.lstrip().startswith("for "))
    assert all(torch.equal(a, b) for a, b in zip(eager, mine, strict=True))
    return said


@pytest.mark.parametrize("groups", [1, 2])
def test_instructions_are_encoded_once_a_rollout(groups: int, tmp_path: Path) -> None:
    said = compiled(iteration, tmp_path, groups, check=groups == 2)
    # checking mode runs nothing that could be timed
    assert ("its values are used on 3 trips" in said) == (groups == 1)
    applied = said.split("Missed")[0]
    assert "are the same on every trip of" in applied
    assert "`act_fixed` makes them once" in applied
    assert ("advances in 2 groups of 32, 32" in applied) == (groups == 2)


@pytest.mark.parametrize("fn", [new_tokens, training_weights, with_gradients])
def test_what_changes_is_encoded_on_every_trip(fn: Callable[..., Any], tmp_path: Path) -> None:
    said = compiled(fn, tmp_path)
    assert "makes them once" not in said


def seeing(policy: Any, optimizer: Any, envs: Any, buf: Any, obs: Any) -> Any:
    """Instructions for later are made on every trip."""
    for t in range(STEPS):
        with torch.no_grad():
            action, score = policy.act(obs, buf.tokens)
        buf.obs[t], buf.actions[t], buf.scores[t] = obs, action, score
        buf.seen[t] = (action.abs().sum(1, keepdim=True) * 10).long().expand(-1, 4) % 16
        obs, reward, _, _, _ = envs.step(action.numpy())
        buf.rewards[t] = torch.as_tensor(reward)
        obs = torch.as_tensor(obs)
    return obs


def counted(policy: Any, optimizer: Any, envs: Any, buf: Any, obs: Any) -> Any:
    """As many trips as there is to do, which may be none."""
    for t in range(len(buf.todo)):
        with torch.no_grad():
            action, score = policy.act(obs, buf.tokens)
        buf.obs[t], buf.actions[t], buf.scores[t] = obs, action, score
        obs, _, _, _, _ = envs.step(action.numpy())
        obs = torch.as_tensor(obs)
    return obs


def stopping(policy: Any, optimizer: Any, envs: Any, buf: Any, obs: Any) -> Any:
    for t in range(STEPS):
        if not buf.going.all():
            break
        with torch.no_grad():
            action, score = policy.act(obs, buf.tokens)
        buf.obs[t], buf.actions[t], buf.scores[t] = obs, action, score
        obs, _, _, _, _ = envs.step(action.numpy())
        obs = torch.as_tensor(obs)
    return obs


def logged(policy: Any, optimizer: Any, envs: Any, buf: Any, obs: Any) -> Any:
    """A trip leaves something before it looks an instruction up."""
    for t in range(STEPS):
        buf.obs[t] = obs
        buf.log.append(t)
        with torch.no_grad():
            action, score = policy.act(obs, buf.tokens)
        buf.actions[t], buf.scores[t] = action, score
        obs, _, _, _, _ = envs.step(action.numpy())
        obs = torch.as_tensor(obs)
    return obs


@pytest.mark.parametrize("fn", [counted, stopping, logged])
def test_tokens_that_are_out_of_range_raise_where_they_do_in_eager(
    fn: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "decision.json"
    Decision(groups=1, late="shadow", lanes="thread").save(path)
    found: list[list[Any]] = []
    for compiled in (False, True):
        torch.manual_seed(0)
        policy, buf = Policy(), Rollouts()
        buf.todo, buf.log, buf.going = list(range(STEPS)), [], torch.ones(2)  # type: ignore[attr-defined]
        run: Any = fn
        if compiled:
            run = rose_compiler.compile(fn, tune=path, numerics="bitwise")
        envs = ShardedEnv.split([Drift] * ENVS, shards=2, hosts="inline")
        obs = torch.as_tensor(envs.reset(seed=1)[0])
        found.append([])
        for call in range(4):
            if call == 3:
                buf.tokens[:] = 99
                buf.todo.clear()  # type: ignore[attr-defined]
                buf.going.zero_()  # type: ignore[attr-defined]
            try:
                obs = run(policy, None, envs, buf, obs)
            except IndexError as error:
                found[-1].append(str(error))
            found[-1] += [obs, buf.obs.clone(), buf.actions.clone(), list(buf.log)]  # type: ignore[attr-defined]
        envs.close()
        if compiled:
            run.close()
    assert len(found[0]) == len(found[1])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def rebound(policy: Any, buf: Any) -> None:
    buf.tokens = buf.seen[1]


def pointed(policy: Any, buf: Any) -> None:
    buf.tokens.data = buf.seen[1]


def set_to(policy: Any, buf: Any) -> None:
    buf.tokens.set_(buf.seen[1])


def both_new(policy: Any, buf: Any) -> None:
    buf.seen = torch.cat([buf.tokens[None]] * STEPS)
    buf.tokens = buf.seen[1]


def weights(policy: Any, buf: Any) -> None:
    policy.encoder.mix.bias.data = buf.rewards[1][:8]


@pytest.mark.parametrize("share", [rebound, pointed, set_to, both_new, weights])
def test_memory_that_is_shared_later_is_read_on_every_trip(
    share: Callable[[Any, Any], None], tmp_path: Path
) -> None:
    path = tmp_path / "decision.json"
    Decision(groups=1, late="shadow", lanes="thread").save(path)
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        policy, buf = Policy(), Rollouts()
        buf.seen = torch.zeros(STEPS, ENVS, 4, dtype=torch.int64)  # type: ignore[attr-defined]
        run: Any = seeing
        if compiled:
            run = rose_compiler.compile(seeing, tune=path, numerics="bitwise")
        envs = ShardedEnv.split([Drift] * ENVS, shards=2, hosts="inline")
        obs = torch.as_tensor(envs.reset(seed=1)[0])
        for call in range(4):
            if call == 2:
                if compiled:
                    assert "makes them once" in run.explain(width=200)
                share(policy, buf)
            obs = run(policy, None, envs, buf, obs)
        envs.close()
        found.append([obs, *(v.clone() for v in vars(buf).values())])
        if compiled:
            assert "shares memory with" in run.explain(width=200)
            run.close()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
