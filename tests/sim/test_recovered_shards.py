"""A shard whose process dies or hangs goes on in a new one, with nothing lost."""

from __future__ import annotations

import os
import signal
import sys
import types
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from sim_envs import Batch, Faulty, Maze, Mortal, Napping, Walk, drawing, in_own_wrapper, limited
from sim_equal import assert_same

from rose_compiler.base.errors import ConfigError, HostDied, HostTimeout, RuntimeFault
from rose_compiler.runtime.hosts import tape
from rose_compiler.runtime.remote import ShardLane
from rose_compiler.sim import ShardedEnv, states
from rose_compiler.sim.process_shard import ProcessShard

ENVS = 3


def actions(step: int, count: int = ENVS) -> np.ndarray:
    return np.random.default_rng(step).uniform(-1, 1, (count, 2)).astype(np.float32)


def pids(env: ShardedEnv) -> list[int]:
    return [shard.host.pid for shard in env.shards() if isinstance(shard, ProcessShard)]


@pytest.mark.parametrize(
    ("how", "at", "share"), [("kill", 1, 1e-9), ("kill", 20, 1e9), ("hang", 9, 1e-9)]
)
def test_nothing_is_lost_with_a_process(
    how: str, at: int, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a state from long ago, and with one from before the step."""
    monkeypatch.setattr(tape, "SHARE", share)
    file = tmp_path / "fault"
    file.touch()
    fns = [partial(drawing, 0), partial(drawing, 1, how, at, str(file))]
    timeout = 3.0 if how == "hang" else None
    env = ShardedEnv.split(fns, shards=2, hosts="process", timeout=timeout, recover=True)
    same = ShardedEnv.split([partial(drawing, k) for k in range(2)], shards=2, hosts="process")
    before = pids(env)
    assert_same(env.reset(seed=5), same.reset(seed=5))
    for step in range(22):
        assert_same(env.step(actions(step, 2)), same.step(actions(step, 2)))
    assert not file.exists()
    assert pids(env)[1] != before[1]
    assert {remark.code for remark in env.rose_remarks} == {"revived"}
    assert any("shard 1" in remark.why for remark in env.rose_remarks)
    env.close()
    same.close()


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_every_way_of_beginning_episodes_anew(mode: AutoresetMode) -> None:
    fns = [partial(limited, k) for k in range(ENVS)]
    options: Any = {"shards": 2, "autoreset_mode": mode}
    env = ShardedEnv.split(fns, hosts="process", recover=True, **options)
    same = ShardedEnv.split(fns, **options)
    assert_same(env.reset(seed=1), same.reset(seed=1))
    for step in range(14):
        if step in (4, 5):
            os.kill(pids(env)[step % 2], signal.SIGKILL)
        found, expected = env.step(actions(step)), same.step(actions(step))
        assert_same(found, expected)
        done = found[2] | found[3]
        if mode is AutoresetMode.DISABLED and done.any():
            if 7 < step < 10:
                os.kill(pids(env)[0], signal.SIGKILL)
            again = [one.reset(options={"reset_mask": done.copy()}) for one in (env, same)]
            assert_same(*again)
    assert {remark.code for remark in env.rose_remarks} == {"revived"}
    env.close()


def test_calls_and_settings_are_repeated() -> None:
    fns = [partial(Mortal, k) for k in range(ENVS)]
    env = ShardedEnv.split(fns, shards=2, hosts="process", recover=True)
    same = ShardedEnv.split(fns, shards=2)
    for one in (env, same):
        one.reset(seed=0)
        one.step(actions(0))
        one.set_attr("limit", [3, 5, 7])
        assert one.call("shove", 0.5) == (0.5,) * 3
    for pid in pids(env):
        os.kill(pid, signal.SIGKILL)
    assert env.call("shove", 0.25) == same.call("shove", 0.25) == (0.75,) * 3
    for step in range(1, 9):
        assert_same(env.step(actions(step)), same.step(actions(step)))
    with pytest.raises(AttributeError):
        env.call("nothing of that name")
    os.kill(pids(env)[0], signal.SIGKILL)
    assert_same(env.step(actions(9)), same.step(actions(9)))
    env.close()


def test_what_an_environment_raises_is_what_the_user_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After steps with equal actions, none of which is mistaken for the one that raised."""
    monkeypatch.setattr(tape, "SHARE", 1e-9)
    (tmp_path / "fault").touch()
    fns = [partial(Mortal, k, "raise", 5, str(tmp_path / "fault"), True) for k in range(ENVS)]
    env = ShardedEnv.split(fns, shards=1, hosts="process", recover=True)
    env.reset(seed=0)
    for _ in range(4):
        env.step(actions(0))
    (shard,) = env.shards()
    kept, size = list(shard._tape.entries), shard._tape._size
    with pytest.raises(KeyError, match="the environment's own"):
        env.step(actions(0))
    assert len(kept) == len(shard._tape.entries)
    assert all(a is b for a, b in zip(kept, shard._tape.entries, strict=True))
    assert shard._tape._size == size
    env.close()


def test_arguments_that_only_travel_by_value_and_change_later_are_repeated() -> None:
    fns = [partial(Mortal, k) for k in range(ENVS)]
    env = ShardedEnv.split(fns, shards=1, hosts="process", recover=True)
    same = ShardedEnv.split(fns, shards=1)
    for one in (env, same):
        one.reset(seed=0, options={"of": lambda x: x})
        by = [0.5]
        assert one.call("apply", lambda x: 2 * x + 1, by) == (1.5,) * ENVS
        by[0] = 7.0
        one.set_attr("scale", lambda x: 3 * x)
    os.kill(pids(env)[0], signal.SIGKILL)
    assert env.call("scale", 2) == same.call("scale", 2) == (6,) * ENVS
    assert_same(env.step(actions(0)), same.step(actions(0)))
    assert {remark.code for remark in env.rose_remarks} == {"revived"}
    with pytest.raises(RuntimeFault, match="can't be pickled") as caught:
        env.set_attr("scale", [(x for x in "ab")] * ENVS)
    assert caught.value.code == "host-pickle"
    assert_same(env.step(actions(1)), same.step(actions(1)))
    env.close()


def test_a_step_that_could_not_begin_does_not_keep_states_from_being_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    env = ShardedEnv.split([partial(Mortal, 0)] * 2, shards=1, hosts="process", recover=True)
    (shard,) = env.shards()
    assert isinstance(shard, ProcessShard)
    with monkeypatch.context() as patched:
        patched.setattr(shard, "_step", _refused)
        with pytest.raises(ValueError, match="no such actions"):
            env.step(actions(0, 2))
    assert shard._tape is not None
    assert shard._tape.entries == []
    env.close()


def _refused(actions: Any) -> None:
    raise ValueError("no such actions")


def test_a_new_process_loads_torch_for_its_generator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process in which a step has loaded it is followed by one in which nobody has yet."""
    env = Keeper()
    loaded = types.ModuleType("torch")
    monkeypatch.setattr(loaded, "get_rng_state", lambda: "drawn thrice", raising=False)
    monkeypatch.setitem(sys.modules, "torch", loaded)
    state = states.take(env)
    monkeypatch.delitem(sys.modules, "torch")
    (tmp_path / "torch.py").write_text("def set_rng_state(state):\n    global now; now = state\n")
    monkeypatch.syspath_prepend(tmp_path)
    states.put(env, state)
    assert sys.modules["torch"].now == "drawn thrice"


class Keeper:
    """Has a state to hand over."""

    def get_state(self) -> int:
        return 1

    def set_state(self, state: int) -> None:
        pass


@pytest.mark.parametrize("settles", [False, True])
def test_a_lane_s_limit_begins_anew_with_a_process_that_takes_over(
    settles: bool, tmp_path: Path
) -> None:
    """The steps after the hung one take longer than reading an answer may."""
    (tmp_path / "fault").touch()
    fns = [partial(Napping, 0, "hang", 3, str(tmp_path / "fault"))]
    env = ShardedEnv.split(fns, shards=1, hosts="process", recover=True)
    env.reset(seed=0)
    (shard,) = env.shards()
    lane = ShardLane("shard:0", timeout=0.5)
    lane.step(0, shard, actions(0, 1)).wait()
    lane.step(0, shard, actions(1, 1)).wait()
    task = lane.step(0, shard, actions(2, 1))
    if settles:
        assert lane.settle(30.0)
        assert isinstance(task.error, HostTimeout)
        assert env.rose_remarks == []
    else:
        task.wait()
        assert {remark.code for remark in env.rose_remarks} == {"revived"}
    env.close()


def test_a_step_that_always_ends_its_process_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "fault").touch()
    fns = [partial(Mortal, k, "kill", 3, str(tmp_path / "fault"), True) for k in range(ENVS)]
    env = ShardedEnv.split(fns, shards=1, hosts="process", recover=True)
    env.reset(seed=0)
    env.step(actions(0))
    env.step(actions(1))
    with pytest.raises(HostDied, match="SIGKILL"):
        env.step(actions(2))
    assert len(env.rose_remarks) == tape.LIVES
    with pytest.raises(RuntimeFault, match="its simulator is lost"):
        env.step(actions(3))
    env.close()


def test_what_is_kept_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tape, "CALLS", 4)
    env = ShardedEnv.split(
        [partial(Mortal, k) for k in range(ENVS)], shards=1, hosts="process", recover=True
    )
    env.reset(seed=0)
    for step in range(12):
        env.step(actions(step))
        (shard,) = env.shards()
        assert len(shard._tape.entries) <= 4
    assert env.rose_remarks == []
    env.close()


def test_who_can_not_hand_over_a_state_is_refused() -> None:
    cases: list[tuple[Any, str]] = [
        ([Walk] * 2, "Walk has no get_state and set_state"),
        ([partial(in_own_wrapper, 0)], "Own has no get_state and set_state"),
        (partial(Batch, 2), "Batch has no get_state and set_state"),
    ]
    for shard, said in cases:
        with pytest.raises(ConfigError, match=said) as caught:
            ShardedEnv([shard], hosts="process", recover=True)
        assert caught.value.code == "sim-recover"
    with pytest.raises(ConfigError, match="only shards in processes"):
        ShardedEnv([Maze], hosts="thread", recover=True)


def test_without_it_the_error_names_what_is_lost() -> None:
    fns = [partial(Faulty, "none", 0), partial(Faulty, "kill", 1)]
    env = ShardedEnv.split(fns, shards=2, hosts="process")
    env.reset(seed=0)
    for step in range(2):
        env.step(actions(step, 2))
    with pytest.raises(HostDied) as caught:
        env.step(actions(2, 2))
    notes = " ".join(caught.value.__notes__)
    assert "environments 1 to 1 of the batch" in notes
    assert "the state of these environments was in that process and is lost" in notes
    assert "recover=True" in notes
    env.close()
