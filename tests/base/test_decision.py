"""Decisions: plain data, checked when built, the same after a trip through a file."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from rose_compiler.base.decision import Decision
from rose_compiler.base.errors import ConfigError


def test_default_is_program_order() -> None:
    assert str(Decision()) == "program order"
    assert Decision().groups == 0
    assert Decision().late == "inline"
    assert not Decision().defer


def test_round_trip_through_a_file(tmp_path) -> None:
    decision = Decision(groups=4, late="shadow", defer=True, lanes="thread", rollout_threads=1)
    decision.save(tmp_path / "d.json")
    assert Decision.load(tmp_path / "d.json") == decision
    assert Decision.from_dict(decision.to_dict()) == decision
    assert str(decision) == "groups=4 late=shadow defer=True lanes=thread rollout_threads=1"


@pytest.mark.parametrize(
    "wrong",
    [
        {"groups": -1},
        {"groups": True},
        {"groups": None},
        {"groups": 2.0},
        {"late": "defer"},
        {"lanes": "process"},
        {"rollout_threads": 0},
        {"update_threads": "2"},
        {"defer": 1},
        {"grups": 2},
    ],
)
def test_malformed_decisions_are_refused_when_built(wrong) -> None:
    with pytest.raises(ConfigError) as raised:
        Decision.from_dict({**asdict(Decision()), **wrong})
    assert raised.value.code == "config-decision"
    assert next(iter(wrong)) in str(raised.value)


@pytest.mark.parametrize("text", ["", "[1]", "{"])
def test_files_that_hold_no_decision_are_refused(tmp_path, text) -> None:
    path = tmp_path / "d.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"d\.json"):
        Decision.load(path)
    with pytest.raises(ConfigError, match="absent"):
        Decision.load(tmp_path / "absent.json")
