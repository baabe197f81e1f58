"""Scripts whose losses are fused with their backward: what Inductor would be given trains as eager
does, bit for bit. What it makes of that differs by rounding (tests/runtime/test_gradients.py)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rose_compiler
from rose_compiler.api import Compiled
from rose_compiler.base.decision import Decision
from rose_compiler.passes import fuse_replays
from rose_compiler.runtime import cuda_graphs, inductor
from rose_compiler.testing.losses import as_traced
from tests.loops.bits import differing
from tests.loops.harness import Trained, eager, sync, train
from tests.loops.registry import SCRIPTS
from tests.runtime.cuda_stand_in import StandIn

#: How many losses of each script become one operation; the other scripts' don't.
FUSED = {
    "PPO, a script": 1,
    "PPO with curiosity": 1,
    "PPO, methods of a trainer": 1,
    "GRPO with a reference model": 1,
    "TD3": 2,
    "prioritized replay": 1,
    "a simulator's own buffers": 1,
    "two names for one thing": 1,
}


@pytest.fixture
def uncompiled() -> Iterator[None]:
    """What Inductor would be given runs as it is, and always pays."""
    with as_traced():
        yield


def compiled(script: Any, decision: Decision, folder: Path) -> tuple[Trained, list[Compiled]]:
    decision.save(folder / "decision.json")
    functions: list[Compiled] = []

    def compile(fn: Any) -> Compiled:
        functions.append(rose_compiler.compile(fn, tune=folder / "decision.json"))
        return functions[-1]

    return train(script, compile, sync, functions), functions


def notes_of(functions: list[Compiled], kind: str) -> list[inductor.Note]:
    notes = [n for one in functions for n in one.runtime.notes if isinstance(n, inductor.Note)]
    return [n for n in notes if n.kind == kind]


@pytest.mark.parametrize("script", [pytest.param(s, id=s.name) for s in SCRIPTS if s.name in FUSED])
def test_a_fused_loss_is_the_same_training(script: Any, uncompiled: None, tmp_path: Path) -> None:
    found, functions = compiled(script, Decision(compile=True), tmp_path)
    assert not differing(eager(script).bits, found.bits)
    names = {note.name for note in notes_of(functions, "inductor") if not note.why}
    assert sum("loss" in name for name in names) == FUSED[script.name]


def test_so_is_one_that_is_replayed(
    uncompiled: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = next(s for s in SCRIPTS if s.name == "PPO, a script")
    device = StandIn()
    monkeypatch.setattr(cuda_graphs, "DEVICE", device)
    monkeypatch.setattr(cuda_graphs, "PAYS", float("inf"))
    monkeypatch.setattr(fuse_replays, "why_not", lambda node: None)
    decision = Decision(compile=True, cuda_graphs=True)
    found, functions = compiled(script, decision, tmp_path)
    assert not differing(eager(script).bits, found.bits)
    assert not any(note.why for note in notes_of(functions, "cuda-graph"))
    assert any("loss" in note.name for note in notes_of(functions, "cuda-graph"))
    assert device.log.count("replay") > device.log.count("capture")
