"""Peak memory: what schedules add is known to the byte, and a limit is obeyed."""

from __future__ import annotations

import mmap
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rose_compiler
from rose_compiler.base.decision import Decision
from rose_compiler.runtime.memory import PROCESS, Peaks, TensorBytes, resident
from rose_compiler.sim import ShardedEnv
from rose_compiler.tune.memory import Piece, Stretch, added, peaks
from tests.api.loops import Drift, Training, iteration

pytestmark = pytest.mark.usefixtures("one_thread")
STEPS, ENVS, WIDE = 6, 8, 16


class Net(nn.Module):
    """An actor, and a critic that no step waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Linear(3, 3)
        self.critic = nn.Sequential(nn.Linear(3, WIDE), nn.Tanh(), nn.Linear(WIDE, 1))


class Notes:
    """What lies in tensors when the rollout is over."""

    def __init__(self) -> None:
        self.count: TensorBytes | None = None
        self.live: list[int] = []

    def look(self) -> None:
        """Note it."""
        if self.count is not None:
            self.live.append(self.count.now)


rose_compiler.declare(Notes.look, reads=[], writes=["self"])


def rollout(net: Any, envs: Any, values: Any, obs: Any, notes: Any) -> Any:
    for t in range(STEPS):
        with torch.no_grad():
            action = net.actor(obs)
            value = net.critic(obs)
        values[t] = value.squeeze(-1)
        stepped, _, _, _, _ = envs.step(action.numpy())
        obs = torch.as_tensor(stepped, dtype=torch.float32) + 0.0  # in memory of its own
    notes.look()
    return obs


def live_at_the_end(decision: Decision) -> tuple[int, tuple[Piece, ...]]:
    """Tensor bytes behind the rollout, and what the schedule was predicted to add."""
    torch.manual_seed(0)
    net, notes = Net(), Notes()
    envs = ShardedEnv.split([Drift] * ENVS, shards=2, hosts="thread")
    values = torch.zeros(STEPS, ENVS)
    obs = torch.as_tensor(envs.reset(seed=0)[0], dtype=torch.float32)
    fast = rose_compiler.compile(rollout, numerics="close", tune=False)
    unit = None
    try:
        obs = fast(net, envs, values, obs, notes)
        unit = fast._last.unit
        unit.tuning()._fixed = decision
        for _ in range(2):  # the second time, what the first one left is gone
            with TensorBytes() as count:
                notes.count = count
                obs = fast(net, envs, values, obs, notes)
                notes.count = None
        return notes.live[-1], added(unit.program, unit.build(decision).program)
    finally:
        fast.close()
        envs.close()


def test_what_is_kept_over_a_loop_is_known_to_the_byte() -> None:
    plain, nothing = live_at_the_end(Decision())
    assert nothing == ()
    deferred, pieces = live_at_the_end(Decision(defer=True))
    lasting = [p for p in pieces if not p.passing]
    assert deferred - plain == sum(p.bytes - p.arrays for p in lasting)
    sizes = {p.what.split(",")[0]: p.bytes for p in lasting}
    # observations of all trips once in a list, once joined; the values of all trips
    row = 4 * ENVS * 3
    assert sorted(sizes.values()) == sorted(
        [row * (STEPS - 1), row * STEPS, 4 * ENVS * (STEPS - 1)]
    )
    (inside,) = (p for p in pieces if p.passing)
    assert 4 * ENVS * STEPS * WIDE <= inside.bytes <= 2 * 4 * ENVS * STEPS * WIDE


def test_joined_parts_are_known_to_the_byte() -> None:
    plain, _ = live_at_the_end(Decision())
    tiled, pieces = live_at_the_end(Decision(groups=2))
    assert any("joined from its parts" in p.what for p in pieces)
    assert tiled - plain == sum(p.bytes - p.arrays for p in pieces)


def test_tensors_count_until_nothing_holds_them() -> None:
    weight = torch.ones(10, 10, requires_grad=True)
    with TensorBytes() as count:
        x = torch.ones(1000)
        view = x[:10]
        del x
        assert count.now == 4000, "a view holds all of it"
        del view
        assert (count.now, count.peak) == (0, 4000)
        h = (torch.ones(5, 10) @ weight).tanh()
        loss = h.sum()
        del h
        assert count.now == 5 * 10 * 4 * 2 + 4, "the graph holds what backward needs"
        loss.backward()
        del loss
        assert count.now == 400, "the gradient is left"


def test_the_peak_is_where_most_comes_together() -> None:
    stretches = (
        Stretch(("roll",), {PROCESS: 100, "cuda:0": 10}),
        Stretch(("gae", "norm"), {PROCESS: 150, "cuda:0": 10}),
        Stretch(("update",), {PROCESS: 140, "cuda:0": 40}),
    )
    order = ["roll", "joined", "batched", "gae", "norm", "update"]
    assert peaks(stretches, (), order) == {PROCESS: 150, "cuda:0": 40}
    kept = Piece("kept", 30, "roll")
    assert peaks(stretches, (kept,), order)[PROCESS] == 180
    # what is made behind the loop, before anything that was measured, counts to the loop
    brief = Piece("inside", 90, "batched", passing=True)
    assert peaks(stretches, (kept, brief), order)[PROCESS] == 220
    late = Piece("late", 60, "update")
    assert peaks(stretches, (late,), order)[PROCESS] == 200
    on_device = Piece("there", 5, "roll", place="cuda:0")
    assert peaks(stretches, (on_device,), order) == {PROCESS: 150, "cuda:0": 45}


@pytest.mark.skipif(resident() == (0, 0), reason="nothing tells what is resident")
def test_the_process_peak_is_seen_though_it_is_over() -> None:
    peak = Peaks()
    peak.begin()
    # mapped by itself: a tensor may get what the allocator has left over, resident already
    block = mmap.mmap(-1, 128_000_000)
    for page in range(0, len(block), mmap.PAGESIZE):
        block[page] = 1
    block.close()
    with_it, without = peak.take()[PROCESS], peak.take()[PROCESS]
    assert with_it - without > 100_000_000


def small(training: Training, **options: Any) -> Any:
    return rose_compiler.compile(iteration, numerics="bitwise", **options)


def test_schedules_above_the_limit_are_no_candidates(training: Training) -> None:
    fast = small(training, memory_limit="1MiB")
    training.run(fast, 2)
    fast._last.unit.tuning()._chooser.trial_s = 0.0
    with pytest.warns(UserWarning, match="as written peaks at .* above memory_limit=1 MiB") as told:
        training.run(fast, 1)
    assert Path(told[0].filename).name == "loops.py", "where the call stands"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(60):  # it is said once
            if not fast.settled:
                training.run(fast)
    assert fast.settled
    tuning = fast._last.unit.tuning()
    assert tuning.chosen in (None, tuning._plain)  # which takes what program order takes
    left_out = [r for r in fast._log.missed() if r.code == "memory-limit"]
    twins = [r for r in fast._log.missed() if "comes out as the same code" in r.why]
    assert left_out, "what is not tried for another reason says nothing about memory"
    assert len(left_out) + len(twins) == len(tuning._chooser.candidates) - 2
    for remark in left_out:
        assert "MiB above program order" in remark.why or "B above program order" in remark.why
        assert "1 MiB are allowed" in remark.why
        assert remark.allow is not None
        assert remark.allow.startswith("memory_limit=")
    assert "memory_limit: 1 MiB" in fast.explain("memory")
    fast.close()


def test_a_limit_with_room_leaves_nothing_out(training: Training) -> None:
    fast = small(training, memory_limit="1TiB")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        training.run(fast, 4)
    assert not [r for r in fast._log.missed() if r.code == "memory-limit"]
    fast.close()


def test_the_default_schedule_gives_way_too(training: Training) -> None:
    fast = small(training, memory_limit=1, tune=False)
    with pytest.warns(UserWarning, match="memory_limit=1 B"):
        training.run(fast, 4)
    assert fast.decision == Decision()
    assert fast._last.unit.last.decision == Decision()
    fast.close()


def test_what_is_known_of_memory_is_told(training: Training, tmp_path: Path) -> None:
    fast = small(training, tune=False)
    training.run(fast, 4)
    text = fast.explain("memory", width=120)
    assert "resident memory of the process" in text
    assert "groups=2 late=shadow" in text
    assert "merged from its shards' results (" in text
    rows = [line for line in text.splitlines() if "late=shadow" in line and "│" in line]
    assert rows
    ratio = float(rows[0].split("│")[-2])
    assert 0.5 < ratio < 2.0
    fast.report(tmp_path / "page.html")
    assert "resident memory" in (tmp_path / "page.html").read_text(encoding="utf-8")
    fast.close()
