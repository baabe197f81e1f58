"""What several tests of the public interface share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.api.loops import Training


@pytest.fixture
def training() -> Iterator[Training]:
    """A small PPO training on a sharded simulator."""
    made = Training()
    yield made
    made.close()
