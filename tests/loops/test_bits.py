"""The comparison itself: what it must see."""

from __future__ import annotations

import random
from collections import deque

import numpy as np
import pytest
import torch
from torch import nn

from tests.loops.bits import bits, differing
from tests.loops.envs import Reach
from tests.loops.harness import in_shards, seeded_spaces


def owned():  # type: ignore[no-untyped-def]
    """Something of everything that a script may own."""
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    env = Reach()
    env.reset(seed=0)
    return {
        "model": model,
        "optimizer": optimizer,
        "env": env,
        "random": random.Random(0),
        "generator": torch.Generator().manual_seed(0),
        "numpy": np.random.default_rng(0),
        "rows": deque([(1, 2.0)], maxlen=3),
        "array": np.zeros(2),
    }


def flip(x: torch.Tensor) -> None:
    """Change the last bit of a tensor's first value."""
    x.detach().view(torch.int32).view(-1)[0] ^= 1


CHANGES = {
    "parameter": lambda o: flip(o["model"].weight),
    "gradient": lambda o: flip(o["model"].weight.grad),
    "no gradient": lambda o: setattr(o["model"].weight, "grad", None),
    "moment": lambda o: flip(o["optimizer"].state[o["model"].weight]["exp_avg"]),
    "rate": lambda o: o["optimizer"].param_groups[0].update(lr=2e-3),
    "mode": lambda o: o["model"].eval(),
    "requires_grad": lambda o: o["model"].bias.requires_grad_(False),
    "simulator": lambda o: o["env"].step(np.zeros(2)),
    "simulator's generator": lambda o: o["env"].np_random.random(),
    "python's generator": lambda o: o["random"].random(),
    "torch's generator": lambda o: torch.rand(1, generator=o["generator"]),
    "numpy's generator": lambda o: o["numpy"].random(),
    "row": lambda o: o["rows"].append((1, 2.0)),
    "negative zero": lambda o: o["array"].__setitem__(0, -0.0),
    "dtype": lambda o: o.update(array=np.zeros(2, np.float32)),
    "sharing": lambda o: o.update(again=np.zeros(2)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_shows(change: str) -> None:
    one, other = owned(), owned()
    one["again"] = one["array"]
    other["again"] = other["array"]
    assert differing(bits(one), bits(other)) == []
    CHANGES[change](other)
    assert differing(bits(one), bits(other))


def test_environments_in_shards_are_followed() -> None:
    with seeded_spaces():
        first, second = in_shards([Reach] * 3), in_shards([Reach] * 3)
        try:
            for envs in (first, second):
                envs.reset(seed=0)
            assert differing(bits(first), bits(second)) == []
            second.shards()[1].step(np.zeros((1, 2), np.float32))
            found = differing(bits(first), bits(second))
            assert found
            assert all("envs[2]" in text for text in found)
        finally:
            first.close()
            second.close()
