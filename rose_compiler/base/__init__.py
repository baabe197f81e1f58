"""Standard library only: errors, settings, remarks, profiles and machines as plain data."""

from __future__ import annotations

from rose_compiler.base import catalogue as catalogue  # fills errors.CATALOGUE
