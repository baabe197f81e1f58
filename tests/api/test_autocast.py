"""Casts of weights last as long as the outermost `autocast` around them, and no longer."""

from __future__ import annotations

import _heapq
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rose_compiler
from rose_compiler.sim import ShardedEnv
from tests.api.loops import Drift


def half(net: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return net(x)


@torch.autocast("cpu", dtype=torch.bfloat16)
def decorated(net: Any, x: Tensor) -> Tensor:
    return net(x)


def written(envs: Any, net: Any, opt: Any, obs: Tensor) -> Any:
    seen = []
    for _ in range(3):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = net(obs)
            loss = h.float().pow(2).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = net(obs)
            seen.append(h.detach().float().sum())
        obs, _, _, _, _ = envs.step(h.detach().float().numpy())
        obs = torch.as_tensor(obs, dtype=torch.float32)
    return obs, seen


def updated(opt: Any, loss: Tensor) -> None:
    opt.zero_grad()
    loss.backward()
    opt.step()


def moved(envs: Any, h: Tensor) -> Tensor:
    obs, _, _, _, _ = envs.step(h.detach().float().numpy())
    return torch.as_tensor(obs, dtype=torch.float32)


def stepped(net: Any, opt: Any, x: Tensor) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = net(x).float().pow(2).mean()
        updated(opt, loss)


def inlined(envs: Any, net: Any, opt: Any, obs: Tensor) -> Any:
    seen = []
    for _ in range(3):
        stepped(net, opt, obs)
        stepped(net, opt, obs)
        h = half(net, obs)
        seen.append(h.detach().float().sum())
        seen.append(decorated(net, obs).detach().float().sum())
        obs = moved(envs, h)
    return obs, seen


def twice(envs: Any, net: Any, opt: Any, obs: Tensor) -> Any:
    seen = []
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            a = net(obs)
            b = net(obs * 0.37)
            loss = a.float().pow(2).mean() + b.float().abs().mean()
        updated(opt, loss)
        seen.append(loss.detach())
        obs = moved(envs, a)
    return obs, seen


def stale(envs: Any, net: Any, opt: Any, obs: Tensor) -> Any:
    seen = []
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            a = net(obs)
            loss = a.float().pow(2).mean()
            updated(opt, loss)
            b = net(obs)
        seen.append(b.detach().float().sum())
        obs = moved(envs, b)
    return obs, seen


def around(envs: Any, net: Any, opt: Any, obs: Tensor) -> Any:
    seen = []
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for k in range(3):
                loss = (net(obs).float() - 0.1 * k).pow(2).mean()
                updated(opt, loss)
                seen.append(loss.detach())
            h = net(obs)
        obs = moved(envs, h)
    return obs, seen


def short(envs: Any, net: Any, opt: Any, obs: Tensor) -> Any:
    seen = []
    for _ in range(2):
        loss = torch.zeros(())
        for k in range(3):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss + net(obs * (k + 1)).float().pow(2).mean()
        updated(opt, loss)
        seen.append(loss.detach())
        obs = moved(envs, half(net, obs))
    return obs, seen


HEAP: list[float] = []


def late(envs: Any, net: Any, opt: Any, obs: Tensor) -> Any:
    seen = []
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            a = net(obs)
            loss = a.float().pow(2).mean()
            if net.updates > 2:  # what it does is watched when it first runs
                b = net(moved(envs, a))
                loss = loss + b.float().abs().mean()
                _heapq.heappush(HEAP, 0.0)
        updated(opt, loss)
        net.updates += 1
        seen.append(loss.detach())
        obs = moved(envs, a)
    return obs, seen


@pytest.mark.parametrize("fn", [written, inlined])
def test_neighbouring_regions_keep_no_casts_for_each_other(fn: Any) -> None:
    trains_the_same(fn)


@pytest.mark.parametrize("fn", [twice, stale, around, short, late])
def test_a_region_keeps_its_casts_from_the_first_call_on(fn: Any) -> None:
    trains_the_same(fn)


def trains_the_same(fn: Any) -> None:
    results = []
    fast = rose_compiler.compile(fn, numerics="bitwise", tune=False)
    for run in (fn, fast):
        torch.manual_seed(0)
        envs = ShardedEnv.split([Drift] * 4, shards=2, hosts="inline")
        net: Any = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))
        net.updates = 0
        opt = torch.optim.SGD(net.parameters(), lr=0.5)
        obs, found = torch.as_tensor(envs.reset(seed=0)[0], dtype=torch.float32), []
        for _ in range(3):
            obs, told = run(envs, net, opt, obs)
            found += [*told, obs]
        results.append([*found, *(p.detach() for p in net.parameters())])
        envs.close()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    fast.close()
