"""Functions made of the user's own statements: names, places and unbound variables."""

from __future__ import annotations

import ast
import traceback
from typing import Any

import pytest

from rose_compiler.ir.block import assigned_names, definitely_assigned, make_block_function
from rose_compiler.ir.ops import UNBOUND


def statements(text: str, line: int = 1) -> list[ast.stmt]:
    return ast.increment_lineno(ast.parse(text), line - 1).body


def block(text: str, inputs: str, outputs: str, *, line: int = 1, **more: Any) -> Any:
    scope = more.pop("globals", {})
    return make_block_function(
        "f", statements(text, line), inputs.split(), outputs.split(), "user.py", scope, **more
    )


def test_results_by_number_of_outputs() -> None:
    assert block("c = a + b", "a b", "c")(1, 2) == 3
    assert block("c = a + b; d = a * b", "a b", "c d")(3, 2) == (5, 6)
    assert block("a.append(1)", "a", "")([]) is None


def test_globals_are_read_when_the_function_runs() -> None:
    scope: dict[str, Any] = {"k": 1}
    f = block("y = x + k", "x", "y", globals=scope)
    assert f(1) == 2
    scope["k"] = 10
    assert f(1) == 11
    assert "f" not in scope


def test_an_error_shows_the_users_line() -> None:
    f = block("y = x\nz = y / 0", "x", "z", line=40)
    with pytest.raises(ZeroDivisionError) as caught:
        f(1)
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert (last.filename, last.lineno) == ("user.py", 41)


def test_an_unbound_input_raises_where_it_is_read_and_only_there() -> None:
    f = block("if c:\n    y = x", "c x", "y", line=7, maybe_unbound={"x"})
    assert f(True, 5) == 5
    assert f(False, UNBOUND) is UNBOUND
    with pytest.raises(UnboundLocalError, match="'x'") as caught:
        f(True, UNBOUND)
    assert traceback.extract_tb(caught.value.__traceback__)[-1].lineno == 8


def test_an_unbound_input_passes_through_a_skipped_assignment() -> None:
    f = block("if c:\n    x = 1", "c x", "x", maybe_unbound={"x"})
    assert f(True, UNBOUND) == 1
    assert f(False, UNBOUND) is UNBOUND
    assert f(False, 4) == 4


def test_private_names_are_those_of_the_class() -> None:
    class Agent:
        def __init__(self) -> None:
            self.__rate = 3

    f = block("y = self.__rate", "self", "y", owner="Agent")
    assert f(Agent()) == 3


def test_the_statements_are_not_changed() -> None:
    stmts = statements("y = x + 1", 12)
    before = ast.dump(stmts[0], include_attributes=True)
    make_block_function("f", stmts, ["x"], ["y"], "user.py", {}, maybe_unbound=["x"])
    assert ast.dump(stmts[0], include_attributes=True) == before


@pytest.mark.parametrize(
    ("text", "sure"),
    [
        ("a = 1", "a"),
        ("a = b = 1\nc, (d, *e) = x", "a b c d e"),
        ("if p:\n    a = b = 1\nelse:\n    a = 2", "a"),
        ("for i in xs:\n    a = 1", ""),
        ("while (n := f()):\n    a = 1", ""),
        ("try:\n    a = 1\nexcept E as e:\n    pass", ""),
        ("a = 1\ndel a", ""),
        ("a: int = 1\nb: int", "a"),
        ("p and (a := 1)", ""),
        ("(a := 1)", "a"),
        ("with m as a:\n    b = 1", "a"),
        ("x[0] = 1\no.y = 2", ""),
        ("import os.path\nfrom m import q as r", "os r"),
    ],
)
def test_definitely_assigned(text: str, sure: str) -> None:
    assert definitely_assigned(statements(text)) == set(sure.split())


def test_assigned_names_keeps_inner_scopes_apart() -> None:
    text = "a = [b for b in c]\nd = lambda e: e\nfor f in g: h += 1\n[(i := j) for j in k]\n"
    assert assigned_names(statements(text)) == {"a", "d", "f", "h", "i"}
