"""Reading dumps: round trips of text, refusals with their lines, no way out of the language."""

from __future__ import annotations

import re
from pathlib import Path

from rose_compiler.ir.dump import dump
from rose_compiler.ir.parse import parse

DOCS = Path(__file__).resolve().parents[2] / "docs" / "ir.md"


def example() -> str:
    found = re.search(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    return found[1]


def test_the_example_of_the_docs_is_a_dump() -> None:
    assert dump(parse(example())) == example()
