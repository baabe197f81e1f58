"""What several tests of the public interface share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.api.loops import Training


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch with a single thread, and what it had afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def training() -> Iterator[Training]:
    """A small PPO training on a sharded simulator."""
    made = Training()
    yield made
    made.close()
