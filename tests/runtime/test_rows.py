"""Batches of checking mode: joined only where they are parts of one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rose_compiler.runtime.rows import join


def test_parts_are_joined_entry_by_entry() -> None:
    parts = [
        {"a": torch.ones(2), "b": (np.zeros(2), 1)},
        {"b": (np.ones(1), 2), "a": torch.ones(1)},
    ]
    joined = join(parts)
    assert joined["a"].shape == (3,)
    assert joined["b"][0].tolist() == [0, 0, 1]
    assert joined["b"][1] == 1, "of what is no batch, the first"


@pytest.mark.parametrize(
    "other",
    [
        {"a": torch.ones(1)},
        {"a": torch.ones(1), "b": torch.ones(1), "c": torch.ones(1)},
        torch.ones(1),
        None,
    ],
)
def test_other_keys_are_no_part_of_the_batch(other: Any) -> None:
    """It gave the first part alone, so that the rows of the others were never compared."""
    with pytest.raises(ValueError, match="different keys"):
        join([{"a": torch.ones(2), "b": torch.ones(2)}, other])


@pytest.mark.parametrize("other", [(torch.ones(1),), None])
def test_a_tuple_of_another_length_is_no_part_of_it(other: Any) -> None:
    with pytest.raises(ValueError, match="different lengths"):
        join([(torch.ones(2), torch.ones(2)), other])
