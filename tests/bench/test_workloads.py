"""The workloads train, bitwise as written, whichever way they are run; their tables say so."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import rose_compiler
from bench.measure import Estimate
from bench.workloads import __main__ as command
from bench.workloads import report
from bench.workloads.adversarial import adversarial
from bench.workloads.base import Size, Training, Workload
from bench.workloads.forecast import Forecast, forecast
from bench.workloads.measuring import Row
from bench.workloads.raster import Raster
from bench.workloads.registry import workloads
from bench.workloads.scene import Table, prompt_of, task_of
from rose_compiler.base.decision import Decision

TINY = Size(tiny=True)
#: `ppo-a`, `ppo-b` and `ppo-d` are the function of `ppo-c` in other sizes, tested in test_loops.
NAMES = ("ppo-c", "grpo", "sac", "ppo-torch", "dppo", "ppo-random")
#: What is moved in each: a compiler that does nothing must not pass.
MOVES = {"ppo-torch": "scan"}


def trained(workload: Workload, fn: object = None, iterations: int = 2) -> Training:
    """A tiny training after some iterations."""
    training = workload.make(TINY)
    torch.manual_seed(3)
    try:
        for _ in range(iterations):
            training.run(fn)  # type: ignore[arg-type]
    finally:
        training.close()
    return training


def different(a: dict[str, object], b: dict[str, object]) -> list[str]:
    """Names of what differs in any bit."""
    assert a.keys() == b.keys()
    return [k for k in a if not np.array_equal(np.asarray(a[k]), np.asarray(b[k]), equal_nan=True)]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", NAMES)
def test_compiled_bitwise_equals_eager(name: str, tmp_path: Path) -> None:
    path = tmp_path / "decision.json"
    Decision(groups=2, late="shadow", lanes="thread").save(path)
    workload = workloads()[name]
    start = workload.make(TINY)
    start.close()
    eager = trained(workload)
    fn = rose_compiler.compile(eager.fn, tune=path, numerics="bitwise")
    compiled = trained(workload, fn)
    before, after = workload.state(eager), workload.state(compiled)
    assert not different(before, after)
    weights = [k for k in before if k.endswith(".weight")]
    assert weights
    moved = different(
        {k: workload.state(start)[k] for k in weights}, {k: before[k] for k in weights}
    )
    assert moved
    move = MOVES.get(name, "late")
    assert f"  {move} [" in fn.explain(width=200).split("Missed")[0]
    fn.close()


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", ["grpo", "sac", "dppo"])
def test_overlaps_by_hand_train_as_the_loop(name: str) -> None:
    workload = workloads()[name]
    eager = workload.state(trained(workload, iterations=1))
    overlap = next(iter(workload.overlapped().values()))
    by_hand = workload.state(trained(workload, overlap, iterations=1))
    assert eager.keys() == by_hand.keys()
    for key, value in eager.items():
        np.testing.assert_allclose(
            np.asarray(by_hand[key]), np.asarray(value), rtol=2e-3, atol=2e-4, err_msg=key
        )


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", NAMES)
def test_sequential_variants_are_the_loop(name: str) -> None:
    workload = workloads()[name]
    eager = workload.state(trained(workload, iterations=1))
    phased = workload.state(trained(workload, workload.sequential(1, 1), iterations=1))
    assert not different(eager, phased)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", list(adversarial()))
def test_the_adversarial_ones_train(name: str) -> None:
    workload = adversarial()[name]
    eager = trained(workload)
    fn = rose_compiler.compile(eager.fn, tune=False, numerics="bitwise")
    assert not different(workload.state(eager), workload.state(trained(workload, fn)))
    fn.close()


# -- the scene -------------------------------------------------------------------------------------


def test_one_seed_is_one_task_and_one_start() -> None:
    a, b = Table("raster"), Table("raster")
    first, _ = a.reset(seed=4)
    second, _ = b.reset(seed=4)
    assert np.array_equal(first["frame"], second["frame"])
    other, _ = b.reset(seed=5)
    assert task_of(4) != task_of(5)
    assert prompt_of(4) != prompt_of(5)
    assert not np.array_equal(first["frame"], other["frame"])


def test_frames_show_what_moves() -> None:
    table = Table("raster")
    before, _ = table.reset(seed=0)
    after, reward, terminated, truncated, _ = table.step(np.ones(12, np.float32))
    assert before["frame"].shape == (84, 84, 3)
    assert before["frame"].dtype == np.uint8
    assert (before["frame"] != after["frame"]).any()
    assert math.isfinite(reward)
    assert not terminated
    assert not truncated
    frame = Raster(table.model, 84)
    frame.update_scene(table.data)
    red = frame.render()[..., 0].astype(int) - frame.render()[..., 2]
    assert (red > 100).any()  # the red block and its mark


def test_a_block_on_its_mark_is_rewarded() -> None:
    table = Table("raster")
    table.reset(seed=0)
    table.data.joint("red y").qpos[0] = 0.15  # from 0.3 to the mark at 0.45
    table.data.joint("red x").qpos[0] = 0.0
    _, reward, *_ = table.step(np.zeros(12, np.float32))
    assert reward > 1.0


# -- the tables ------------------------------------------------------------------------------------


def made_up(close: float, name: str = "grpo", bound: float = 1.0, **more: float) -> Row:
    times = {"E0": 3.0, "E1": 2.0, "work": 1.8, "close": close, "bitwise": close} | more
    scores = {k: [v] * 5 for k, v in times.items()}
    about = Estimate(1.8, 1.7, 1.9)
    return Row(
        name,
        "",
        scores,
        [bound] * 5,
        about,
        0.5,
        Forecast(close, close),
        {"close": 9.0},
        {},
        {"C": "no g++"},
    )


def test_goals_held_and_missed() -> None:
    held = report.goals([made_up(1.25, H=1.3), made_up(1.3, H=1.4)])
    assert len(held) == 5
    assert all(line.startswith("- held") for line in held)
    missed = report.goals([made_up(2.1, H=1.4)])
    assert [line.split(":")[0] for line in missed] == ["- missed"] * 4 + ["- held"]
    assert "E1 / close 0.95" in missed[1]
    assert "H / close 0.67" in missed[2]


def test_a_prediction_that_is_off_is_a_goal_missed() -> None:
    row = made_up(1.25)
    row.forecast = Forecast(1.5, 1.25)
    assert report.goals([row])[-1] == "- missed: predicted within 10% of measured (grpo 1.20)"
    row.forecast = None  # the user's own statements run
    assert report.goals([row])[-1].startswith("- held")
    assert " | - | 9, - |" in report.times([row])


class _Compiled:
    """A compiled function that predicts 6 of the 10 seconds of one piece of an iteration."""

    def __init__(self, profiles: bool = True, slow_from: float = float("inf")) -> None:
        self.profiles, self.asked, self.slow_from, self.steps = profiles, False, slow_from, 0
        self.seconds: list[float] = []
        self.cost = SimpleNamespace(prediction=SimpleNamespace(seconds=6.0), measured_s=10.0)
        self.now = 0.0

    @property
    def profile(self) -> object:  # a new one each time, as of the compiler
        return SimpleNamespace(iteration_s=tuple(self.seconds))

    def profile_next(self) -> None:
        self.asked = True

    def step(self) -> None:
        seconds = 50.0 if self.asked and self.profiles else 40.0
        self.now += seconds if self.steps < self.slow_from else 2 * seconds
        self.steps += 1
        if self.asked and self.profiles:
            self.seconds.append(10.0)
        self.asked = False


def test_a_forecast_is_of_whole_iterations_beside_those_that_were_profiled() -> None:
    function = _Compiled()
    made = forecast(function, function.step, 3, lambda: function.now)
    assert made == Forecast(30.0, 40.0, (0.75, 0.75, 0.75))
    assert made.error == 0.75
    slower = _Compiled(slow_from=8)  # a machine at half of its speed for the second half
    made = forecast(slower, slower.step, 7, lambda: slower.now)
    assert made is not None
    assert (made.predicted, made.measured, made.error) == (30.0, 60.0, 0.75)
    eager = _Compiled(profiles=False)
    assert forecast(eager, eager.step, 3, lambda: eager.now) is None


def test_the_geometric_mean() -> None:
    mean = report.geometric_mean([made_up(1.0), made_up(3.0)])
    assert mean is not None
    assert mean.median == pytest.approx(math.sqrt(3.0))


def test_tables_are_markdown_and_say_what_is_absent() -> None:
    row = made_up(1.25, bound=1.9)
    times = report.times([row]).splitlines()
    shown = "3000 | 2000 | - | - | 1250 | 1250 | 1900 | 1250 of 1250 (1.00) | 9, -"
    assert times[2] == f"| grpo | {shown} |"
    assert "no room" in report.ratios([row])
    assert "no C: no g++" in report.details(row)


def test_an_unknown_workload_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--only", "ppo-z"])
    assert "no workload 'ppo-z'" in capsys.readouterr().err


def test_the_set_up_line_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--setup"]) == 0
    assert capsys.readouterr().out.startswith("apt-get install")
