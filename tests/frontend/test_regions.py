"""Rows that an operation reads or writes: those of a state, not those of a view or part of one."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rose_compiler.ir.deps import Dependences
from rose_compiler.ir.program import is_call, op_of
from rose_compiler.testing.capturing import first_trip


def read_row(net: Any, buf: Any, out: Any, x: Any) -> None:
    for k in range(4):
        x = net(x)
        out.append(buf.r[k].sum() + 1)


def write_row(net: Any, buf: Any, out: Any, x: Any) -> None:
    for k in range(4):
        x = net(x)
        buf.r[k] = x[0] + 1


def write_cell(net: Any, buf: Any, out: Any, x: Any) -> None:
    for k in range(4):
        x = net(x)
        buf.r[k, 0] = x[0, 0] + 1


def read_column(net: Any, buf: Any, out: Any, x: Any) -> None:
    for k in range(4):
        x = net(x)
        out.append(buf.r.T[k].sum() + 1)


def write_column(net: Any, buf: Any, out: Any, x: Any) -> None:
    for k in range(4):
        x = net(x)
        buf.r.T[k] = x[0] + 1


def write_part(net: Any, buf: Any, out: Any, x: Any) -> None:
    for k in range(4):
        x = net(x)
        buf.r[k][0] = x[0, 0] + 1


def add_to_part(net: Any, buf: Any, out: Any, x: Any) -> None:
    for k in range(4):
        x = net(x)
        buf.r[k][0] += 1


def write_flattened(net: Any, buf: Any, out: Any, x: Any) -> None:
    for k in range(4):
        x = net(x)
        buf.r.view(16)[k] = x[0, 0] + 1


def write_column_of_a_local(net: Any, buf: Any, out: Any, x: Any) -> Any:
    r = torch.zeros(4, 4)
    for k in range(4):
        x = net(x)
        r.T[k] = x[0] + 1
    return r


def write_part_of_a_local(net: Any, buf: Any, out: Any, x: Any) -> Any:
    r = torch.zeros(4, 4)
    for k in range(4):
        x = net(x)
        r[k][0] = x[0, 0] + 1
    return r


def write_row_of_a_local(net: Any, buf: Any, out: Any, x: Any) -> Any:
    r = torch.zeros(4, 4)
    for k in range(4):
        x = net(x)
        r[k] = x[0] + 1
    return r


def write_array_column(net: Any, buf: Any, out: Any, x: Any) -> None:
    for k in range(4):
        x = net(x)
        buf.n.T[k] = float(x[0, 0].detach()) + 1


def regions(fn: Callable[..., Any]) -> set[bool]:
    """Whether what is written, or else read, of what is indexed by the trip are rows of it."""
    buf = SimpleNamespace(r=torch.zeros(4, 4), n=np.zeros((4, 4), np.float32))
    program = first_trip(fn, nn.Linear(4, 4), buf, [], torch.zeros(4, 4)).captured.program
    deps = Dependences(program)
    indexed = (n for n in program.nodes() if is_call(n) and "[k" in "".join(op_of(n).source))
    found = [e for n in indexed for e in deps.effects(n)]
    found = [e for e in found if e.state.startswith(("buf.r", "buf.n", "%"))]
    return {e.region is not None for e in [e for e in found if e.write] or found}


@pytest.mark.parametrize("fn", [read_row, write_row, write_cell, write_row_of_a_local])
def test_an_index_of_a_tensor_tells_which_rows(fn: Callable[..., Any]) -> None:
    assert regions(fn) == {True}


@pytest.mark.parametrize(
    "fn",
    [
        *(read_column, write_column, write_flattened, write_array_column, write_part),
        *(add_to_part, write_column_of_a_local, write_part_of_a_local),
    ],
)
def test_an_index_of_a_view_tells_nothing_of_rows(fn: Callable[..., Any]) -> None:
    assert regions(fn) == {False}
