"""Programs as text, with parts replaced."""

from __future__ import annotations

from collections.abc import Iterable


def changed(text: str, changes: Iterable[tuple[str, str]]) -> str:
    """The text with each first one replaced by the second, and none of them missing."""
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return text
