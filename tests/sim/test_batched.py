"""Wrappers that advance all environments of a shard at once, against gymnasium one by one."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium import wrappers as w
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from sim_envs import Walk
from sim_equal import assert_same, assert_same_run
from wrapped_envs import CALLS, Path, statistics, wrapped

from rose_compiler.sim import ShardedEnv, batched_check, batched_levels, batching
from rose_compiler.sim.shard_vector import ShardVector

N = 12
STACK = (
    "TransformReward",
    "NormalizeReward",
    "TransformObservation",
    "NormalizeObservation",
    "ClipAction",
)


@pytest.fixture(autouse=True)
def however_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits are looked at here, not times."""
    monkeypatch.setattr(batched_check, "WORTH", np.inf)


def actions(t: int) -> np.ndarray:
    return np.random.default_rng(t).normal(0, 1.5, (N, 2)).astype(np.float32)


def both(*factories: Any, mode: AutoresetMode = AutoresetMode.NEXT_STEP) -> tuple[Any, Any]:
    """Environments that advance at once, and gymnasium's."""
    ours = ShardVector(list(factories), mode)
    ours.at_once = True
    return ours, SyncVectorEnv(list(factories), autoreset_mode=mode)


def batchable(env: ShardVector) -> Any:
    return env.together.batchable(env)


def vector(**settings: Any) -> tuple[Any, Any]:
    return both(*(partial(wrapped, i, 9 + i, **settings) for i in range(N)))


def compare(ours: Any, theirs: Any, steps: int = 60) -> int:
    ended = 0
    for t in range(steps):
        left, right = ours.step(actions(t)), theirs.step(actions(t))
        assert_same(left[:4], right[:4], f"step {t}")
        ended += int(np.sum(left[2] | left[3]))
    assert_same(statistics(ours.envs), statistics(theirs.envs))
    return ended


def test_all_results_and_what_wrappers_remember_have_gymnasiums_bits() -> None:
    ours, theirs = vector()
    assert batchable(ours)[:2] == (STACK, "")
    assert_same(ours.reset(seed=3)[0], theirs.reset(seed=3)[0])
    assert compare(ours, theirs) > 20
    assert type(ours.envs[0].env.return_rms.mean) is type(theirs.envs[0].env.return_rms.mean)


def test_steps_are_taken_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = vector()
    ours.reset(seed=3)
    theirs.reset(seed=3)
    compare(ours, theirs, 2)
    calls: list[int] = []
    update = batched_levels._Statistics.update
    monkeypatch.setattr(
        batched_levels._Statistics, "update", lambda s, x: (calls.append(len(x)), update(s, x))
    )
    compare(ours, theirs, 5)
    assert set(calls) == {N}  # a step in which an episode begins is taken one by one
    assert len(calls) >= 4


def test_switched_on_and_off_between_steps() -> None:
    ours, theirs = vector()
    ours.reset(seed=3)
    theirs.reset(seed=3)
    for part in range(8):
        ours.at_once = part % 2 == 0
        compare(ours, theirs, 5)


@pytest.mark.parametrize("kind", [np.float64, np.float32, int, lambda r: np.array(r)])
def test_rewards_of_any_type(kind: Any) -> None:
    ours, theirs = vector(reward=kind)
    ours.reset(seed=3)
    theirs.reset(seed=3)
    compare(ours, theirs, 30)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize(
    "odd", [np.array([np.inf, np.nan, -0.0]), np.ones(3, np.float32), np.ones((3, 1))[:, 0]]
)
def test_odd_observations(odd: np.ndarray) -> None:
    ours, theirs = vector()
    for env in (ours.envs[2], theirs.envs[2]):
        env.unwrapped.odd[4] = odd
    ours.reset(seed=3)
    theirs.reset(seed=3)
    compare(ours, theirs, 20)


def test_an_environment_that_raises_leaves_those_before_it_as_gymnasium_does() -> None:
    ours, theirs = vector()
    for env in (ours.envs[5], theirs.envs[5]):
        env.unwrapped.odd[4] = ValueError("no")
    ours.reset(seed=3)
    theirs.reset(seed=3)
    compare(ours, theirs, 3)
    for env in (ours, theirs):
        with pytest.raises(ValueError, match="no"):
            env.step(actions(3))
    assert_same(statistics(ours.envs), statistics(theirs.envs))
    for name in ("_env_obs", "_rewards", "_terminations", "_truncations"):
        assert_same(getattr(ours, name)[:5], getattr(theirs, name)[:5], name)


def test_settings_that_change_between_steps_take_effect() -> None:
    ours, theirs = vector()
    ours.reset(seed=3)
    theirs.reset(seed=3)
    compare(ours, theirs, 3)
    for name, values in (
        ("update_running_mean", False),
        ("epsilon", [1e-3] * N),
        ("gamma", [0.5 + 0.01 * i for i in range(N)]),
        ("update_running_mean", True),
    ):
        ours.set_attr(name, values)
        theirs.set_attr(name, values)
        compare(ours, theirs, 4)
    assert batchable(ours)[0] == STACK[:1]  # rewards are not discounted alike any more


@pytest.mark.parametrize("hosts", ["inline", "thread", "process"])
def test_in_every_kind_of_host(hosts: Any) -> None:
    factories = [partial(wrapped, i, 9 + i) for i in range(N)]
    theirs = SyncVectorEnv(factories)
    ours = ShardedEnv.split(factories, shards=3, hosts=hosts)
    try:
        ours.batch_wrappers(True)
        assert assert_same_run(ours, theirs, actions, 25) > 5
        ours.batch_wrappers(False)
        assert len(ours.batchable()) == 3
    finally:
        ours.close()


def sharing(env: Any) -> None:
    for one in env.envs:
        one.env.return_rms = env.envs[0].env.return_rms


def averaged(env: Any) -> None:
    each = [one.get_wrapper_attr("obs_rms") for one in env.envs]
    count = np.mean([rms.count for rms in each])
    for rms in each:
        rms.count = count


def exchanged(env: Any) -> None:
    env.envs[2] = wrapped(99, 11)
    env.envs[2].reset(seed=5)


def exchanged_inside(env: Any) -> None:
    below = env.envs[2].env
    below.env = wrapped(99, 11).env.env
    below.env.reset(seed=5)


def patched_later(env: Any) -> None:
    env.envs[2].reward = lambda reward: 0.25


def other_defaults(env: Any) -> None:
    env.envs[2].env.env.func.__defaults__ = (0.5,)


@pytest.mark.parametrize(
    "change", [sharing, averaged, exchanged, exchanged_inside, patched_later, other_defaults]
)
def test_what_becomes_of_wrappers_between_steps_is_seen(change: Any) -> None:
    ours, theirs = vector()
    if change is other_defaults:
        for one in (*ours.envs, *theirs.envs):
            one.env.env.func = lambda obs, by=2.0: obs * by
    ours.reset(seed=3)
    theirs.reset(seed=3)
    compare(ours, theirs, 4)
    change(ours)
    change(theirs)
    compare(ours, theirs, 12)


class Ends(Path):
    """Says in arrays of one element that it ends, and shares its buffer with all others."""

    buffer = np.zeros(3)

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, infos = super().step(action)
        self.buffer[:] = obs
        return self.buffer, reward, np.array([terminated]), truncated, infos


@pytest.mark.parametrize("wrap", [w.NormalizeObservation, lambda e: w.ClipReward(e, -0.4, 0.4)])
def test_odd_returns_are_taken_as_gymnasium_takes_them(wrap: Any) -> None:
    ours, theirs = both(*[lambda: wrap(Ends(0, 9))] * N)
    assert batchable(ours)[0]
    ours.reset(seed=3)
    theirs.reset(seed=3)
    compare(ours, theirs, 12)


class Anew(Path):
    """Makes its space of actions anew each time it is asked."""

    @property
    def action_space(self) -> Any:
        return spaces.Box(-1.0, 1.0, (2,), np.float32)

    @action_space.setter
    def action_space(self, value: Any) -> None:
        pass


def test_a_space_that_is_made_anew_is_no_other_space(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = both(*[lambda: w.ClipAction(Anew(0, 30))] * N)
    ours.reset(seed=3)
    theirs.reset(seed=3)
    found = ours.together._found(ours)
    assert found is not None
    compare(ours, theirs, 5)
    assert ours.together._stack is found


class Own(w.NormalizeObservation):
    """May do anything."""


def overwriting() -> Any:
    return w.TransformObservation(Path(0, 9), lambda obs: np.abs(obs, obs), None)


class OneMore(gymnasium.Wrapper):
    """Unknown to the package."""


def outside(wrap: Any) -> Any:
    return lambda: wrap(wrapped())


def patched() -> Any:
    env = wrapped()
    env.reward = lambda reward: reward
    return env


@pytest.mark.parametrize(
    ("factory", "names", "why"),
    [
        (Walk, (), "no wrapper stands around"),
        (outside(Own), (), "Own is no wrapper that can take a batch"),
        (outside(OneMore), (), "OneMore is no wrapper"),
        (patched, (), "a method of its own"),
        (outside(lambda e: w.TransformReward(e, CALLS.append)), (), "not known to be the same"),
        (
            lambda: w.TransformObservation(Path(0, 9), lambda o: np.abs(o, o), None),
            (),
            "writes into",
        ),
        (outside(lambda e: w.ClipReward(e, -1.0)), ("ClipReward", *STACK), ""),
        (lambda: w.NormalizeObservation(wrapped(0).env), ("NormalizeObservation", *STACK[1:]), ""),
    ],
)
def test_what_can_advance_at_once(factory: Any, names: tuple[str, ...], why: str) -> None:
    ours, theirs = both(*[factory] * N)
    found = batchable(ours)
    assert found[0] == names
    assert why in found[1]
    ours.reset(seed=1)
    theirs.reset(seed=1)
    for t in range(16):
        assert_same(ours.step(actions(t))[:4], theirs.step(actions(t))[:4])


def test_environments_in_different_wrappers_stay_apart() -> None:
    ours, _ = both(*[wrapped] * (N - 1), outside(OneMore))
    assert batchable(ours)[:2] == (
        (),
        "environments have different wrappers (TransformReward among them)",
    )
    same_step, _ = both(*[wrapped] * N, mode=AutoresetMode.SAME_STEP)
    assert "in the step that ends one" in batchable(same_step)[1]


def test_a_level_that_computes_otherwise_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: Any, x: np.ndarray) -> None:
        self.mean = self.mean + (x - self.mean) / (np.array(self.counts).mean() + 1)

    monkeypatch.setattr(batched_levels._Statistics, "update", wrong)
    ours, _ = vector()
    assert batchable(ours)[:2] == (
        (),
        "at once, they give other bits than by their own code",
    )


def test_made_up_steps_leave_the_environments_alone() -> None:
    ours, theirs = vector()
    ours.reset(seed=3)
    theirs.reset(seed=3)
    assert batchable(ours)[0] == STACK
    assert_same(statistics(ours.envs), statistics(theirs.envs))
    assert all(isinstance(e.unwrapped, Path) for e in ours.envs)


def test_a_closed_over_value_that_changes_is_seen() -> None:
    bound = 1.0

    def make() -> gymnasium.Env:
        return w.TransformReward(Path(0, 40), lambda r: np.clip(r, -bound, bound))

    ours, theirs = both(*[make] * N)
    ours.reset(seed=1)
    theirs.reset(seed=1)
    assert batchable(ours)[0] == ("TransformReward",)
    for value in (1.0, 0.5, 0.25):
        bound = value
        compare(ours, theirs, 3)


def test_a_plain_vector_environment_is_lent_the_same_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    factories = [partial(wrapped, i, 9 + i) for i in range(N)]
    ours, theirs = SyncVectorEnv(factories), SyncVectorEnv(factories)
    switch = batching(w.vector.RecordEpisodeStatistics(ours))
    assert switch.batchable()[0][:2] == (STACK, "")
    assert_same(ours.reset(seed=3), theirs.reset(seed=3))
    calls: list[int] = []
    update = batched_levels._Statistics.update
    monkeypatch.setattr(
        batched_levels._Statistics, "update", lambda s, x: (calls.append(len(x)), update(s, x))
    )
    for part in range(6):
        switch.batch_wrappers(part % 2 == 0)
        assert ("step" in vars(ours)) == (part % 2 == 0)
        calls.clear()
        kept = []
        for t in range(6):
            left, right = ours.step(actions(t)), theirs.step(actions(t))
            assert_same(left, right)
            kept.append((left[0], left[0].copy()))
        assert all(np.array_equal(obs, copy) for obs, copy in kept)  # handed out, not lent
        assert bool(calls) == (part % 2 == 0)
    assert_same(statistics(ours.envs), statistics(theirs.envs))
    ours.step = theirs.step
    assert "replaced" in switch.batchable()[0][1]


def test_a_vector_environment_that_was_lent_wrappers_is_freed() -> None:
    envs = SyncVectorEnv([wrapped] * 2)
    assert batching(envs).batchable()
    gone = weakref.ref(envs)
    del envs
    gc.collect()
    assert gone() is None


def test_other_simulators_are_left_alone() -> None:
    assert batching(Walk()) is None
    assert batching(object()) is None
