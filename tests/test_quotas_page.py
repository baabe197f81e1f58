"""docs/quotas.md: its code runs in order, and its tables are complete."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from rose_compiler.base.machine import Machine
from rose_compiler.base.quota import BACKENDS

PAGE = (Path(__file__).parents[1] / "docs" / "quotas.md").read_text(encoding="utf-8")


def test_the_code_on_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {"__name__": "page"}
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) >= 2
    for block in blocks:
        exec(compile(block, "quotas.md", "exec", dont_inherit=True), names)
    assert "of the SMs active" in capsys.readouterr().out


def test_the_description_on_the_page_is_one() -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    assert Machine.from_dict(tomllib.loads(text)).chunks == 16


def test_every_back_end_is_on_the_page() -> None:
    assert re.findall(r"^\| `([a-z-]+)` \|", PAGE, re.MULTILINE) == list(BACKENDS)
