"""compiled.windows() and compiled.profile: what is profiled when, and that training stays as is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import rose_compiler
from rose_compiler.base.errors import ConfigError
from tests.api.loops import Training, differing, iteration


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def training() -> Iterator[Training]:
    made = Training()
    yield made
    made.close()


def test_a_given_schedule_is_profiled_from_its_second_iteration_on(training: Training) -> None:
    fast = rose_compiler.compile(iteration, tune=False, numerics="bitwise")
    training.run(fast, 2)
    with pytest.raises(ConfigError, match="no iteration was profiled"):
        fast.windows()
    training.run(fast, 6)
    profile = fast.profile
    assert len(profile.iteration_s) == 3
    steps = [o for o in profile.ops if o.label == "env_step"]
    assert {o.lane for o in steps} == {"shard:0", "shard:1"}
    assert [o.count for o in steps] == [12, 12]
    (update,) = (o for o in profile.ops if "optimizer.step()" in o.label)
    assert update.count == 3
    assert profile.timeline is not None
    assert {s.trip for s in profile.timeline.spans if s.op == steps[0].op} == {
        (0,), (1,), (2,), (3,)
    }  # fmt: skip
    fast.profile_next(2)
    training.run(fast, 3)
    assert len(fast.profile.iteration_s) == 5
    fast.close()


def test_profiled_iterations_train_the_same_bits(training: Training) -> None:
    fast = rose_compiler.compile(iteration, tune=False, numerics="bitwise")
    training.run(fast, 1)
    fast.profile_next(3)
    training.run(fast, 3)
    assert len(fast.profile.iteration_s) == 3
    plain = Training()
    plain.run(iteration, 4)
    assert differing(training.bits(), plain.bits()) == []
    plain.close()
    fast.close()


def test_program_order_is_profiled_before_anything_is_tried(training: Training) -> None:
    fast = rose_compiler.compile(iteration, numerics="bitwise")
    training.run(fast, 2)
    assert len(fast.profile.iteration_s) == 1
    assert {o.lane for o in fast.profile.ops} == {""}
    windows = fast.windows()
    assert windows.iteration_s == fast.profile.iteration_s[0]
    assert all(0.0 <= w.activity <= 1.0 and w.duration_s > 0 for w in windows)
    assert str(windows)
    fast.close()


def test_an_exception_of_a_profiled_iteration_is_the_user_s(training: Training) -> None:
    fast = rose_compiler.compile(iteration, tune=False, numerics="bitwise")
    training.run(fast, 3)

    def broken(*_: object, **__: object) -> None:
        raise KeyError("mine")

    fast.profile_next()
    training.optimizer.register_step_pre_hook(broken)
    with pytest.raises(KeyError, match="mine"):
        training.run(fast, 1)
    fast.close()
