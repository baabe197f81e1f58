"""A shard whose process dies goes on in a new one, its episodes cut off: a declared loss."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from sim_envs import Batch, Faulty, Mortal, Walk

from rose_compiler.base.errors import ConfigError, HostDied
from rose_compiler.sim import ShardedEnv, losses
from rose_compiler.sim.body import BodyFactory
from rose_compiler.sim.shared_body import SharedBody


def actions(step: int) -> np.ndarray:
    return np.random.default_rng(step).uniform(-1, 1, (2, 2)).astype(np.float32)


def test_episodes_are_cut_off_and_begun_anew(tmp_path: Path) -> None:
    file = tmp_path / "fault"
    file.touch()
    fns = [partial(Walk, 0), partial(Mortal, 1, "kill", 3, str(file))]
    env = ShardedEnv.split(fns, shards=2, hosts="process", recover="truncate")
    same = ShardedEnv.split([Walk] * 2, shards=2)
    env.reset(seed=8)
    same.reset(seed=8)
    for step in range(2):
        before = env.step(actions(step))[0]
        assert np.array_equal(before, same.step(actions(step))[0])
    with pytest.warns(RuntimeWarning, match="environments 1 to 1 were cut off"):
        obs, reward, terminated, truncated, infos = env.step(actions(2))
    expected = same.step(actions(2))
    assert np.array_equal(obs, np.stack([expected[0][0], before[1]]))
    assert reward.tolist() == [expected[1][0], 0.0]
    assert (terminated[1], truncated[1]) == (False, True)
    assert [infos[key].tolist() for key in ("rose_lost", "_rose_lost")] == [[False, True]] * 2
    alone = Walk(1)
    alone.reset(seed=int(np.random.SeedSequence((8 + 1, 1)).generate_state(1)[0]))
    begun = env.step(actions(3))
    assert np.array_equal(begun[0][1], alone.reset()[0])
    assert not begun[3][1]
    assert np.array_equal(env.step(actions(4))[0][1], alone.step(actions(4)[1])[0])
    assert [remark.code for remark in env.rose_remarks] == ["lost"]
    env.close()
    same.close()


def test_between_steps_the_next_one_tells_and_too_many_ends_are_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(losses, "LIVES", 1)
    env = ShardedEnv.split(
        [partial(Faulty, "none", 0), partial(Faulty, "kill", 1)],
        shards=2,
        hosts="process",
        autoreset_mode=AutoresetMode.DISABLED,
        recover="truncate",
    )
    env.reset(seed=0)
    env.step(actions(0))
    env.set_attr("limit", [7, 9])
    os.kill(env.shards()[1].host.pid, signal.SIGKILL)  # type: ignore[attr-defined]
    with pytest.warns(RuntimeWarning, match="cut off"):
        assert env.get_attr("limit") == (7, 9)
    assert env.step(actions(1))[3].tolist() == [False, True]
    env.reset(options={"reset_mask": np.array([False, True])})
    for step in range(2):
        assert not env.step(actions(step))[3].any()
    with pytest.raises(HostDied) as caught:
        env.step(actions(4))
    assert "ended 2 times in 1000 steps" in " ".join(caught.value.__notes__)
    env.close()


def test_what_has_no_such_end_is_refused() -> None:
    mode = AutoresetMode.SAME_STEP
    with pytest.raises(ConfigError, match="its last observation, which is lost") as caught:
        ShardedEnv([[Walk]], hosts="process", recover="truncate", autoreset_mode=mode)
    assert caught.value.code == "sim-recover"
    why = SharedBody(BodyFactory(partial(Batch, 2), mode)()).why_not_anew()
    assert why == "Batch begins its environments' episodes by its own code"
    with pytest.raises(ConfigError, match="recover='yes'"):
        ShardedEnv([Walk], hosts="process", recover="yes")  # type: ignore[arg-type]
