"""What the README shows and says, tried."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import rose_compiler
from rose_compiler.base import knobs
from tests.snippets import ROOT, run, same

PAGE = ROOT / "README.md"


def test_blocks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    seen = 0
    for snippet, printed in run(PAGE, tmp_path):
        seen += 1
        if snippet.prints is not None:
            assert same(snippet.prints, printed), (
                f"README.md, line {snippet.line}, printed:\n{printed}"
            )
    assert seen >= 1


def test_links_lead_somewhere() -> None:
    for page in (PAGE, *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_settings_are_the_ones_there_are() -> None:
    named = set(re.findall(r"`ROSE_(\w+)`", PAGE.read_text(encoding="utf-8")))
    assert {name.lower() for name in named} == set(knobs.KNOBS)


def test_what_is_not_there_yet_says_so() -> None:
    """The README's list is complete and true: each of them raises NotImplementedError."""
    section = (
        PAGE.read_text(encoding="utf-8").partition("## Not there yet")[2].partition("\n## ")[0]
    )
    tries = {
        "staleness": lambda: rose_compiler.compile(lambda_free, staleness={"policy": 1}),
    }
    for name, attempt in tries.items():
        assert name in section, f"{name} is not in the README's list"
        with pytest.raises(NotImplementedError, match="not there yet"):
            attempt()
    listed = re.findall(r"^\| `(\w+)", section, re.MULTILINE)
    assert sorted(listed) == sorted(tries)


def lambda_free(x: int) -> int:
    return x
