"""tile_batch: groups of shards advance apart, whole batches are joined, coupling is refused."""

from __future__ import annotations

from pathlib import Path

from rose_compiler.base.decision import Decision
from rose_compiler.passes.base import PassContext
from rose_compiler.passes.tile_batch import TileBatch

CONTEXT = PassContext(
    options=Decision(groups=2), shards={"envs": (3, 3, 3, 3)}, asynchronous=frozenset({"envs"})
)
TEXT = (Path(__file__).parent / "golden/tile_batch/rollout.in.txt").read_text()


def test_two_groups_of_two_shards(golden) -> None:
    golden("rollout", [TileBatch()], CONTEXT)
