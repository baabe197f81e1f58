"""Training scripts in the styles that people write them: compiled, they train the same way."""

from __future__ import annotations

import pytest

from tests.loops.harness import SHARDED, THREADED, Script, check
from tests.loops.registry import SCRIPTS


def _marked(script: Script, fault: str) -> object:
    marks = [pytest.mark.xfail(strict=True, reason=fault)] if fault else []
    return pytest.param(script, id=script.name, marks=marks)


@pytest.mark.parametrize("script", [_marked(s, s.fault) for s in SCRIPTS])
def test_trains_the_same(script: Script) -> None:
    check(script)


@pytest.mark.parametrize(
    "script", [_marked(s, s.fault or s.sharded_fault) for s in SCRIPTS if s.sharded]
)
def test_trains_the_same_in_shards(script: Script) -> None:
    check(script, SHARDED)


@pytest.mark.parametrize("script", [_marked(s, s.fault) for s in SCRIPTS if not s.sharded])
def test_trains_the_same_with_its_simulator_on_a_thread(script: Script) -> None:
    check(script, THREADED)
