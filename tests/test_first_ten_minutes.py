"""The tour of the docs, walked from beginning to end: what it shows is what happens."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.snippets import ROOT, run, same, snippets

PAGE = ROOT / "docs" / "tour.md"


@pytest.mark.filterwarnings("ignore")
def test_tour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # it saves a file
    seen = 0
    for snippet, printed in run(PAGE, tmp_path):
        seen += 1
        if snippet.prints is not None:
            assert same(snippet.prints, printed), (
                f"docs/tour.md, line {snippet.line}, printed:\n{printed}"
            )
    assert seen == len(snippets(PAGE)) > 8
