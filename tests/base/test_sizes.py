"""Amounts of memory as people write them."""

from __future__ import annotations

import pytest

from rose_compiler.base.sizes import parse_bytes, show_bytes


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("17", 17),
        ("2GiB", 2 * 1024**3),
        ("2 gib", 2 * 1024**3),
        ("1.5 MiB", 3 * 512 * 1024),
        ("3MB", 3_000_000),
        ("4k", 4096),
        ("1TiB", 1024**4),
    ],
)
def test_units(text: str, found: int) -> None:
    assert parse_bytes(text) == found


@pytest.mark.parametrize("text", ["", "GiB", "two GiB", "-1 MiB", "1 GiB 2", "1 PiBs", "0x10"])
def test_what_is_no_amount(text: str) -> None:
    with pytest.raises(ValueError, match="no amount"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("amount", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (-2 * 1024**2, "-2 MiB"),
     (300 * 1024**2, "300 MiB"), (5 * 1024**4, "5 TiB")],
)  # fmt: skip
def test_shown(amount: int, text: str) -> None:
    assert show_bytes(amount) == text
