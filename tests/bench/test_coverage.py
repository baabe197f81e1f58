"""The table of what the compiler makes of whole scripts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.coverage import HEAD, row_of, table
from tests.loops.registry import SCRIPTS

PAGE = Path(__file__).parents[2] / "docs" / "coverage.md"


def test_a_script_in_shards_is_told_as_it_was_scheduled() -> None:
    row = row_of(next(s for s in SCRIPTS if s.name == "PPO, a script"))
    assert row.loops == 5  # iterations, steps, advantages, epochs, minibatches
    assert row.opaque == 0
    assert row.traced > 0
    if row.blockers["probe-bits-differ"]:
        pytest.skip("products of so few rows have other bits than those of all, on this machine")
    assert row.rewrites["tile_batch"] == 1
    assert row.lanes == 2
    assert row.beside > 5
    assert row.blockers["reads-loop-state"] > 0
    assert "switched-off" not in row.blockers
    header, rule, line = table([row]).split("\n")
    assert header.count("|") == rule.count("|") == line.count("|") == len(HEAD) + 1


def test_the_page_has_a_row_for_every_script() -> None:
    names = re.findall(r"^\| ([^|]+) \| \d+ / ", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert names == [s.name for s in SCRIPTS]
    assert len(names) == len(set(names)) >= 20
