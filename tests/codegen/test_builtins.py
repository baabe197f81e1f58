"""Every built-in operation as text does what the reference executor makes of it."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from rose_compiler.codegen import builtins, emit, load
from rose_compiler.ir import interp
from rose_compiler.ir.ops import BUILTINS
from rose_compiler.ir.parse import parse
from rose_compiler.runtime.support import Runtime


class Env:
    def __init__(self) -> None:
        self.parts = [[1], [2]]

    def shards(self) -> list[list[int]]:
        return self.parts

    def merge(self, results: list[Any]) -> Any:
        return sum(results)


CASES = {
    "rows": ("y = rows(x, 1, 3)\nreturn y", 1),
    "concat": ("y = concat(x, x)\nreturn y", 1),
    "randn": ('y = randn(2, 3, torch.float32, torch.device("cpu"))\nreturn y', 1),
    "draw_noise": (
        'y = draw_noise("uniform", (2, 3), (0.0, 2.0), torch.float32, torch.device("cpu"))\n'
        "return y",
        1,
    ),
    "snapshot": ("y = snapshot(x)\nreturn y", 1),
    "merge": ("y = merge(env, 1, 2)\nreturn y", 1),
    "append": ("z: state = new_list()\nappend(z, x)\nappend(z, x)\ny = join_rows(z)\nreturn y", 1),
    "split_rows": (
        "z: state = new_list()\nappend(z, x)\nappend(z, x)\nw = concat(x, x)\n"
        "y = split_rows(w, z)\nv = piece(y, 4, 2, 2)\nu = piece(y, 1, 0, 1)\nreturn y, v, u",
        1,
    ),
    "state": ('s = state(env, "parts.1.0")\ny = s + 3\nreturn y', 1),
    "shard": ("s = shard(env, 1)\ny = s[0]\nreturn y", 1),
}


@pytest.mark.parametrize("value", [np.arange(4.0), torch.arange(4.0)], ids=["array", "tensor"])
@pytest.mark.parametrize("name", CASES)
def test_the_text_of_a_builtin(name: str, value: Any) -> None:
    body = CASES[name][0].replace("\n", "\n    ")
    program = parse(f"def fn(x, *, env):\n    {body}\n")
    x, y = copy.deepcopy(value), copy.deepcopy(value)
    torch.manual_seed(3)
    want = interp.run(program, (x,), {"env": Env()})
    torch.manual_seed(3)
    got = load(emit(program))(Runtime(), y, Env())
    assert str(got) == str(want)


def test_none_is_forgotten() -> None:
    structure = {"loop", "branch", "break_if", "continue_if", "state", "shard"}
    written = {op.name for op in builtins._WRITERS}
    for name in set(BUILTINS) - structure - written:
        assert BUILTINS[name].op.bound, f"{name} has neither a text nor a function"
        assert name in CASES
