from __future__ import annotations

from rose_compiler.base.decision import Decision
from rose_compiler.passes.base import PassContext
from rose_compiler.passes.late import LateWork
from rose_compiler.passes.tile_batch import TileBatch

CONTEXT = PassContext(
    options=Decision(groups=2, late="shadow"),
    shards={"envs": (3, 3, 3, 3)},
    asynchronous=frozenset({"envs"}),
)


def test_two_groups_of_two_shards(golden) -> None:
    golden("rollout", [TileBatch(), LateWork()], CONTEXT)
