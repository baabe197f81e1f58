"""Readings of the clock stay where the user took them."""

from __future__ import annotations

import time

import torch

import rose_compiler


def timed(model: torch.nn.Module, x: torch.Tensor, rows: list[tuple[int, float]]) -> torch.Tensor:
    """Two iterations, the second part of each timed; nothing else in the loop touches the host."""
    for it in range(2):
        for _ in range(3):
            x = model(x)
        start = time.perf_counter()
        for _ in range(3):
            x = model(x)
        rows.append((it, time.perf_counter() - start))
    return x


def once(x: torch.Tensor) -> tuple[float, float, torch.Tensor]:
    """One iteration between two readings."""
    start = time.perf_counter()
    for _ in range(4):
        x = x + 1
    took = time.perf_counter() - start
    return start, took, x


def test_a_reading_is_not_hoisted() -> None:
    model, rows = torch.nn.Linear(2, 2), []
    compiled = rose_compiler.compile(timed, numerics="bitwise", tune=False)
    for _ in range(2):
        compiled(model, torch.ones(1, 2), rows)
    assert len(rows) == 4
    assert all(took > 0 for _, took in rows)
    moved = [r.why for r in compiled._schedule().history.remarks.applied()]
    assert not [why for why in moved if "perf_counter" in why], moved


def test_every_call_reads_anew() -> None:
    compiled = rose_compiler.compile(once, tune=False)
    readings = [compiled(torch.zeros(1))[0] for _ in range(3)]
    assert readings == sorted(set(readings))
