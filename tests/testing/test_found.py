"""What the fuzzer has found: each program once more, as small as it was made."""

from __future__ import annotations

from pathlib import Path

import torch

import rose_compiler
from rose_compiler.base.decision import Decision
from rose_compiler.testing import aliasing
from rose_compiler.testing.functions import load

FIRST_ASSIGNED_BY_A_STEP = """
def main(w, ones):
    log = []
    obs = ones[0]
    for t in range(3):
        for k in range(3):
            obs, reward, _, _, _ = w.sim.step(obs * 0.5 + k)
            w.left[0] = k
        w.net(obs).sum().backward()
        w.optimizer.step()
        log.append((reward, float(obs.sum())))
    return log
"""


def test_a_variable_that_a_lent_value_is_assigned_to_first(tmp_path: Path) -> None:
    """`reward` is unbound in front of the loop; copying what may be lent raised there."""
    module = load(aliasing.HEADER + FIRST_ASSIGNED_BY_A_STEP, tmp_path / "first_assigned.py")
    chosen = tmp_path / "decision.json"
    Decision(late="shadow", lanes="thread").save(chosen)
    compiled = rose_compiler.compile(module.main, numerics="bitwise", tune=chosen)
    results = [compiled(module.World(), torch.ones(1, 2)) for _ in range(2)]
    assert results[0] == results[1] == module.main(module.World(), torch.ones(1, 2))
    assert "rt.snapshot(reward)" in compiled.source, "the test is about this copy"
    compiled.close()
