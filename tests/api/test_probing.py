"""On which values an operation is tried on rows at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.fx as fx

from rose_compiler.api.probing import EXACT_TRIALS, TRIALS, Prober, trials
from rose_compiler.ir import facts
from rose_compiler.ir.builder import Builder
from rose_compiler.ir.facts import Spec
from rose_compiler.ir.ops import OpTable
from rose_compiler.ir.program import Program
from rose_compiler.testing.samples import block, graph_op

BATCH = {"x": 0, "return.0": 0}


def program_of(op: Any, spec: Spec) -> tuple[Program, fx.Node]:
    top = Builder()
    x = top.placeholder("x", "value", spec=spec)
    call = top.call(op, x)
    facts.put(call, spec=spec)
    table = OpTable()
    table.add(op)
    return Program("act", top.finish((call,)), table, ("x",), ()), call


def test_small_batches_are_probed_more_often_where_every_bit_counts() -> None:
    assert trials(4, exact=False) == TRIALS
    assert trials(4, exact=True) == EXACT_TRIALS
    assert trials(32, exact=True) == 16
    assert trials(100_000, exact=True) == TRIALS


def sums(x: torch.Tensor) -> torch.Tensor:
    """Depends on the number of rows, but where the second column is small."""
    return x + torch.where(x[:, 1:].abs() > 0.2, float(x.shape[0]), 0.0)


@pytest.mark.parametrize("kind", ["tensor", "array"])
def test_what_was_zero_when_it_was_seen_is_tried_on_other_values(kind: str) -> None:
    seen = torch.tensor([[0.5, 0.0]] * 4)
    array = kind == "array"
    op = block(
        "act",
        (lambda x: sums(torch.from_numpy(x)).numpy()) if array else sums,
        ("x",),
        ("y = act(x)",),
        batch=BATCH,
    )
    program, call = program_of(op, Spec(kind, "", (4, 2), "float32"))
    probe = Prober(program, {"x": seen.numpy() if array else seen}, exact=True)
    assert probe(call, (2, 2)) == "differ"


def test_whole_numbers_that_nobody_has_seen_are_places_in_a_choice() -> None:
    op = graph_op(
        "pick",
        lambda x: torch.gather(torch.cat([x, x], 1), 1, x),
        ("x",),
        1,
        batch=BATCH,
        examples=(torch.zeros(8, 1, dtype=torch.int64),),
    )
    program, call = program_of(op, Spec("tensor", "Tensor", (8, 1), "int64"))
    assert Prober(program, {}, exact=True)(call, (4, 4)) == "bits"
