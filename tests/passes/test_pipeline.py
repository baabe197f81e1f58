"""The whole pipeline on the PPO rollout: what it does to it, and that nothing else changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from rose_compiler.api.probing import Prober
from rose_compiler.base.decision import Decision
from rose_compiler.ir import facts, interp
from rose_compiler.ir.program import is_call, op_of
from rose_compiler.passes import borrowed, late
from rose_compiler.passes.base import PassContext
from rose_compiler.passes.manager import History, PassManager
from rose_compiler.passes.pipeline import PIPELINE
from rose_compiler.testing import slots
from rose_compiler.testing.samples import Sample, ppo

#: On these sizes a linear layer gives the bits of the whole batch in shards, on every machine that
#: the tests have run on (with fewer than 16 rows not on those with AVX-512); the probe is asked
#: first all the same.
EVEN, UNEVEN = (16, 16, 16, 16), (32, 16, 16, 16)


def context(sample: Sample, decision: Decision, **more: Any) -> PassContext:
    return PassContext(
        options=decision,
        shards=sample.shards,
        asynchronous=frozenset({"envs"}),
        probe=Prober(sample.program, {}),
        **more,
    )


def compiled(sample: Sample, decision: Decision, **more: Any) -> History:
    return PassManager(PIPELINE).run(sample.program, context(sample, decision, **more))


def seen(sample: Sample, run: Any) -> dict[str, Any]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        result = run(sample)
        return {"result": result, **sample.observed()}


def by_program(sample: Sample) -> Any:
    return interp.run(sample.program, sample.args)


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    if isinstance(a, dict):
        return [d for k in a for d in differences(a[k], b[k], f"{path}.{k}")]
    if isinstance(a, tuple | list):
        if len(a) != len(b):
            return [path]
        return [
            d
            for k, (x, y) in enumerate(zip(a, b, strict=True))
            for d in differences(x, y, f"{path}[{k}]")
        ]
    if isinstance(a, torch.Tensor):
        return [] if torch.equal(a, b) else [path]
    same = (a == b).all() if hasattr(a, "all") else a == b
    return [] if same else [path]


def test_the_rollout_as_it_is_scheduled(golden) -> None:
    sample = ppo((8, 8, 8, 8))
    golden(
        "ppo",
        PIPELINE,
        context(sample, Decision(groups=2, late="shadow", rollout_threads=1)),
        program=sample.program,
        folder="pipeline",
    )


def test_the_rollout_with_values_behind_the_loop(golden) -> None:
    sample = ppo((8, 8, 8, 8))
    golden(
        "ppo_deferred",
        PIPELINE,
        context(sample, Decision(groups=4, late="shadow", defer=True)),
        program=sample.program,
        folder="pipeline",
    )


DECISIONS = [
    Decision(),
    Decision(late="shadow"),
    Decision(groups=2),
    Decision(groups=2, late="shadow"),
    Decision(groups=3, late="shadow"),
    Decision(groups=4, late="shadow", lanes="thread"),
    Decision(groups=4, late="shadow", defer=True),
    Decision(groups=2, late="inline", defer=True),
    Decision(late="shadow", defer=True, lanes="inline"),
]


@pytest.mark.parametrize("lends", [False, True], ids=["fresh", "lent"])
@pytest.mark.parametrize("shards", [EVEN, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("decision", DECISIONS, ids=str)
def test_bits_and_states_are_those_of_the_program_as_written(decision, shards, lends) -> None:
    want = seen(ppo(shards, lends=lends), by_program)
    sample = ppo(shards, lends=lends)
    history = compiled(sample, decision, numerics="bitwise")
    assert history.rewrites["canonicalize"] == 1
    assert history.rewrites["split"] == 1
    assert (history.rewrites["tile_batch"] == 1) == (decision.groups > 1)
    assert (history.rewrites["hoist"] == 1) == (decision.groups > 1)
    assert (history.rewrites["defer"] == 1) == decision.defer
    overlaps = decision.late == "shadow" and decision.lanes != "inline"
    assert (history.rewrites["late"] == 1) == overlaps
    assert not differences(want, seen(sample, by_program))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("lends", [False, True], ids=["fresh", "lent"])
@pytest.mark.parametrize("decision", [d for d in DECISIONS if d.late == "shadow"], ids=str)
def test_steps_may_end_at_any_time(decision: Decision, lends: bool, seed: int) -> None:
    want = seen(ppo(EVEN, lends=lends), by_program)
    sample = ppo(EVEN, lends=lends)
    compiled(sample, decision)
    beside = 0

    def by_slots(s: Sample) -> Any:
        nonlocal beside
        executor = slots.SlotInterpreter(s.program, seed)
        states = [s.objects[n] for n in s.program.state_params]
        result = executor.root(s.program, [*(s.args[n] for n in s.program.value_params), *states])
        beside = executor.overlaps
        return result

    assert not differences(want, seen(sample, by_slots))
    assert decision.lanes == "inline" or beside > 0


def test_a_missing_copy_of_a_lent_buffer_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Late work on the simulator's own buffers reads the next step's data, and that is seen."""

    def forgets(loop: Any, steps: Any, rewrite: Any) -> bool:
        for node in loop.graph.nodes:
            facts.put(node, alias=(), borrowed=False)
        rewrite._changed()
        return True

    monkeypatch.setattr(late, "own", forgets)
    assert borrowed.own is not forgets
    want = seen(ppo(EVEN, lends=True), by_program)
    wrong = []
    for seed in range(4):
        sample = ppo(EVEN, lends=True)
        PassManager(PIPELINE, verify=0).run(
            sample.program, context(sample, Decision(late="shadow"))
        )
        got = seen(sample, lambda s: slots.run(s.program, s.args, s.objects, seed=seed))  # noqa: B023
        wrong += differences(want, got)
    assert wrong


def test_small_shards_whose_bits_differ_run_whole() -> None:
    shards = (2, 2, 2, 2)
    sample = ppo(shards, hidden=256)
    history = compiled(sample, Decision(groups=4, late="shadow"), numerics="bitwise")
    refused = [r.code for r in history.remarks.missed() if r.pass_name == "tile_batch"]
    if history.rewrites["tile_batch"]:
        pytest.skip("on this machine a linear layer has equal bits in shards of two rows")
    assert refused == ["probe-bits-differ"]
    assert history.rewrites["late"] == 1
    assert not differences(seen(ppo(shards, hidden=256), by_program), seen(sample, by_program))


def test_close_numerics_tile_them_and_agree() -> None:
    shards = (3, 3, 2, 2)
    want = seen(ppo(shards, steps=2), by_program)
    sample = ppo(shards, steps=2)
    history = compiled(sample, Decision(groups=4, late="shadow"))
    assert history.rewrites["tile_batch"] == 1
    got = seen(sample, by_program)
    for name in ("buf.actions", "buf.values", "buf.logprobs", "buf.rewards"):
        assert torch.allclose(want[name], got[name], rtol=1e-5, atol=1e-6)
    assert torch.equal(want["rng"], got["rng"])


def test_run_ahead_false_overlaps_nothing() -> None:
    sample = ppo(EVEN)
    history = compiled(sample, Decision(groups=2, late="shadow"), run_ahead=False)
    assert history.rewrites["late"] == 0
    assert all(facts.get(n).slot is None for n in sample.program.nodes())


def test_the_step_is_the_same_operation_in_every_group() -> None:
    sample = ppo(EVEN)
    compiled(sample, Decision(groups=4, late="shadow"))
    steps = [n for n in sample.program.nodes() if is_call(n) and op_of(n).kind == "step"]
    assert len(steps) == 4
    assert len({op_of(n) for n in steps}) == 1
    lanes = {facts.get(n).slot.lane for n in steps}  # type: ignore[union-attr]
    assert lanes == {"shard:0", "shard:1", "shard:2", "shard:3"}


def test_remarks_name_the_users_lines() -> None:
    sample = ppo(EVEN)
    history = compiled(sample, Decision(groups=2, late="shadow"))
    text = history.remarks.render()
    for line in ("ppo.py:5", "ppo.py:9", "ppo.py:13"):
        assert line in text
    assert all(r.where for r in history.remarks)


def test_fuel_bisects_the_pipeline() -> None:
    """With any number of rewrites the program still means the same."""
    want = seen(ppo(EVEN), by_program)
    full = compiled(ppo(EVEN), Decision(groups=2, late="shadow", defer=True))
    total = sum(full.rewrites.values())
    assert total >= 6
    for fuel in range(total + 1):
        sample = ppo(EVEN)
        decision = Decision(groups=2, late="shadow", defer=True)
        manager = PassManager(PIPELINE, fuel=fuel)
        history = manager.run(sample.program, replace(context(sample, decision)))
        assert sum(history.rewrites.values()) <= fuel
        assert not differences(want, seen(sample, by_program))
