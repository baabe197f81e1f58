"""Writes emitted source: indentation, comments, and what each line belongs to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rose_compiler.base.errors import SourceLocation
from rose_compiler.base.faultmap import Level

WIDTH = 99


class Writer:
    """The lines of a module under construction.

    ``levels`` is what the fault map is told about each line written while it is set.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.faults: dict[int, tuple[Level, ...]] = {}
        self.places: dict[int, SourceLocation] = {}
        self.levels: tuple[Level, ...] = ()
        self._indent = 0

    def line(self, text: str = "", where: SourceLocation | None = None, source: str = "") -> None:
        """One statement, with the user's line and statement as a comment."""
        start = len(self.lines)
        self.lines += self._laid_out(text)
        if where is not None:
            self.lines[-1] = self._commented(self.lines[-1], where, source)
        for number in range(start + 1, len(self.lines) + 1):
            if self.levels:
                self.faults[number] = self.levels
            if where is not None:
                self.places[number] = where

    def _laid_out(self, text: str) -> list[str]:
        pad = "    " * self._indent
        if not text or len(pad) + len(text) <= WIDTH or not text.endswith(")"):
            return [pad + text if text else ""]
        # a long call: its arguments on lines of their own
        head, _, arguments = text.partition("(")
        found = [f"{pad}{head}("]
        row = ""
        for part in _split(arguments[:-1]):
            if row and len(pad) + 4 + len(row) + len(part) + 2 > WIDTH:
                found.append(f"{pad}    {row}")
                row = ""
            row += ("" if not row else " ") + part + ","
        return [*found, f"{pad}    {row}", f"{pad})"] if row else [pad + text]

    @staticmethod
    def _commented(line: str, where: SourceLocation, source: str) -> str:
        comment = f"  # {where.file.rpartition('/')[2]}:{where.line}"
        if source and source not in line:
            room = WIDTH + 12 - len(line) - len(comment) - 2
            if room >= 12:
                comment += f"  {source}" if len(source) <= room else f"  {source[: room - 2]} …"
        return line + comment

    @contextmanager
    def block(self, head: str, where: SourceLocation | None = None) -> Iterator[None]:
        """``head`` and what is written inside, indented; ``pass`` where that is nothing."""
        self.line(head, where)
        size = len(self.lines)
        self._indent += 1
        try:
            yield
            if all(not line.strip() or line.lstrip().startswith("#") for line in self.lines[size:]):
                self.line("pass")
        finally:
            self._indent -= 1

    def open(self, head: str) -> None:
        """Begin a block that :meth:`close` ends."""
        self.line(head)
        self._indent += 1

    def close(self) -> None:
        self._indent -= 1

    @property
    def text(self) -> str:
        return "\n".join(self.lines) + "\n"


def _split(arguments: str) -> list[str]:
    """Arguments cut at the commas of the outermost level, outside strings."""
    parts, depth, start, quote = [], 0, 0, ""
    for at, char in enumerate(arguments):
        if quote:
            if char == quote and arguments[at - 1] != "\\":
                quote = ""
        elif char in "\"'":
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(arguments[start:at].strip())
            start = at + 1
    parts.append(arguments[start:].strip())
    return [p for p in parts if p]
