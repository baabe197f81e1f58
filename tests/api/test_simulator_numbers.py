"""Numbers that a policy reads from the simulator: set between calls, or by each step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rose_compiler
from tests.api.points import Drift


class Wind(Drift):
    """Sets one number with each step, and leaves another as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.left = 1.0, 1.0

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self.left *= 0.9
        return super().step(action)


class Net(nn.Module):
    def __init__(self, wind: Wind) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 3)
        self.wind = wind


class Gained(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.wind.gain


class Left(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.wind.left


def rollout(net: Net, wind: Wind, obs: Tensor) -> Tensor:
    seen = []
    for _ in range(3):
        with torch.no_grad():
            twice = obs * 2
            action = net(twice)
        obs = torch.as_tensor(wind.step(action.numpy())[0])
        seen.append(action)
    return torch.stack(seen)


def same(fn: Any) -> Any:
    return fn


@pytest.mark.parametrize("kind", [Gained, Left])
def test_a_number_of_the_simulator_is_read_anew(kind: type[Net]) -> None:
    results: list[list[Tensor]] = []
    for wrap in (same, lambda f: rose_compiler.compile(f, tune=False)):
        wind, step = Wind(), wrap(rollout)
        net, obs = kind(wind), torch.as_tensor(wind.reset(seed=1)[0])
        results.append([])
        for call in range(4):
            if call == 3:
                # no code within reach stores anything under the name of the one
                graph = wrap is not same and 'kind="graph"' in step.history[-1][1]
                wind.gain = 0.5
            results[-1].append(step(net, wind, obs))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert graph == (kind is Gained)
    step.close()
