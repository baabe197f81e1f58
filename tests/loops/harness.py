"""Runs a training script as written and compiled, and compares every bit of what they leave."""

from __future__ import annotations

import contextlib
import io
import random
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.utils import seeding

import rose_compiler
from rose_compiler.api import Compiled
from rose_compiler.base.decision import Decision
from rose_compiler.runtime.support import Runtime
from rose_compiler.sim import ShardedEnv
from tests.loops.bits import bits, differing, generators

#: Two shards advance apart, work that no step waits for lies behind steps, values are collected.
SHARDED = Decision(groups=2, late="shadow", defer=True)
#: The same for a simulator in one piece, which steps on a thread.
THREADED = Decision(late="shadow", defer=True, lanes="thread")
ITERATIONS = 4

Vectorize = Callable[[Sequence[Callable[[], gym.Env]]], Any]


@dataclass(frozen=True)
class Script:
    """A training script: ``run(compile, vectorize)`` builds all it needs from fixed seeds, compiles
    what its author would compile, trains for four iterations and returns all that it owns.

    ``sharded``: its simulator comes from ``vectorize``, so it may be one made of shards.
    ``applied``: passes that have to rewrite it when its simulator is made of shards.
    ``recaptures``: how often what it changes between calls makes the function be captured anew.
    ``fault``, ``sharded_fault``: what is wrong with it compiled, or compiled in shards, for a
    script that does not run right yet.
    """

    name: str
    run: Callable[[Any, Vectorize], Any]
    sharded: bool = False
    applied: tuple[str, ...] = ()
    recaptures: int = 0
    fault: str = ""
    sharded_fault: str = ""


@dataclass
class Trained:
    """What one run left: the bits, and the functions that it compiled."""

    bits: dict[str, Any]
    compiled: list[Compiled] = field(default_factory=list)


def sync(env_fns: Sequence[Callable[[], gym.Env]]) -> Any:
    """gymnasium's own vector environment, in one piece."""
    return gym.vector.SyncVectorEnv(list(env_fns))


def in_shards(env_fns: Sequence[Callable[[], gym.Env]]) -> Any:
    """The same environments as two shards, each on a thread of its own."""
    return ShardedEnv.split(list(env_fns), shards=2, hosts="thread")


def eager(script: Script, vectorize: Vectorize = sync) -> Trained:
    """The script as its author runs it."""
    return train(script, lambda fn: fn, vectorize, [])


@contextlib.contextmanager
def compiled(script: Script, decision: Decision | None = None) -> Iterator[Trained]:
    """The script with everything compiled, bit for bit; ``decision`` fixes the schedule, and then
    the simulator is made of shards."""
    functions: list[Compiled] = []
    with tempfile.TemporaryDirectory() as folder:
        tune: Any = False
        if decision is not None:
            tune = Path(folder) / "decision.json"
            decision.save(tune)

        def compile(fn: Any) -> Compiled:
            made = rose_compiler.compile(fn, numerics="bitwise", tune=tune)
            made._runtime = Runtime(trace=True)
            functions.append(made)
            return made

        vectorize = sync if decision is None else in_shards
        try:
            yield train(script, compile, vectorize, functions)
        finally:
            for one in functions:
                one.close()


def train(
    script: Script, compile: Callable[[Any], Any], vectorize: Vectorize, functions: list[Compiled]
) -> Trained:
    """A run of the script with this ``compile``, which notes in ``functions`` what it made."""
    made: list[Any] = []

    def remember(env_fns: Sequence[Callable[[], gym.Env]]) -> Any:
        made.append(vectorize(env_fns))
        return made[-1]

    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002 (scripts may draw from the global one)
    random.seed(0)
    try:
        with (
            contextlib.redirect_stdout(io.StringIO()) as printed,
            warnings.catch_warnings(),
            seeded_spaces(),
        ):
            warnings.simplefilter("ignore")
            owned = script.run(compile, remember)
            left = bits({"owned": owned, "process": generators(), "printed": _lines(printed)})
        return Trained(left, functions)
    finally:
        for envs in made:
            envs.close()


@contextlib.contextmanager
def seeded_spaces() -> Iterator[None]:
    """Spaces and environments that nobody seeds take their numbers from the operating system; two
    runs can be compared only if those are the same."""
    np_random = seeding.np_random
    with mock.patch.object(
        seeding, "np_random", lambda seed=None: np_random(0 if seed is None else seed)
    ):
        yield


def _lines(printed: io.StringIO) -> list[str]:
    return [line for line in printed.getvalue().splitlines() if "SPS" not in line]


def check(script: Script, decision: Decision | None = None) -> None:
    """Assert that a script trains the same way compiled, and that a schedule really ran.

    Raises:
        AssertionError: naming what differs.
    """
    plain = eager(script, sync if decision is None else in_shards)
    assert plain.bits, "the script returns nothing to compare"
    with compiled(script, decision) as trained:
        found = differing(plain.bits, trained.bits)
        assert not found, "\n".join(found)
        assert trained.compiled
        for function in trained.compiled:
            assert_scheduled(function, script.recaptures)
        if decision is not None:
            done = set().union(*(applied(f) for f in trained.compiled))
            refused = any("[probe-bits-differ]" in f.explain() for f in trained.compiled)
            if refused and not set(script.applied) <= done:
                pytest.skip("products of so few rows have other bits than all, on this machine")
            assert set(script.applied) <= done, trained.compiled[0].explain()
            if "tile_batch" in script.applied:
                assert any(overlapped(f) for f in trained.compiled)


def assert_scheduled(function: Compiled, recaptures: int) -> None:
    """A function that is captured anew on every call would equal eager without any schedule."""
    assert function._last is not None
    assert function._last.unit.last is not None, "no iteration ran a schedule"
    assert len(function._recaptures) == recaptures, function._recaptures


def applied(function: Compiled) -> set[str]:
    """The passes that rewrote the schedule in force."""
    return {r.pass_name for r in function._schedule().history.remarks.applied()}


def overlapped(function: Compiled) -> bool:
    """Whether two lanes worked at the same time."""
    timeline = function.runtime.timeline
    lanes = timeline.lanes()
    return any(timeline.overlap_s(a, b) > 0 for a in lanes for b in lanes if a < b)
