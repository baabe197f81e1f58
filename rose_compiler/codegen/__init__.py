"""From a program to a readable Python function: schedule, emit, load."""

from __future__ import annotations

from rose_compiler.codegen.emit import Emitted, emit
from rose_compiler.codegen.load import load
from rose_compiler.codegen.schedule import Schedule, schedule

__all__ = ["Emitted", "Schedule", "emit", "load", "schedule"]
