"""A call that hides the training from the passes is told, with the way out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import rose_compiler


class Trainer:
    """Two ways of writing one update."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(3, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def collect(self) -> tuple[Any, Any]:
        """Data to learn from."""
        return torch.randn(4, 3), torch.randn(4, 1)

    def update(self, x: Any, y: Any) -> None:
        """One step."""
        for _ in range(2):
            loss = (self.model(x) - y).pow(2).mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()

    def hidden(self) -> None:
        """The call is not entered."""
        self.update(*self.collect())

    def open(self) -> None:
        """The call is entered."""
        x, y = self.collect()
        self.update(x, y)


@pytest.mark.parametrize("way", ["hidden", "open"])
def test_what_hides_the_training_is_said(way: str) -> None:
    fast = rose_compiler.compile(getattr(Trainer(), way), tune=False)
    for _ in range(2):
        fast()
    told = fast.explain()
    fast.close()
    assert ("not entered: the call passes `*` or `**`" in told) == (way == "hidden"), told
    assert "not tuned; late=shadow came to nothing" in told, "no simulator is stepped"
    assert ("opaque-call" in told) == (way == "hidden"), told
