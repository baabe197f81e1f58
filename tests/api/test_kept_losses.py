"""What is kept of a loss behind its backward looks as it does in eager."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import rose_compiler
from rose_compiler.base.decision import Decision
from rose_compiler.testing.losses import as_traced
from tests.api.test_hooks import Learner


def telling(s: Learner, log: list[Any]) -> None:
    for _ in range(2):
        loss = s.net(s.obs).pow(2).mean()
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
        log.append(loss)
        log.append((str(loss), loss.requires_grad, loss.is_leaf, (loss * 2).requires_grad))


def read(s: Learner, log: list[Any]) -> None:
    for _ in range(2):
        loss = s.net(s.obs).pow(2).mean()
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
        log.append((float(loss.detach()), loss.item(), bool(loss > 0)))


@pytest.mark.parametrize(("fn", "recorded"), [(telling, True), (read, False)])
def test_a_loss_that_is_kept_looks_the_same(fn: Any, recorded: bool, tmp_path: Path) -> None:
    Decision(script=True).save(tmp_path / "decision.json")
    fast = rose_compiler.compile(fn, numerics="bitwise", tune=tmp_path / "decision.json")
    eager: list[Any] = []
    ours: list[Any] = []
    with as_traced():
        for run, log in ((fn, eager), (fast, ours)):
            s = Learner()
            for _ in range(2):
                run(s, log)
    assert "rt.gradients(" in fast.source
    assert ("recorded=" in fast.source) is recorded  # where numbers are read, it costs nothing
    fast.close()
    if not recorded:
        assert eager == ours
        return
    assert eager[1::2] == ours[1::2]
    assert [a.requires_grad for a in eager[::2]] == [b.requires_grad for b in ours[::2]]
    for log in (eager, ours):
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            log[-2].backward()
        log[-2] += 1  # as one may: it is no view
