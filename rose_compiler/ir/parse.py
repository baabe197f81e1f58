"""Text back to programs. The text is data: it is read by :mod:`ast` and never run.

``docs/ir.md`` has the grammar. Names in call position are operations, all others are values; a name
of an enclosing body is captured where it is used.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import Any, Never

from rose_compiler.ir import checks as checks  # registers what traced graphs may call
from rose_compiler.ir.ops import OpTable
from rose_compiler.ir.parse_body import Body
from rose_compiler.ir.parse_expr import Expressions, Reader
from rose_compiler.ir.parse_ops import decorator, read_op
from rose_compiler.ir.program import Program

_STAGES = ("captured", "scheduled")


def parse(
    text: str, bind: Mapping[str, Callable[..., Any]] | None = None, *, file: str = "<dump>"
) -> Program:
    """Read a program from the text of a dump.

    ``bind`` gives implementations to operations by name. Traced operations run without; any other
    one raises when it is run unbound. ``file`` is what messages call the text.

    Raises:
        ParseError: with the line at fault, when the text is no program.
    """
    reader = Reader(text.split("\n"), file)
    try:
        return _module(_tree(text, reader), reader, dict(bind or {}))
    except (RecursionError, MemoryError):
        raise reader.error(1, "the text is nested too deeply") from None


def _tree(text: str, reader: Reader) -> ast.Module:
    try:
        return ast.parse(text, filename=reader.file)
    except SyntaxError as error:
        raise reader.error(error.lineno or 1, f"not even Python: {error.msg}") from None
    except ValueError as error:  # null bytes; surrogates, which can't be encoded
        raise reader.error(1, f"not even Python: {error}") from None


def _module(tree: ast.Module, reader: Reader, bind: Mapping[str, Callable[..., Any]]) -> Program:
    main: ast.FunctionDef | None = None
    about: dict[str, ast.expr] = {}
    for statement in tree.body:
        if not isinstance(statement, ast.FunctionDef):
            raise reader.error(statement, "a dump holds functions only")
        if main is not None:
            raise reader.error(statement, "the program must be the last function")
        word, told = decorator(statement, reader)
        if word == "op":
            reader.ops[statement.name] = read_op(statement, told, reader, bind)
        elif word in ("", "program"):
            main, about = statement, told
        else:
            raise reader.error(statement, f"unknown decorator {word!r}", expected="op or program")
    if main is None:
        raise reader.error(len(reader.lines), "the program is missing: a function without `@op`")
    constants = {word: Expressions(reader).constant(expr) for word, expr in about.items()}
    name, stage = constants.pop("name", main.name), constants.pop("stage", "captured")
    if constants or type(name) is not str or stage not in _STAGES:
        _bad_about(main, reader)
    reader.taken |= _names(main)
    body = Body(reader)
    values, states = body.parameters(main)
    root = body.root(main)
    table = OpTable({op.name: op for op in reader.ops.values()})
    return Program(name, root, table, values, states, stage)


def _names(main: ast.FunctionDef) -> set[str]:
    """Every name that the text gives to a node."""
    found = set()
    for node in ast.walk(main):
        match node:
            case (
                ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.keyword(arg=str(name))
            ):
                found.add(name)
            case ast.For(iter=header):
                while isinstance(header, ast.BinOp):
                    header = header.left
                if isinstance(header, ast.Call) and isinstance(header.func, ast.Name):
                    found.add(header.func.id)
    return found


def _bad_about(main: ast.FunctionDef, reader: Reader) -> Never:
    raise reader.error(
        main.decorator_list[0],
        "`@program(...)` with arguments that it does not take",
        expected=f'name="...", stage= one of {", ".join(_STAGES)}',
    )
