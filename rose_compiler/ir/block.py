"""Functions made of the user's own statements.

A block operation keeps the user's statements as syntax trees with their line numbers.
:func:`make_block_function` compiles them under the user's file name, so that tracebacks and
debuggers show the line that the user wrote.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import CodeType, FunctionType
from typing import Any

from rose_compiler.ir.ops import UNBOUND

_SENTINEL = "_rose_unbound"
_MARK = "_rose_statements"


def make_block_function(
    name: str,
    stmts: Sequence[ast.stmt],
    inputs: Sequence[str],
    outputs: Sequence[str],
    filename: str,
    globals: dict[str, Any],
    *,
    maybe_unbound: Collection[str] = (),
    constants: Mapping[str, Any] | None = None,
    owner: str | None = None,
    within: CodeType | None = None,
) -> FunctionType:
    """A function that runs ``stmts`` with ``inputs`` as parameters and returns ``outputs``.

    Globals are looked up in ``globals`` itself when the function runs, so rebinding them later is
    seen. The result is the one output, a tuple of several, or ``None`` without outputs. An output
    that no statement assigned on the way taken is returned as ``UNBOUND``. An input named in
    ``maybe_unbound`` may be handed over as ``UNBOUND``: the variable is then unbound in the
    statements too, and reading it raises the interpreter's own ``UnboundLocalError`` at the user's
    line. ``constants`` are further names and what they stand for. ``owner`` is the class whose
    method the statements stem from, for names like ``__x``, ``within`` the code of the user's
    function that they stem from: who asks a frame, as loggers do, is told its name.

    The statements are copied, not changed. Raises ``SyntaxError`` for statements that can't stand
    in a function.
    """
    body = [copy.deepcopy(s) for s in stmts]
    first = body[0].lineno if body else 1
    last = (body[-1].end_lineno or body[-1].lineno) if body else first
    unset = [n for n in inputs if n in maybe_unbound]
    lead = _at(first, ast.parse("".join(f"if {n} is {_SENTINEL}: del {n}\n" for n in unset)).body)
    bound = definitely_assigned(body, set(inputs) - set(unset))
    unsure = [n for n in dict.fromkeys(outputs) if n not in bound]
    text = "".join(
        f"try: {n}\nexcept UnboundLocalError: {n} = {_SENTINEL}\n" for n in unsure
    ) + _returned(outputs)
    fixed = dict(constants or {})
    if unset or unsure:
        fixed[_SENTINEL] = UNBOUND
    function = ast.FunctionDef(
        name=name,
        args=ast.arguments(
            posonlyargs=[],
            args=[ast.arg(n) for n in (*inputs, *fixed)],
            kwonlyargs=[],
            kw_defaults=[],
            defaults=[],
        ),
        body=[*lead, *body, *_at(last, ast.parse(text).body)],
        decorator_list=[],
        lineno=first,
        col_offset=0,
        end_lineno=last,
        end_col_offset=0,
    )
    top: ast.stmt = function
    if owner is not None:  # the compiler mangles private names inside a class of that name
        top = ast.ClassDef(
            name=owner,
            bases=[],
            keywords=[],
            body=[function],
            decorator_list=[],
            lineno=first,
            col_offset=0,
            end_lineno=last,
            end_col_offset=0,
        )
    module = ast.fix_missing_locations(ast.Module(body=[top], type_ignores=[]))
    _close_ranges(module)
    code = compile(module, filename, "exec", dont_inherit=True)
    own = _code_named(code, name)
    if within is not None and not within.co_name.startswith("__getattr"):
        # methods of those names are told from others by them
        own = own.replace(co_name=within.co_name, co_qualname=within.co_qualname)
    made = FunctionType(own, globals, name, tuple(fixed.values()))
    made.__dict__[_MARK] = tuple(stmts)
    return made


def is_made(function: Any) -> bool:
    """Whether a function was made of statements: no text of its own stands in a file."""
    return _MARK in getattr(function, "__dict__", ())


def runs_statements(function: Any, stmts: Sequence[ast.stmt]) -> bool:
    """Whether a function was made of exactly these statements, and so does what they say."""
    made_of = getattr(function, _MARK, None)
    return made_of is not None and len(made_of) == len(stmts) and all(map(_is, made_of, stmts))


def _is(a: ast.stmt, b: ast.stmt) -> bool:
    return a is b


def _returned(outputs: Sequence[str]) -> str:
    if not outputs:
        return "return None"
    return "return " + (outputs[0] if len(outputs) == 1 else f"({', '.join(outputs)})")


def _at(line: int, stmts: list[ast.stmt]) -> list[ast.stmt]:
    for stmt in stmts:
        for node in ast.walk(stmt):
            if isinstance(node, ast.expr | ast.stmt | ast.excepthandler):
                node.lineno = node.end_lineno = line
                node.col_offset = node.end_col_offset = 0
    return stmts


def _close_ranges(tree: ast.AST) -> None:
    """Let no node end before it begins, as made-up nodes may inside of the user's."""
    for node in ast.walk(tree):
        end = getattr(node, "end_lineno", None)
        if end is not None and end < node.lineno:  # type: ignore[attr-defined]
            node.end_lineno = node.lineno  # type: ignore[attr-defined]
            node.end_col_offset = node.col_offset  # type: ignore[attr-defined]


def _code_named(code: CodeType, name: str) -> CodeType:
    for const in code.co_consts:
        if isinstance(const, CodeType):
            if const.co_name == name:
                return const
            try:
                return _code_named(const, name)
            except LookupError:
                continue
    raise LookupError(name)


def assigned_names(stmts: Iterable[ast.stmt]) -> set[str]:
    """Every name that the statements may bind or delete in their own scope."""
    found: set[str] = set()
    for stmt in stmts:
        _collect(stmt, found)
    return found


def _collect(node: ast.AST, found: set[str]) -> None:
    if isinstance(node, ast.Name):
        if not isinstance(node.ctx, ast.Load):
            found.add(node.id)
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        found.add(node.name)
        return
    elif isinstance(node, ast.Lambda):
        return
    elif isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        # targets belong to the comprehension; a walrus inside binds outside of it
        for inner in ast.walk(node):
            if isinstance(inner, ast.NamedExpr):
                found.add(inner.target.id)
        return
    elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
        if node.name:
            found.add(node.name)
    elif isinstance(node, ast.MatchMapping):
        if node.rest:
            found.add(node.rest)
    elif isinstance(node, ast.alias):
        found.add(node.asname or node.name.split(".")[0])
    for child in ast.iter_child_nodes(node):
        _collect(child, found)


def definitely_assigned(stmts: Sequence[ast.stmt], bound: Iterable[str] = ()) -> set[str]:
    """Names bound whenever control leaves ``stmts`` at their end, given those bound before.

    Loops count as skipped and ``try`` bodies as cut short, so the answer errs on the small side.
    """
    known = set(bound)
    for stmt in stmts:
        if isinstance(stmt, ast.If):
            known |= _walrus(stmt.test)
            known = definitely_assigned(stmt.body, known) & definitely_assigned(stmt.orelse, known)
        elif isinstance(stmt, ast.With):
            # a context manager may swallow an exception of its body
            known -= _deleted(stmt.body)
            for item in stmt.items:
                if item.optional_vars is not None:
                    known |= _targets(item.optional_vars)
        elif isinstance(stmt, ast.For | ast.While | ast.Try | ast.TryStar | ast.Match):
            known -= _deleted([stmt])
            if isinstance(stmt, ast.Try) and stmt.finalbody:
                known = definitely_assigned(stmt.finalbody, known)
        elif isinstance(stmt, ast.Delete):
            known -= _deleted([stmt])
        elif isinstance(stmt, ast.Assign):
            known |= set().union(*map(_targets, stmt.targets)) | _walrus(stmt.value)
        elif isinstance(stmt, ast.AnnAssign | ast.AugAssign):
            if stmt.value is not None:
                known |= _targets(stmt.target) | _walrus(stmt.value)
        elif isinstance(stmt, ast.Expr):
            known |= _walrus(stmt.value)
        else:
            known |= assigned_names([stmt])
    return known


def _targets(target: ast.expr) -> set[str]:
    return {n.id for n in ast.walk(target) if isinstance(n, ast.Name) and _stores(n)}


def _stores(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Store)


def _walrus(expression: ast.expr) -> set[str]:
    # only where it is evaluated for certain; anything nested in `and`, `or`, `if` may be skipped
    return {expression.target.id} if isinstance(expression, ast.NamedExpr) else set()


def _deleted(stmts: Sequence[ast.stmt]) -> set[str]:
    found: set[str] = set()
    for stmt in stmts:
        for node in ast.walk(stmt):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Del):
                found.add(node.id)
            elif isinstance(node, ast.ExceptHandler) and node.name:
                found.add(node.name)  # unbound at the end of its handler
    return found
