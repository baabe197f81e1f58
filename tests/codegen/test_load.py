"""Loaded code: tracebacks, debuggers, edited copies."""

from __future__ import annotations

import ast
import gc
import inspect
import io
import linecache
import pdb
import traceback
from pathlib import Path
from typing import Any

import pytest

from rose_compiler.base.errors import ConfigError
from rose_compiler.codegen import Emitted, emit, load
from rose_compiler.ir.block import make_block_function
from rose_compiler.ir.ops import Op, OpTable, Signature
from rose_compiler.ir.parse import parse
from rose_compiler.ir.program import Builder, Program
from rose_compiler.runtime.support import Runtime

USER = """\
def fn(x):
    y = x - 1
    z = 10 // y
    return z
"""


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    path = tmp_path / "user.py"
    path.write_text(USER)
    return path


def from_file(path: Path) -> Program:
    """The statements of the function above, an operation each."""
    statements = ast.parse(USER).body[0].body  # type: ignore[attr-defined]
    top, ops, scope = Builder(), OpTable(), {"__name__": "user"}
    value = top.placeholder("x", "value")
    for name, read, stmt in (("y", "x", statements[0]), ("z", "y", statements[1])):
        function = make_block_function(f"b_{name}", (stmt,), [read], [name], str(path), scope)
        attributes = {
            "stmts": (stmt,),
            "inputs": (read,),
            "outputs": (name,),
            "filename": str(path),
            "globals": scope,
        }
        op = Op(Signature(f"b_{name}", (read,), (), ()), function, attributes=attributes)
        value = top.call(ops.add(op), value, name=name)
    return Program("fn", top.finish(value), ops, ("x",), ())


def emitted() -> Emitted:
    text = "@op(reads=[], writes=[])\ndef f(x): ...\ndef fn(x):\n    y = f(x)\n    return y"
    return emit(parse(text, {"f": lambda x: 1 // x}))


def test_a_traceback_shows_the_users_line_and_the_emitted_line(user_file: Path) -> None:
    run = load(emit(from_file(user_file)))
    assert run(Runtime(), 3) == 5
    with pytest.raises(ZeroDivisionError) as caught:
        run(Runtime(), 1)
    shown = "".join(traceback.format_exception(caught.value))
    assert f'File "{user_file}", line 3' in shown
    assert "z = 10 // y" in shown
    assert "z = fn_line" in shown
    assert '"<rose:fn' in shown


def test_the_text_is_there_for_inspection() -> None:
    made = emitted()
    run = load(made)
    assert inspect.getsource(run) == made.source[made.source.index("def run") :]
    assert linecache.getline(made.filename, 4).strip() == "def run(rt, x):"
    linecache.checkcache(made.filename)  # pdb does so before it lists
    assert linecache.getline(made.filename, 4).strip() == "def run(rt, x):"


def test_a_debugger_steps_through_it() -> None:
    run = load(emitted())
    out, commands = io.StringIO(), io.StringIO("n\np y + 40\nc\n")
    debugger = pdb.Pdb(stdin=commands, stdout=out, nosigint=True)
    debugger.use_rawinput = False
    assert debugger.runcall(run, Runtime(), 1) == 1
    text = out.getvalue()
    assert "y = f(x)" in text
    assert "return y" in text
    assert "41" in text


def test_the_text_goes_with_the_function() -> None:
    made = emitted()
    run = load(made)
    assert made.filename in linecache.cache
    del run
    gc.collect()
    assert made.filename not in linecache.cache


def test_two_programs_of_one_name_are_told_apart() -> None:
    assert emitted().filename != emitted().filename


def test_an_edited_copy_runs_in_its_place(tmp_path: Path) -> None:
    path, made = tmp_path / "edited.py", emitted()
    assert load(made, edit=path)(Runtime(), 1) == 1
    assert path.read_text() == made.source
    path.write_text(made.source.replace("return y", "return y + 100"))
    assert load(made, edit=path)(Runtime(), 1) == 101
    with pytest.raises(ZeroDivisionError) as caught:
        load(made, edit=path)(Runtime(), 0)
    assert any(f.filename == str(path) for f in traceback.extract_tb(caught.value.__traceback__))


@pytest.mark.parametrize(
    ("text", "complaint"), [("def run(:\n", "line 1"), ("x = 1\n", "no function `run`")]
)
def test_a_copy_that_can_not_run_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "edited.py"
    path.write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        load(emitted(), edit=path)


def test_values_and_states_are_handed_over_in_order() -> None:
    text = "@op(reads=[], writes=[])\ndef f(x): ...\ndef fn(x, y, *, s, u):\n    return x, y"
    run = load(emit(parse(text)))
    names = list(inspect.signature(run).parameters)
    assert names == ["rt", "x", "y", "s", "u"]
    result: Any = run(Runtime(), 1, 2, [], [])
    assert result == (1, 2)
