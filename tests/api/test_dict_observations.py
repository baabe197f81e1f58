"""Observations that are dicts of arrays are rows of a batch, cut and joined entry by entry."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

import rose_compiler
from rose_compiler.base.decision import Decision
from rose_compiler.sim import ShardedEnv
from tests.api.loops import Drift

pytestmark = pytest.mark.usefixtures("one_thread")

ENVS, STEPS = 64, 3


class Parts(Drift):
    """The point's place and how far it is, apart; infos say it once more."""

    def __init__(self) -> None:
        super().__init__()
        box = self.observation_space
        far = spaces.Box(0, np.inf, (1,), np.float32)
        self.observation_space = spaces.Dict({"far": far, "place": box})

    def _parts(self, place: Any) -> dict[str, Any]:
        return {"far": np.abs(place).sum(keepdims=True), "place": place}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        place, infos = super().reset(seed=seed, options=options)
        return self._parts(place), infos

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        place, reward, terminated, truncated, _ = super().step(action)
        return self._parts(place), reward, terminated, truncated, {"again": place.copy()}


class Policy(nn.Module):
    """A mean and a value from both parts."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 3))
        self.critic = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))

    def act(self, place: Tensor, far: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.cat([place, far], 1)
        mean = self.net(x)
        return mean + 0.1 * torch.randn_like(mean), self.critic(x).flatten()


class Rollouts:
    """What an iteration leaves."""

    def __init__(self) -> None:
        self.place = torch.zeros(STEPS, ENVS, 3)
        self.values = torch.zeros(STEPS, ENVS)
        self.rewards = torch.zeros(STEPS, ENVS)


def train(policy: Any, optimizer: Any, buf: Any) -> None:
    x = torch.cat([buf.place, buf.place.abs().sum(2, keepdim=True)], 2)
    loss = (policy.critic(x).squeeze(2) - buf.rewards + 0.1 * buf.values).pow(2).mean()
    optimizer.zero_grad()
    (loss + policy.net(x).pow(2).mean()).backward()
    optimizer.step()


def picked(policy: Any, optimizer: Any, envs: Any, buf: Any, obs: Any) -> Any:
    """Entries are taken where they are used; the dict itself is handed on."""
    for t in range(STEPS):
        place = torch.as_tensor(obs["place"])
        far = torch.as_tensor(obs["far"])
        with torch.no_grad():
            action, value = policy.act(place, far)
        buf.place[t], buf.values[t] = place, value
        obs, reward, _, _, _ = envs.step(action.numpy())
        buf.rewards[t] = torch.as_tensor(reward)
    train(policy, optimizer, buf)
    return obs


def converted(policy: Any, optimizer: Any, envs: Any, buf: Any, obs: Any) -> Any:
    """A dict of tensors is made of every observation."""
    obs = {k: torch.as_tensor(v) for k, v in obs.items()}
    for t in range(STEPS):
        with torch.no_grad():
            action, value = policy.act(obs["place"], obs["far"])
        buf.place[t], buf.values[t] = obs["place"], value
        obs, reward, _, _, _ = envs.step(action.numpy())
        buf.rewards[t] = torch.as_tensor(reward)
        obs = {k: torch.as_tensor(v) for k, v in obs.items()}
    train(policy, optimizer, buf)
    return obs


def from_infos(policy: Any, optimizer: Any, envs: Any, buf: Any, obs: Any) -> Any:
    """The policy looks at infos, which a shard may have others of."""
    place = torch.as_tensor(obs["place"])
    for t in range(STEPS):
        with torch.no_grad():
            action, value = policy.act(place, place[:, :1])
        buf.place[t], buf.values[t] = place, value
        obs, reward, _, _, infos = envs.step(action.numpy())
        buf.rewards[t] = torch.as_tensor(reward)
        place = torch.as_tensor(infos["again"])
    train(policy, optimizer, buf)
    return obs


def mixed(policy: Any, optimizer: Any, envs: Any, buf: Any, obs: Any) -> Any:
    """An entry is normalized over all rows."""
    for t in range(STEPS):
        place = torch.as_tensor(obs["place"])
        far = torch.as_tensor(obs["far"] - obs["far"].mean(0))
        with torch.no_grad():
            action, value = policy.act(place, far)
        buf.place[t], buf.values[t] = place, value
        obs, reward, _, _, _ = envs.step(action.numpy())
        buf.rewards[t] = torch.as_tensor(reward)
    train(policy, optimizer, buf)
    return obs


def trained(
    fn: Callable[..., Any], wrap: Callable[[Any], Any], made: Callable[[], Any] = Parts
) -> tuple[list[Any], Any]:
    torch.manual_seed(0)
    policy, buf = Policy(), Rollouts()
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    factories: list[Callable[[], gymnasium.Env]] = [made] * ENVS
    envs = ShardedEnv.split(factories, shards=2, hosts="inline")
    try:
        obs, _ = envs.reset(seed=1)
        run = wrap(fn)
        for _ in range(3):
            obs = run(policy, optimizer, envs, buf, obs)
    finally:
        envs.close()
    found = [*policy.parameters(), *vars(buf).values(), *obs.values(), torch.get_rng_state()]
    return [torch.as_tensor(f).detach() for f in found], run


def compiled(fn: Callable[..., Any], folder: Path, **options: Any) -> str:
    """Train compiled and as written: the same bits; what was applied."""
    path = folder / "decision.json"
    Decision(groups=2, late="shadow", lanes="thread", **options).save(path)
    eager, _ = trained(fn, lambda f: f)
    mine, run = trained(
        fn, lambda f: rose_compiler.compile(f, tune=path, numerics="bitwise", check=fn is picked)
    )
    said: str = run.explain(width=200).split("Missed")[0]
    run.close()
    assert all(torch.equal(a, b) for a, b in zip(eager, mine, strict=True))
    return said


@pytest.mark.parametrize("fn", [picked, converted])
def test_dicts_are_cut_with_the_batch(fn: Callable[..., Any], tmp_path: Path) -> None:
    said = compiled(fn, tmp_path)
    assert "the batch of 64 advances in 2 groups of 32, 32" in said
    assert "late [late]" in said


def test_late_work_on_a_dict_is_deferred(tmp_path: Path) -> None:
    said = compiled(picked, tmp_path, defer=True)
    assert "computed once for all 3 trips" in said


@pytest.mark.parametrize("fn", [from_infos, mixed])
def test_what_is_about_all_rows_stays_whole(fn: Callable[..., Any], tmp_path: Path) -> None:
    assert "advances in" not in compiled(fn, tmp_path)


def counted(policy: Any, optimizer: Any, envs: Any, buf: Any, obs: Any) -> Any:
    """What is stored late depends on the dict itself, and on the types of its entries."""
    obs = {k: torch.as_tensor(v) for k, v in obs.items()}
    for t in range(STEPS):
        with torch.no_grad():
            action, value = policy.act(obs["place"].float(), obs["far"].float())
            far = (obs["place"] * obs["place"] * 1.1).sum(1)
        buf.place[t], buf.values[t] = obs["place"], value + len(obs)
        obs, reward, _, _, _ = envs.step(action.numpy())
        buf.rewards[t] = far + torch.as_tensor(reward)
        obs = {k: torch.as_tensor(v) for k, v in obs.items()}
    train(policy, optimizer, buf)
    return obs


def plain(policy: Any, optimizer: Any, envs: Any, buf: Any, obs: Any) -> Any:
    """The same of an observation that is no dict."""
    obs = torch.as_tensor(obs)
    for t in range(STEPS):
        with torch.no_grad():
            action, value = policy.act(obs.float(), obs[:, :1].float())
            far = (obs * obs * 1.1).sum(1)
        buf.place[t], buf.values[t] = obs, value
        obs, reward, _, _, _ = envs.step(action.numpy())
        buf.rewards[t] = far + torch.as_tensor(reward)
        obs = torch.as_tensor(obs)
    train(policy, optimizer, buf)
    return {"obs": obs}


def more(obs: Any) -> Any:
    return {**obs, "z": obs["far"] * 2}


def reordered(obs: Any) -> Any:
    return {k: obs[k] for k in reversed(list(obs))}


def no_rows(obs: Any) -> Any:
    return {**obs, "n": np.zeros(3, np.float32)}


def wider(obs: Any) -> Any:
    if not isinstance(obs, dict):
        return np.asarray(obs).astype(np.float64) * 1.0000001
    return {k: wider(v) for k, v in obs.items()}


def less(obs: Any) -> Any:
    return {k: v for k, v in obs.items() if k != "z"}


def narrower(obs: Any) -> Any:
    if not isinstance(obs, dict):
        return np.asarray(obs).astype(np.float32)
    return {k: narrower(v) for k, v in obs.items()}


class Third(Parts):
    """One with a third entry."""

    def __init__(self) -> None:
        super().__init__()
        z = spaces.Box(0, 1, (1,), np.float32)
        self.observation_space = spaces.Dict({**self.observation_space.spaces, "z": z})

    def _parts(self, place: Any) -> dict[str, Any]:
        return {**super()._parts(place), "z": np.ones(1, np.float32)}


def _wide(box: Any) -> Any:
    return spaces.Box(-np.inf, np.inf, box.shape, np.float64)


class WideParts(Parts):
    """One of doubles."""

    def __init__(self) -> None:
        super().__init__()
        parts = self.observation_space.spaces
        self.observation_space = spaces.Dict({k: _wide(v) for k, v in parts.items()})

    def _parts(self, place: Any) -> dict[str, Any]:
        return dict(wider(super()._parts(place)))


class Wide(Drift):
    """A point in doubles."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = _wide(self.observation_space)

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        place, infos = super().reset(**options)
        return wider(place), infos

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        place, *rest = super().step(action)
        return (wider(place), *rest)


CHANGES = [(counted, c) for c in (more, reordered, no_rows, wider)] + [(plain, wider)]
OTHERS = [(counted, Third, less), (counted, WideParts, narrower), (plain, Wide, narrower)]


@pytest.mark.parametrize(("fn", "change"), CHANGES, ids=lambda f: f.__name__)
@pytest.mark.parametrize(("groups", "first"), [(1, 1), (2, 0)], ids=["whole-later", "tiled"])
def test_the_first_observation_may_be_of_another_kind(
    fn: Callable[..., Any], change: Callable[[Any], Any], first: int, groups: int, tmp_path: Path
) -> None:
    same_as_written(fn, change, first, groups, Drift if fn is plain else Parts, tmp_path)


@pytest.mark.parametrize(("fn", "made", "change"), OTHERS, ids=lambda f: f.__name__)
@pytest.mark.parametrize(("groups", "first"), [(1, 1), (2, 0)], ids=["whole-later", "tiled"])
def test_a_step_may_give_more_than_was_handed_in(
    fn: Callable[..., Any], made: Any, change: Any, first: int, groups: int, tmp_path: Path
) -> None:
    same_as_written(fn, change, first, groups, made, tmp_path)


def same_as_written(
    fn: Callable[..., Any],
    change: Callable[[Any], Any],
    first: int,
    groups: int,
    made: Any,
    folder: Path,
) -> None:
    path = folder / "decision.json"
    Decision(groups=groups, late="shadow", lanes="thread", defer=True).save(path)

    def wrapped(run: Callable[..., Any]) -> Callable[..., Any]:
        calls = iter(range(3))

        def call(*args: Any) -> Any:
            *others, obs = args
            found = obs["obs"] if fn is plain and isinstance(obs, dict) else obs
            return run(*others, change(found) if next(calls) >= first else found)

        return call

    run = rose_compiler.compile(fn, tune=path, numerics="bitwise")
    eager, _ = trained(fn, lambda _: wrapped(fn), made)
    mine, _ = trained(fn, lambda _: wrapped(run), made)
    run.close()
    assert all(torch.equal(a, b) for a, b in zip(eager, mine, strict=True))
