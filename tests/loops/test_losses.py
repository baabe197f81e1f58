"""Scripts whose losses are fused with their backward: what Inductor would be given trains as eager
does, bit for bit. What it makes of that differs by rounding (tests/runtime/test_gradients.py)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import rose_compiler
from rose_compiler.api import Compiled
from rose_compiler.base.decision import Decision
from rose_compiler.runtime import gradients, graphs, inductor
from tests.loops.bits import differing
from tests.loops.harness import eager, sync, train
from tests.loops.registry import SCRIPTS

#: How many losses of each script become one operation; the other scripts' don't.
FUSED = {
    "PPO, a script": 1,
    "PPO with curiosity": 1,
    "PPO, methods of a trainer": 1,
    "TD3": 2,
    "prioritized replay": 1,
    "a simulator's own buffers": 1,
    "two names for one thing": 1,
}


@pytest.mark.parametrize("script", [pytest.param(s, id=s.name) for s in SCRIPTS if s.name in FUSED])
def test_a_fused_loss_is_the_same_training(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def as_it_is(function: Callable[..., list[Tensor]], given: list[Tensor]) -> Any:
        with torch.no_grad():
            return inductor.make_fx(function)(*given)

    monkeypatch.setattr(gradients, "_built", as_it_is)
    monkeypatch.setattr(graphs, "built", as_it_is)
    monkeypatch.setattr(graphs, "PAYS", float("inf"))
    monkeypatch.setattr(gradients, "_known_losses", {})
    monkeypatch.setattr(graphs, "_known_graphs", {})
    Decision(compile=True).save(tmp_path / "decision.json")
    functions: list[Compiled] = []

    def compile(fn: Any) -> Any:
        functions.append(rose_compiler.compile(fn, tune=tmp_path / "decision.json"))
        return functions[-1]

    expected, found = eager(script), train(script, compile, sync, functions)
    assert not differing(expected.bits, found.bits)
    notes = [note for one in functions for note in one.runtime.notes]
    compiled = {note.name for note in notes if not note.why}
    assert sum("loss" in name for name in compiled) == FUSED[script.name]
