"""Work that no training waits for runs on threads beside it: every bit as eager, both at once."""

from __future__ import annotations

import contextlib
import inspect
import io
import random
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import rose_compiler
from rose_compiler.base.decision import Decision
from rose_compiler.tune.memory import added
from tests.loops import aside
from tests.loops.aside import ENVS, ITERATIONS, STEPS, Field, Setup
from tests.loops.bits import bits, differing, generators
from tests.loops.harness import seeded_spaces

#: Work that no training waits for goes to threads, all else stays.
ASIDE = Decision(overlap=True)
#: Seconds that something waits for the training to go on, at most.
PATIENCE = 1.0
#: Iterations that are watched, in program order.
WATCHED = 2


class Training(Field):
    """Counts the steps of all training environments."""

    steps: ClassVar[int] = 0

    @rose_compiler.component(reads=["self"], writes=["self"])
    def step(self, action: Any) -> Any:
        Training.steps += 1
        return super().step(action)


def goes_on(seen: list[bool]) -> None:
    """On another thread than the training's, wait until it has gone on to the next iteration."""
    if threading.current_thread() is threading.main_thread():
        return
    over, until = (WATCHED + len(seen) + 1) * STEPS * ENVS, time.monotonic() + PATIENCE
    while Training.steps <= over and time.monotonic() < until:
        time.sleep(0.001)
    seen.append(Training.steps > over)


class Waiting(Field):
    """Waits, in the first step of an episode, until the training has gone on."""

    seen: ClassVar[list[bool]] = []

    @rose_compiler.component(reads=["self"], writes=["self"])
    def step(self, action: Any) -> Any:
        if self.count == 0:
            goes_on(self.seen)
        return super().step(action)


@contextlib.contextmanager
def compiled(fn: Callable[..., Any], decision: Decision = ASIDE) -> Iterator[Any]:
    with tempfile.TemporaryDirectory() as folder:
        decision.save(path := Path(folder) / "decision.json")
        made = rose_compiler.compile(fn, numerics="bitwise", tune=path)
    try:
        yield made
    finally:
        made.close()


def trained(fn: Callable[..., Any], make: Callable[[], Setup]) -> tuple[dict[str, Any], Setup]:
    """What a run of ``fn`` leaves, as bits."""
    random.seed(0)
    with seeded_spaces(), contextlib.redirect_stdout(io.StringIO()) as printed:
        Training.steps = 0
        setup = make()
        result = fn(ITERATIONS, setup)
        owned = {"result": result, "owned": setup.owned(), "process": generators()}
        return bits({**owned, "printed": printed.getvalue()}), setup


@contextlib.contextmanager
def both(
    fn: Callable[..., Any], make: Callable[[], Setup] = Setup, decision: Decision = ASIDE
) -> Iterator[tuple[Any, Any]]:
    """A training as written and compiled, with the same bits: the compiled function, its set-up."""
    plain, first = trained(fn, make)
    with compiled(fn, decision) as made:
        found, second = trained(made, make)
        assert differing(plain, found) == []
        yield made, second
    first.close()
    second.close()


def test_an_evaluation_runs_while_the_next_iteration_collects() -> None:
    Waiting.seen.clear()
    with both(aside.evaluated, lambda: Setup(Training, Waiting)) as (made, _):
        assert any(Waiting.seen), made.source
        assert "on lane 'thread:" in made.explain()


class Evaluating(Field):
    """Waits, in the first step of an evaluation on a thread, until a parameter is changed."""

    seen: ClassVar[list[bool]] = []
    weight: ClassVar[torch.Tensor]

    @rose_compiler.component(reads=["self"], writes=["self"])
    def step(self, action: Any) -> Any:
        if self.count == 0 and threading.current_thread() is not threading.main_thread():
            before, until = Evaluating.weight._version, time.monotonic() + PATIENCE / 2
            while Evaluating.weight._version == before and time.monotonic() < until:
                time.sleep(0.001)
            self.seen.append(Evaluating.weight._version > before)
        return super().step(action)


@pytest.mark.parametrize("fn", [aside.evaluated, aside.evaluated_first])
def test_an_evaluation_of_copies_runs_while_the_parameters_are_trained(fn: Any) -> None:
    def make() -> Setup:
        Evaluating.seen.clear()
        setup = Setup(eval_env=Evaluating)
        Evaluating.weight = setup.agent.mean[0].weight
        return setup

    with both(fn, make, Decision(overlap=True, copies=True)) as (made, setup):
        assert any(Evaluating.seen), made.source
        lines, start = inspect.getsourcelines(aside.evaluate)
        loop = next(start + k for k, line in enumerate(lines) if "for _ in" in line)
        applied = made._schedule().history.remarks.applied()
        assert loop in {w.line for r in applied if r.pass_name == "versions" for w in r.where}
        size = sum(p.numel() * 4 for p in setup.agent.mean.parameters())
        schedule = made._schedule()
        pieces = added(made._last.unit.program, schedule.program)
        assert sum(p.bytes for p in pieces if "copies of" in p.what) == 2 * size


class Slow:
    """Is pickled once the training has gone on."""

    seen: ClassVar[list[bool]] = []

    def __reduce__(self) -> Any:
        goes_on(self.seen)
        return Slow, ()


def test_a_checkpoint_is_written_while_the_next_iteration_collects(tmp_path: Path) -> None:
    Slow.seen.clear()
    folders = iter((tmp_path / "eager", tmp_path / "compiled"))

    def make() -> Setup:
        folder = next(folders)
        folder.mkdir()
        return Setup(Training, folder=folder, extra=Slow())

    with both(aside.checkpointed, make) as (made, _):
        assert any(Slow.seen), made.source
        for it in range(ITERATIONS):
            one, other = (
                torch.load(tmp_path / name / f"{it}.pt", weights_only=False)
                for name in ("eager", "compiled")
            )
            assert differing(bits(one), bits(other)) == []


@pytest.mark.parametrize("fn", [aside.checkpointed_now_and_then, aside.saved_itself])
def test_a_checkpoint_of_copies_is_written_while_the_parameters_are_trained(
    fn: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = iter((tmp_path / "eager", tmp_path / "compiled"))
    seen: list[bool] = []
    weights: list[torch.Tensor] = []
    write = torch.serialization._save

    def waiting(*args: Any, **options: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            before, until = weights[-1]._version, time.monotonic() + PATIENCE / 2
            while weights[-1]._version == before and time.monotonic() < until:
                time.sleep(0.001)
            seen.append(weights[-1]._version > before)
        return write(*args, **options)

    def make() -> Setup:
        folder = next(folders)
        folder.mkdir()
        setup = Setup(folder=folder)
        setup.agent.__class__ = aside.Saving
        weights.append(setup.agent.mean[0].weight)
        return setup

    monkeypatch.setattr(torch.serialization, "_save", waiting)
    with both(fn, make, Decision(overlap=True, copies=True)) as (made, setup):
        assert any(seen), made.source
        names = sorted(path.name for path in (tmp_path / "eager").iterdir())
        whole = ITERATIONS * (fn is aside.saved_itself)
        assert len(names) == (ITERATIONS + 1) // 2 + whole
        for name in names:
            one, other = ((tmp_path / of / name).read_bytes() for of in ("eager", "compiled"))
            assert one == other
        kept = [*setup.agent.parameters()]
        if whole:  # by its own method, and as a module
            kept += kept
        else:
            kept += [t for held in setup.opt.state.values() for t in held.values()]
        pieces = added(made._last.unit.program, made._schedule().program)
        size = sum(t.numel() * t.element_size() for t in kept)
        assert sum(p.bytes for p in pieces if "as it was" in p.what) == 2 * size


def test_what_writes_a_live_object_is_through_before_it_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = iter((tmp_path / "eager", tmp_path / "compiled"))
    weights: list[torch.Tensor] = []
    written = torch.serialization._save
    moved: list[bool] = []

    def waiting(*args: Any, **options: Any) -> Any:
        before = weights[-1]._version
        beside = threading.current_thread() is not threading.main_thread()
        if beside:
            time.sleep(0.01)  # time enough for an update that does not wait
        made = written(*args, **options)
        if beside and isinstance(args[0], torch.nn.Module):
            moved.append(weights[-1]._version != before)
        return made

    def make() -> Setup:
        folder = next(folders)
        folder.mkdir()
        setup = Setup(folder=folder)
        setup.agent.__class__ = aside.Saving
        setup.agent.opt = setup.opt  # what else the module leads to is written live
        weights.append(setup.agent.mean[0].weight)
        return setup

    monkeypatch.setattr(torch.serialization, "_save", waiting)
    with both(aside.saved_itself, make, Decision(overlap=True, copies=True)) as (found, _):
        assert "'thread:" in found.explain(), "it is written beside the next rollout"
        names = sorted(path.name for path in (tmp_path / "eager").iterdir())
        assert len(names) == ITERATIONS + (ITERATIONS + 1) // 2
        for name in names:
            one, other = ((tmp_path / of / name).read_bytes() for of in ("eager", "compiled"))
            assert one == other
    assert moved
    assert not any(moved)


def test_lines_are_printed_in_order_beside_the_training() -> None:
    with both(aside.logged, lambda: Setup(Training)) as (made, _):
        assert "on lane 'thread:" in made.explain(), made.source
        assert "submit(" in made.source


def test_log_probabilities_of_a_reference_run_beside_values() -> None:
    def repeated(step: Callable[[Setup], Any]) -> Callable[[int, Setup], Any]:
        return lambda iterations, setup: [step(setup) for _ in range(iterations)]

    plain, first = trained(repeated(aside.referenced), Setup)
    with compiled(aside.referenced) as made:
        found, second = trained(repeated(made), Setup)
        assert differing(plain, found) == []
        lines = [line.split("#")[0].strip() for line in made.source.splitlines()]
    (begun,) = [k for k, line in enumerate(lines) if ".submit(" in line]
    (ended,) = [k for k, line in enumerate(lines) if line.endswith("_task.wait()")]
    assert any(line.startswith("values = ") for line in lines[begun:ended]), lines
    first.close()
    second.close()


def test_a_reference_looks_at_steps_and_an_agent_is_copied_while_others_are_taken() -> None:
    decision = Decision(accumulate=True, late="shadow", lanes="thread", overlap=True)
    with both(aside.compared, decision=decision) as (made, _):
        applied = made._schedule().history.remarks.applied()
        assert [r for r in applied if r.pass_name == "interleave"], made.explain()
        late = {str(w.line) for r in applied if r.pass_name == "late" for w in r.where}
        assert {_line(text, aside.compared) for text in ("row = ", "rows.logps[t] =")} <= late
        lane = f"thread_line{_line('copy.deepcopy', aside.compared)}.submit("
        lines = [line.split("#")[0].strip() for line in made.source.splitlines()]
        (begun,) = [k for k, text in enumerate(lines) if lane in text]
        rollout = min(k for k, text in enumerate(lines) if text.startswith("for t in "))
        ended = [k for k, text in enumerate(lines) if text.endswith("_task.wait()")]
        assert any(rollout < k < begun for k in ended), made.source


def _line(text: str, of: Callable[..., Any] = aside.drawn) -> str:
    lines, start = inspect.getsourcelines(of)
    return str(next(start + k for k, line in enumerate(lines) if text in line))


def test_an_evaluation_that_draws_keeps_its_place() -> None:
    with both(aside.drawn) as (made, _):
        missed = made._schedule().history.remarks.missed()
        assert any(r.pass_name == "overlap" and r.code == "draw-order" for r in missed)
        # nothing but its reset, which draws from its environments' own generators
        assert re.findall(r"(\w+)\.submit\(", made.source) == ["thread_reset" + _line("look, _ =")]


def test_a_curiosity_reward_is_computed_while_the_simulator_steps() -> None:
    plain, first = trained(aside.curious, Setup)
    with compiled(aside.curious, Decision(late="shadow", lanes="thread", overlap=True)) as made:
        found, second = trained(made, Setup)
        assert differing(plain, found) == []
        lines, start = inspect.getsourcelines(aside.curious)
        (bonus,) = [start + k for k, line in enumerate(lines) if "bonus = " in line]
        applied = made._schedule().history.remarks.applied()
        late = {w.line for r in applied if r.pass_name == "late" for w in r.where}
        assert bonus in late, made.explain()
    first.close()
    second.close()


def test_a_curiosity_model_is_trained_beside_the_policy() -> None:
    lines, start = inspect.getsourcelines(aside.curious)
    (wrong,) = [start + k for k, line in enumerate(lines) if "wrong = " in line]
    with both(aside.curious) as (made, _):
        applied = made._schedule().history.remarks.applied()
        assert wrong in {w.line for r in applied if r.pass_name == "overlap" for w in r.where}
        lines = [line.split("#")[0].strip() for line in made.source.splitlines()]
        begun = [k for k, line in enumerate(lines) if f"thread_line{wrong}.submit(" in line]
        ended = [k for k, line in enumerate(lines) if line.endswith("_task.wait()")]
        (policy,) = [k for k, line in enumerate(lines) if line.startswith("total = curious_")]
        assert len(begun) == len(ended) == 4
        assert max(begun) < policy < min(ended)


class Restarting(Training):
    """Waits in the first reset of a vector, on another thread, until a parameter is changed."""

    seen: ClassVar[list[bool]] = []
    resets: ClassVar[int] = 0
    weight: ClassVar[torch.Tensor]

    @rose_compiler.component(reads=["self"], writes=["self"])
    def reset(self, **options: Any) -> Any:
        Restarting.resets += 1
        aside = threading.current_thread() is not threading.main_thread()
        if aside and Restarting.resets % ENVS == 1:
            before, until = Restarting.weight._version, time.monotonic() + PATIENCE / 4
            while Restarting.weight._version == before and time.monotonic() < until:
                time.sleep(0.001)
            self.seen.append(Restarting.weight._version > before)
        return super().reset(**options)


def test_the_next_reset_runs_beside_the_update() -> None:
    def make() -> Setup:
        Restarting.seen.clear()
        Restarting.resets = 0
        setup = Setup(Restarting)
        Restarting.weight = setup.agent.log_std
        return setup

    lines, start = inspect.getsourcelines(aside.restarted)
    told = [start + k for k, line in enumerate(lines) if ".reset(" in line]
    with both(aside.restarted, make) as (made, _):
        assert any(Restarting.seen), made.source
        applied = made._schedule().history.remarks.applied()
        assert {w.line for r in applied if r.pass_name == "next_reset" for w in r.where} == {*told}


def test_the_next_reset_of_one_iteration_is_not_known_yet() -> None:
    setup = Setup()
    with compiled(aside.restarted_once) as made:
        for _ in range(3):
            made(setup)
        missed = made._schedule().history.remarks.missed()
        (remark,) = [r for r in missed if r.pass_name == "next_reset"]
        assert remark.code == "single-trip"
        assert "before the function is called again" in remark.why
    setup.close()


def test_the_page_tells_what_overlaps() -> None:
    page = (Path(__file__).parents[2] / "docs" / "passes.md").read_text(encoding="utf-8")
    _, _, section = page.partition("## What overlaps and when not")
    section, _, _ = section.partition("\n## ")
    rows = re.findall(r"^\| ([^|]+?) \|", section, re.M)[1:]
    # one test above for each, in this order
    assert [re.sub("`", "", row) for row in rows] == [
        "an evaluation on environments of its own",
        "a checkpoint by torch.save",
        "a copy of a module for a league (copy.deepcopy)",
        "logs and prints",
        "log-probabilities of a reference behind a rollout",
        "the same, and a curiosity reward, on each step of a rollout",
        "the update of a second model (curiosity), with an optimizer of its own",
        "the reset that begins the next iteration, or its evaluation",
    ]
