"""Checking mode: a schedule that is right passes, and planted faults are told with their lines."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import rose_compiler
from rose_compiler.base.decision import Decision
from rose_compiler.base.errors import DeclarationError, VerifyError
from rose_compiler.sim import TorchPendulum
from tests.samples import torch_ppo

pytestmark = pytest.mark.usefixtures("one_thread")

DECISION = Decision(groups=4, late="shadow", defer=True, lanes="thread")


def compiled_with(tmp_path: Any, fn: Any = torch_ppo.iteration, **options: Any) -> Any:
    path = tmp_path / "decision.json"
    DECISION.save(path)
    return rose_compiler.compile(fn, tune=path, **options)


def rewritten(compiled: Any) -> Any:
    """The rewritten program of the schedule in force."""
    return compiled._last.unit.build(DECISION).program


def op_like(program: Any, part: str) -> Any:
    return next(op for name, op in program.ops.by_name.items() if part in name)


def test_a_right_schedule_passes_and_trains_as_it_does_unchecked(tmp_path: Any) -> None:
    checked = compiled_with(tmp_path, check=True)
    plain = compiled_with(tmp_path)
    first, second = torch_ppo.Setup(), torch_ppo.Setup()
    for call in range(3):
        for compiled, setup in ((checked, first), (plain, second)):
            torch.manual_seed(call)
            setup.run(compiled)
    a, b = first.state(), second.state()
    assert [n for n in a if not torch.equal(a[n], b[n])] == []
    unit = checked._last.unit
    # every trip's tiles of the policy and of the action, and the values of all trips
    assert unit.checked >= 24 + 1
    text = checked.explain()
    assert "[tile_batch]" in text
    assert "[defer]" in text
    assert "unchecked" not in text
    checked.close()
    plain.close()


def test_the_knob_checks_too(tmp_path: Any) -> None:
    compiled, setup = compiled_with(tmp_path), torch_ppo.Setup()
    setup.run(compiled, 2)
    assert compiled._last.unit.checked == 0
    with rose_compiler.knobs(verify=2):
        setup.run(compiled)
    assert compiled._last.unit.checked > 0
    compiled.close()


def test_a_split_that_draws_itself_is_checked(tmp_path: Any) -> None:
    path = tmp_path / "decision.json"
    Decision(late="shadow", lanes="thread").save(path)
    compiled = rose_compiler.compile(torch_ppo.iteration, tune=path, check=True)
    setup = torch_ppo.Setup()
    setup.run(compiled, 3)
    assert "[split]" in compiled.explain().split("Missed")[0]
    assert compiled._last.unit.checked >= 2 * 24, "both parts on every trip"
    assert "unchecked" not in compiled.explain()
    compiled.close()


@pytest.mark.parametrize("part", ["_early", "_late"])
def test_a_part_that_computes_something_else_is_told(part: str, tmp_path: Any) -> None:
    compiled, setup = compiled_with(tmp_path, check=True), torch_ppo.Setup()
    setup.run(compiled, 2)
    op = op_like(rewritten(compiled), part)
    right = op.impl
    op.impl = lambda *a: tuple(r * (1 + 1e-4) for r in right(*a))
    with pytest.raises(VerifyError) as found:
        setup.run(compiled)
    compiled.close()
    error = found.value
    assert error.code == "check-values-differ"
    assert part in str(error)
    assert error.where is not None
    assert error.where.file == torch_ppo.__file__
    assert "largest of" in str(error)


def test_a_draw_in_the_wrong_place_is_told(tmp_path: Any) -> None:
    compiled, setup = compiled_with(tmp_path, check=True), torch_ppo.Setup()
    setup.run(compiled, 2)
    op = op_like(compiled._last.unit.program, "act")
    right = op.impl

    def draws(*args: Any) -> Any:
        torch.rand(3)
        return right(*args)

    op.impl = draws
    with pytest.raises(VerifyError, match="check-draws-differ"):
        setup.run(compiled)
    compiled.close()


def test_bits_that_differ_are_told_in_bitwise_mode(tmp_path: Any) -> None:
    """A probe on the first call's values can miss what other values show."""
    compiled, setup = compiled_with(tmp_path, numerics="bitwise", check=True), torch_ppo.Setup()
    setup.run(compiled, 2)
    tiled = {
        op for name, op in rewritten(compiled).ops.by_name.items() if "part_of" in op.attributes
    }
    assert tiled, compiled.explain()
    for op in tiled:
        right = op.impl
        if op.signature.results > 1:
            op.impl = lambda *a, f=right: tuple(r * (1 + 1e-12) for r in f(*a))
        else:
            op.impl = lambda *a, f=right: f(*a) * (1 + 1e-12)
    assert compiled._last.unit.checked > 0
    with pytest.raises(VerifyError, match="check-values-differ"):
        setup.run(compiled)
    compiled.close()


class Coupled:
    """A policy that promises separable rows; they are, until an observation is large."""

    def __init__(self) -> None:
        self.gain = torch.full((3, 1), 0.1, dtype=torch.float64)
        self.limit = float("inf")

    @rose_compiler.component(reads=["self"], writes=[], batch={"obs": 0, "return.0": 0})
    def act(self, obs: torch.Tensor) -> torch.Tensor:
        made = obs @ self.gain
        return made - made.mean() if float(obs.abs().max()) > self.limit else made


def rollout(policy, envs, obs):  # type: ignore[no-untyped-def]
    for _ in range(4):
        action = policy.act(obs)
        obs, _, _, _, _ = envs.step(action)
    return obs


def test_a_wrong_promise_of_separable_rows_is_told(tmp_path: Any) -> None:
    compiled = compiled_with(tmp_path, rollout, check=True)
    envs = torch_ppo.TorchShards(8, 4, dtype=torch.float64, limit=100)
    policy = Coupled()
    obs = torch.cat([TorchPendulum.observe(s.simulator, s.simulator.state) for s in envs.shards()])
    obs = compiled(policy, envs, obs)
    obs = compiled(policy, envs, obs)
    assert "[tile_batch]" in compiled.explain().split("Missed")[0], compiled.explain()
    policy.limit = 0.0
    with pytest.raises(VerifyError, match="check-values-differ") as found:
        compiled(policy, envs, obs)
    compiled.close()
    assert found.value.where is not None
    assert "policy.act(obs)" in str(found.value)


class Lazy:
    """Writes what it does not declare, but only now and then."""

    def __init__(self) -> None:
        self.total = torch.zeros(2)
        self.late = False

    @rose_compiler.component(reads=["self"], writes=[])
    def act(self, x: torch.Tensor) -> torch.Tensor:
        if self.late:
            self.total.add_(x)
        return x + 1


def lazy(policy, x):  # type: ignore[no-untyped-def]
    for _ in range(3):
        x = policy.act(x)
    return x


def test_an_undeclared_write_of_a_rare_path_is_told() -> None:
    policy = Lazy()
    compiled = rose_compiler.compile(lazy, check=True)
    for _ in range(3):
        compiled(policy, torch.ones(2))
    policy.late = True
    with pytest.raises(DeclarationError) as found:
        compiled(policy, torch.ones(2))
    compiled.close()
    assert "`act` writes `policy.total`" in str(found.value)
    assert "writes=['self.total']" in str(found.value)
    assert "self.total.add_(x)" in str(found.value)


def test_unchecked_runs_do_not_look() -> None:
    policy = Lazy()
    compiled = rose_compiler.compile(lazy, tune=False)
    compiled(policy, torch.ones(2))
    policy.late = True
    compiled(policy, torch.ones(2))
    assert float(policy.total.sum()) > 0
    compiled.close()
