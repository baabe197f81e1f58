"""A table of what was used last."""

from __future__ import annotations

from rose_compiler.base.latest import latest


def test_what_was_used_longest_ago_goes() -> None:
    table: dict[str, int] = {}
    made: list[str] = []

    def get(key: str) -> int:
        return latest(table, key, lambda: made.append(key) or len(made), 2)

    assert [get(k) for k in "abacba"] == [1, 2, 1, 3, 4, 5]
    assert made == list("abcba")
    assert list(table) == ["b", "a"]
