"""Compiles training loops of embodied reinforcement learning; they train the same, faster."""

from __future__ import annotations

__version__ = "0.1.0"
