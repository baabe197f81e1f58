"""docs/hosts.md: its code runs in order."""

from __future__ import annotations

from pathlib import Path

from tests.snippets import ROOT, run


def test_the_code_on_the_page_runs(tmp_path: Path) -> None:
    assert len(list(run(ROOT / "docs" / "hosts.md", tmp_path))) == 3
