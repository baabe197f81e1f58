"""Functions of the user's that may put another tensor in the place of one, and those that can't."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import pytest

from rose_compiler.frontend.rebinding import writes_in_place
from rose_compiler.ir.ops import Op, Signature


def ema(table: Any, key: str, value: Any) -> None:
    table[key] = 0.9 * table[key] + 0.1 * value


def dropped(table: Any, key: str, value: Any) -> None:
    del table[key]


def appended(table: Any, key: str, value: Any) -> None:
    table.append(value)


def appended_below(table: Any, key: str, value: Any) -> None:
    value = []
    table.value.append(value)


def appended_or_new(table: Any, key: str, value: Any) -> None:
    if not table:
        table = []
    table.append(value)


def through_another(table: Any, key: str, value: Any) -> None:
    ema(table, key, value)


def collected(table: Any, key: str, value: Any) -> list[Any]:
    found = []
    for k, v in table.items():
        found.append(v * len(k))
    return found


def block(fn: Callable[..., Any]) -> Op:
    """An operation that calls a function."""
    statements = ast.parse(f"{fn.__name__}(table, key, value)").body
    return Op(Signature("blk"), attributes={"stmts": statements, "globals": globals()})


@pytest.mark.parametrize(
    "fn", [ema, dropped, appended, appended_below, appended_or_new, through_another]
)
def test_a_function_that_stores_an_item_may_replace_a_tensor(fn: Callable[..., Any]) -> None:
    assert not writes_in_place(block(fn))


def test_an_item_of_a_tensor_may_be_stored() -> None:
    assert writes_in_place(block(ema), items=True)
    assert not writes_in_place(block(appended), items=True)


def test_a_list_of_its_own_is_a_functions_to_fill() -> None:
    assert writes_in_place(block(collected))
