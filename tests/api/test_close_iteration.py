"""A whole iteration of ``numerics="close"`` against eager, where the simulator is no amplifier.

In float64 the rounding of tiled products stays far below the tolerance over a short rollout of a
pendulum, so what is compared is the whole chain: rollout, advantages, update.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import rose_compiler
from rose_compiler.base.decision import Decision
from rose_compiler.runtime.support import Runtime
from tests.samples import torch_ppo

pytestmark = pytest.mark.usefixtures("one_thread")

DECISION = Decision(groups=4, late="shadow", defer=True, lanes="thread", rollout_threads=1)


def trained(step: Any, setup: torch_ppo.Setup) -> dict[str, torch.Tensor]:
    """The state that an iteration leaves behind, from equal generators."""
    torch.manual_seed(11)
    setup.run(step)
    return setup.state()


def test_a_whole_iteration_agrees(tmp_path: Any) -> None:
    DECISION.save(tmp_path / "decision.json")
    compiled = rose_compiler.compile(
        torch_ppo.iteration, numerics="close", tune=tmp_path / "decision.json"
    )
    compiled._runtime = Runtime(trace=True)
    setup, eager = torch_ppo.Setup(), torch_ppo.Setup()
    # the first call runs in program order: the same bits
    first, expected = trained(compiled, setup), trained(torch_ppo.iteration, eager)
    assert [n for n in first if not torch.equal(first[n], expected[n])] == []
    found, expected = trained(compiled, setup), trained(torch_ppo.iteration, eager)
    lanes = compiled.runtime.timeline.lanes()
    compiled.close()

    remarks = compiled._last.unit.build(DECISION).history.remarks
    applied = {r.pass_name for r in remarks.applied()}
    assert {"hoist", "split", "tile_batch", "defer"} <= applied, compiled.explain()
    assert len(lanes) >= 2, lanes

    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if name == "rng" or not value.is_floating_point():
            assert torch.equal(found[name], value), name
        else:
            atol = 1e-6 * float(value.abs().max())
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=atol, msg=name)
    # bits differ somewhere, or no product was tiled and nothing was compared
    assert any(not torch.equal(found[n], expected[n]) for n in expected)
    assert setup.losses[1] == pytest.approx(eager.losses[1], rel=1e-5)
