"""Scripts called iteration by iteration, each call in a random order that the dependences allow: a
dependence that capture did not see shows as a bit that differs."""

from __future__ import annotations

import random
from typing import Any

import pytest

from rose_compiler.ir import interp
from rose_compiler.testing.capturing import FirstTrip, first_trip, shuffle, values_of
from tests.loops.bits import differing
from tests.loops.harness import Script, eager, in_shards, sync, train
from tests.loops.registry import SCRIPTS

#: Scripts that are one call leave nothing to shuffle.
_ONE_CALL = {
    "PPO, a script",
    "PPO, a runner of classes",
    "SAC",
    "imitation, evaluation every k",
    "GRPO with a reference model",
}


class Shuffled:
    """Captures at the first call, and runs every further one in another legal order."""

    def __init__(self, fn: Any, moved: list[int]) -> None:
        self.fn = fn
        self.moved = moved
        self.trip: FirstTrip | None = None
        self.random = random.Random(1)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.trip is None:
            self.trip = first_trip(self.fn, *args, **kwargs)
            return self.trip.result
        captured = self.trip.captured
        self.moved.append(shuffle(captured.program, self.random))
        return interp.run(captured.program, values_of(captured, args, kwargs))


@pytest.mark.parametrize(
    "script", [s for s in SCRIPTS if s.name not in _ONE_CALL], ids=lambda s: s.name
)
def test_any_legal_order_trains_the_same(script: Script) -> None:
    vectorize = in_shards if script.sharded else sync
    moved: list[int] = []
    plain = eager(script, vectorize)
    shuffled = train(script, lambda fn: Shuffled(fn, moved), vectorize, [])
    assert sum(moved) > 0
    found = differing(plain.bits, shuffled.bits)
    assert not found, "\n".join(found)
