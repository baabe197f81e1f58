"""Tensors of another dtype, device or shape at the next call: captured anew once, and said."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import rose_compiler
from rose_compiler.sim import ShardedEnv
from tests.api.loops import Drift


def recaptures(fast: Any) -> list[str]:
    return [r.why for r in fast._log if r.code == "re-captured"]


def follow(steps: Any, x: Any, y: Any) -> Any:
    for _ in range(steps.count):
        x = x * 2 + y
    return x


def test_another_device_is_captured_anew_once() -> None:
    # there is no second device on most machines but torch's own "meta", whose tensors have no data
    fast = rose_compiler.compile(follow, tune=False)
    steps, told = SimpleNamespace(count=3), []
    for device in ("cpu", "cpu", "meta", "meta", "cpu"):
        x = torch.ones(4, device=device)
        found = fast(steps, x, torch.ones(4, device=device))
        assert found.device.type == device
        assert found.shape == (4,)
        if device == "cpu":
            assert found.tolist() == [15.0] * 4
        told.append(len(recaptures(fast)))
    assert told == [0, 0, 1, 1, 1]
    assert "'x' changed from tensor((4,), torch.float32, cpu" in recaptures(fast)[0]
    assert "to tensor((4,), torch.float32, meta" in recaptures(fast)[0]
    fast.close()


class Policy(nn.Module):
    """Computes in the dtype that its weights have."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 3)

    def forward(self, x: Any) -> Any:
        kind = self.body.weight.dtype
        return self.body(x.to(kind)).tanh() + torch.ones(3, dtype=kind) / 3


def rollout(envs: Any, policy: Any, norm: Any, obs: Any) -> Any:
    """Three steps, acting with what is traced to one graph."""
    seen = []
    for _ in range(3):
        with torch.no_grad():
            z = obs * norm.table.shape[0] + norm.table.sum(0)
            z = z + torch.ones(norm.table.shape[0]).sum()
            mean = policy(z)
            action = mean.float()
        obs, _, _, _, _ = envs.step(action.numpy())
        obs = torch.as_tensor(obs, dtype=torch.float32)
        seen.append(mean.sum())
    return obs, torch.stack(seen)


def in_double(policy: Any, norm: Any) -> None:
    policy.double()


def data_in_double(policy: Any, norm: Any) -> None:
    for p in policy.parameters():
        p.data = p.data.double()


def more_rows(policy: Any, norm: Any) -> None:
    norm.table = torch.arange(18.0).view(6, 3)


def other_rows(policy: Any, norm: Any) -> None:
    norm.table = torch.arange(12.0).view(4, 3)


#: What changes, and a word of the remark; None where nothing is captured anew.
CHANGES = {
    in_double: "policy.params.body.weight changed from a float32",
    data_in_double: "policy.params.body.weight changed from a float32",
    more_rows: "norm.table changed from a float32 tensor of (4, 3)",
    other_rows: None,
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.__name__)
def test_what_a_graph_was_traced_with_is_guarded(change: Callable[[Any, Any], None]) -> None:
    results, fast = [], rose_compiler.compile(rollout, numerics="bitwise", tune=False)
    for fn in (rollout, fast):
        torch.manual_seed(0)
        envs = ShardedEnv.split([Drift] * 8, shards=2, hosts="inline")
        policy, norm = Policy().eval(), SimpleNamespace(table=torch.ones(4, 3))
        obs, found = torch.as_tensor(envs.reset(seed=0)[0]), []
        for call in range(5):
            if call == 3:
                change(policy, norm)
            obs, told = fn(envs, policy, norm, obs)
            found += [obs, told]
        results.append(found)
        envs.close()
    assert 'kind="graph"' in fast.history[-1][1]
    for a, b in zip(*results, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    word = CHANGES[change]
    assert len(recaptures(fast)) == (word is not None)
    assert word is None or word in recaptures(fast)[0]
    fast.close()


def listed(envs: Any, weights: Any, obs: Any) -> Any:
    for _ in range(3):
        z = obs * 2
        z = z + 1
        z = z.tanh()
        action = z * weights[0]
        obs, _, _, _, _ = envs.step(action.numpy())
        obs = torch.as_tensor(obs, dtype=torch.float32)
    return obs


def test_a_tensor_in_a_list_is_read_from_the_list() -> None:
    results, fast = [], rose_compiler.compile(listed, numerics="bitwise", tune=False)
    for fn in (listed, fast):
        envs = ShardedEnv.split([Drift] * 8, shards=2, hosts="inline")
        weights = [torch.full((3,), 0.5)]
        obs = torch.as_tensor(envs.reset(seed=0)[0], dtype=torch.float32)
        for call in range(4):
            weights[0] = weights[0] + call
            obs = fn(envs, weights, obs)
        results.append(obs)
        envs.close()
    assert torch.equal(*results)
    fast.close()
