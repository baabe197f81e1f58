"""Makes `bench` importable: it is no part of the installed package."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[2])

# last: the links at the root must not hide anything
if ROOT not in sys.path:
    sys.path.append(ROOT)
