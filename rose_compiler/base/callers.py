"""Warnings at the line of the user's from which this package was called."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

_PACKAGE = __name__.partition(".")[0]


def warn_caller(text: str) -> None:
    """A ``UserWarning``; its place is the innermost line outside this package."""
    level = 2  # whoever called this function
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == _PACKAGE:
        level, frame = level + 1, frame.f_back
    warnings.warn(f"{_PACKAGE}: {text}", stacklevel=level)
