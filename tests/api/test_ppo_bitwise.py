"""PPO on HalfCheetah, compiled against eager: every bit that training leaves behind."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch

import rose_compiler
from rose_compiler.api.wrappers import batching
from rose_compiler.base.decision import Decision
from rose_compiler.runtime.support import Runtime
from rose_compiler.sim import ShardedEnv
from rose_compiler.sim.batched import Stack
from tests.api.points import cheetah
from tests.samples.ppo import Setup, differences, iteration, state_of

CALLS = 5
REWRITES = {"hoist", "scan", "split", "tile_batch", "late"}


def wrapped_cheetah():  # type: ignore[no-untyped-def]
    env = gym.wrappers.ClipAction(cheetah())
    env = gym.wrappers.NormalizeObservation(env)
    env = gym.wrappers.TransformObservation(
        env, lambda obs: np.clip(obs, -10, 10), env.observation_space
    )
    return gym.wrappers.NormalizeReward(env)


def gymnasium_envs(count: int, shards: int, hosts: str):  # type: ignore[no-untyped-def]
    return lambda: ShardedEnv.split([cheetah] * count, shards=shards, hosts=hosts)


def run_eager(make, **options):  # type: ignore[no-untyped-def]
    setup = Setup(make, **options)
    setup.run(iteration, CALLS)
    return setup


def run_compiled(make, tmp_path, decision, **options):  # type: ignore[no-untyped-def]
    setup = Setup(make, **options)
    path = tmp_path / "decision.json"
    decision.save(path)
    compiled = rose_compiler.compile(iteration, numerics="bitwise", tune=path)
    compiled._runtime = Runtime(trace=True, batching=batching)
    setup.run(compiled, CALLS)
    return setup, compiled


def applied(compiled) -> set[str]:  # type: ignore[no-untyped-def]
    unit = compiled._last.unit
    return {r.pass_name for r in unit.build(unit.tuning().best).history.remarks.applied()}


def overlapped(compiled) -> bool:  # type: ignore[no-untyped-def]
    timeline = compiled.runtime.timeline
    lanes = timeline.lanes()
    return any(timeline.overlap_s(a, b) > 0 for a in lanes for b in lanes if a < b)


def check_equal(eager: Setup, compiled: Setup, eager_state: dict, probe: int) -> None:
    assert differences(eager_state, state_of(compiled)) == []
    assert eager.stats == compiled.stats
    assert eager.log == compiled.log
    assert len(eager.log) > 0, "no episode ended: the info path was not tested"
    for a, b in zip(eager.probe(probe), compiled.probe(probe), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("hosts", ["thread", "process"])
def test_gymnasium_in_shards(hosts, tmp_path) -> None:  # type: ignore[no-untyped-def]
    make = gymnasium_envs(32, 4, hosts)
    eager = run_eager(make)
    state = {k: v.clone() for k, v in state_of(eager).items()}
    setup, compiled = run_compiled(make, tmp_path, Decision(groups=4, late="shadow"))
    try:
        check_equal(eager, setup, state, 20)
        assert applied(compiled) >= REWRITES, compiled.explain()
        assert overlapped(compiled)
    finally:
        compiled.close()
        eager.close()
        setup.close()


@pytest.mark.parametrize("shards", [0, 2])
def test_wrappers_that_advance_at_once(shards, tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    def make():  # type: ignore[no-untyped-def]
        if not shards:
            return gym.vector.SyncVectorEnv([wrapped_cheetah] * 32)
        return ShardedEnv.split([wrapped_cheetah] * 32, shards=shards, hosts="thread")

    steps: list[int] = []
    at_once = Stack.step
    monkeypatch.setattr(Stack, "step", lambda *a: (steps.append(len(a[0].inner)), at_once(*a))[1])
    eager = run_eager(make)
    assert steps == []
    state = {k: v.clone() for k, v in state_of(eager).items()}
    decision = Decision(groups=2, late="shadow", wrappers=True)
    setup, compiled = run_compiled(make, tmp_path, decision)
    try:
        taken = len(steps)
        assert steps.count(32 // max(1, shards)) > 20  # the rest were made up
        check_equal(eager, setup, state, 20)
        assert len(steps) == taken, "wrappers went on at once behind the compiled function"
        rewrites = REWRITES if shards else REWRITES - {"tile_batch", "late", "hoist"}
        assert applied(compiled) >= rewrites | {"batch_wrappers"}, compiled.explain()
        for name in ("obs_rms", "return_rms"):
            pairs = zip(eager.envs.get_attr(name), setup.envs.get_attr(name), strict=True)
            assert all(np.array_equal(a.var, b.var) for a, b in pairs)
    finally:
        compiled.close()
        eager.close()
        setup.close()


def test_envpool_in_shards(tmp_path) -> None:  # type: ignore[no-untyped-def]
    def make():  # type: ignore[no-untyped-def]
        return ShardedEnv.envpool("HalfCheetah-v5", num_envs=32, shards=4, max_episode_steps=40)

    eager = run_eager(make)
    state = {k: v.clone() for k, v in state_of(eager).items()}
    setup, compiled = run_compiled(make, tmp_path, Decision(groups=4, late="shadow"))
    try:
        assert differences(state, state_of(setup)) == []
        assert eager.stats == setup.stats
        for a, b in zip(eager.probe(50), setup.probe(50), strict=True):
            np.testing.assert_array_equal(a, b)
        assert applied(compiled) >= REWRITES, compiled.explain()
        assert overlapped(compiled)
    finally:
        compiled.close()
        eager.close()
        setup.close()


def differing(hidden: int) -> int:
    """Rows that in 4 parts have other products in bits than as a whole; machines differ."""
    layer = torch.nn.Linear(hidden, hidden)
    for rows in (8, 16, 32):
        x = torch.randn(rows, hidden)
        with torch.no_grad():
            if not torch.equal(layer(x), torch.cat([layer(part) for part in x.chunk(4)])):
                return rows
    pytest.skip("products of some rows have the bits of those of all, on this machine")


def test_products_that_differ_in_bits_run_whole(tmp_path) -> None:  # type: ignore[no-untyped-def]
    make = gymnasium_envs(differing(256), 4, "thread")
    eager = run_eager(make, hidden=256)
    state = {k: v.clone() for k, v in state_of(eager).items()}
    setup, compiled = run_compiled(make, tmp_path, Decision(groups=4, late="shadow"), hidden=256)
    try:
        check_equal(eager, setup, state, 20)
        remarks = compiled._last.unit.build(compiled.decision).history.remarks
        assert any(r.code == "probe-bits-differ" for r in remarks.missed()), compiled.explain()
        # the whole batch steps on a lane of its own, beside the coordinator's late work
        assert compiled.runtime.timeline.lanes() == ("shard:envs",)
    finally:
        compiled.close()
        eager.close()
        setup.close()


def test_serial_run_has_the_same_bits(tmp_path) -> None:  # type: ignore[no-untyped-def]
    make = gymnasium_envs(16, 2, "thread")
    with rose_compiler.knobs(serial=True):
        first, _ = _serial(make, tmp_path)
    second, _ = _serial(make, tmp_path)
    assert differences(first, second) == []


def _serial(make, tmp_path):  # type: ignore[no-untyped-def]
    setup = Setup(make)
    path = tmp_path / "decision.json"
    Decision(groups=2, late="shadow").save(path)
    compiled = rose_compiler.compile(iteration, tune=path)
    setup.run(compiled, 3)
    state = {k: v.clone() for k, v in state_of(setup).items()}
    compiled.close()
    setup.close()
    return state, torch.get_num_threads()
