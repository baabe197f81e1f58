"""docs/hazards.md: every hazard of the house has its tests, and every test named is there."""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "hazards.md").read_text(encoding="utf-8")
HOUSE = (ROOT / "docs" / "house.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)))


def rows(page: str, head: str) -> dict[str, str]:
    """The rows of the table below a head line: the first cell, and the rest."""
    table = page[page.index(head) :].partition("\n\n")[0].splitlines()[2:]
    cells = [line.strip("|").split(" | ", 1) for line in table]
    return {first.strip(): rest.strip() for first, rest in cells}


@lru_cache
def defined(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    found = {n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    targets = [t for n in tree.body if isinstance(n, ast.Assign) for t in n.targets]
    return found | {t.id for t in targets if isinstance(t, ast.Name)}


def test_every_hazard_of_the_house_has_a_test() -> None:
    house = rows(HOUSE, "| hazard | rule |")
    page = rows(PAGE, "| hazard | tests |")
    assert list(page) == list(house)
    assert all("::" in tests for tests in page.values())


@pytest.mark.parametrize(("file", "name"), NAMED, ids=lambda v: v)
def test_what_is_named_is_there(file: str, name: str) -> None:
    assert name in defined(file)


def test_planted_faults_that_are_named_are_there() -> None:
    folder = ROOT / "tests" / "testing"
    files = (folder / name for name in ("test_mutants.py", "test_written_mutants.py"))
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    planted = set(re.findall(r'(?:@mutant|Written)\(\s*"([^"]+)"', text))
    named = re.findall(r"mutant `([^`]+)`", PAGE)
    assert named
    assert set(named) <= planted
