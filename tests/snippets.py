"""Runs the Python blocks of a page of the docs, in order, and compares what they print."""

from __future__ import annotations

import doctest
import io
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Snippet:
    """A block of Python, the line it starts on, and what it should print (None: whatever)."""

    code: str
    line: int
    prints: str | None


def snippets(page: Path) -> list[Snippet]:
    """The blocks of a page; a block of text right behind one is what it prints."""
    text = page.read_text(encoding="utf-8")
    found: list[Snippet] = []
    end = 0
    for match in _FENCE.finditer(text):
        between, kind = text[end : match.start()], match[1]
        if kind == "python":
            found.append(Snippet(match[2], text.count("\n", 0, match.start(2)) + 1, None))
        elif kind == "text" and found and not between.strip() and end:
            last = found.pop()
            found.append(Snippet(last.code, last.line, match[2]))
        end = match.end() if kind == "python" else 0
    return found


def run(page: Path, folder: Path) -> Iterator[tuple[Snippet, str]]:
    """Run the blocks of a page as one script in ``folder``; each with what it printed.

    The script is a file with the page's own line numbers, since the compiler reads sources.
    """
    blocks = snippets(page)
    lines: list[str] = []
    for block in blocks:
        lines += [""] * (block.line - 1 - len(lines))
        lines += block.code.splitlines()
    script = folder / f"{page.stem.lower()}_page.py"
    script.write_text("\n".join(lines) + "\n", encoding="utf-8")
    names: dict[str, Any] = {"__name__": script.stem, "__file__": str(script)}
    for block in blocks:
        out = io.StringIO()
        padded = "\n" * (block.line - 1) + block.code
        with redirect_stdout(out):
            exec(compile(padded, str(script), "exec"), names)
        yield block, out.getvalue()


def same(expected: str, printed: str) -> bool:
    """Whether the text is as expected, where ``...`` stands for anything."""
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    return doctest.OutputChecker().check_output(expected, printed, flags)
