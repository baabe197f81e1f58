"""Amounts of memory as text: ``"2GiB"`` and back."""

from __future__ import annotations

import re

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", 1):
    _UNITS |= {f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power, _letter: 1024**_power}
_TEXT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """The bytes that a number with a unit means: ``KiB`` is 1024 bytes (IEC 80000-13), ``KB`` is
    1000, ``K`` alone 1024, no unit means bytes.

    Raises:
        ValueError: for text that is none.
    """
    found = _TEXT.fullmatch(text)
    if found is None or found[2].lower() not in _UNITS:
        raise ValueError(f"{text!r} is no amount of memory")
    return round(float(found[1]) * _UNITS[found[2].lower()])


def show_bytes(amount: float) -> str:
    """An amount with three digits or so: ``"1.50 MiB"``; with a sign where it is negative."""
    size = abs(amount)
    sign = "-" if amount < 0 else ""
    if size < 1024:
        return f"{sign}{size:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1024:
            return f"{sign}{size:.3g} {unit}" if size < 100 else f"{sign}{size:.0f} {unit}"
    return f"{sign}{size / 1024:.3g} TiB"
