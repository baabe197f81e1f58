"""Signatures of a dump, read from syntax trees: ``@op(...) def name(params): ...``."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.fx as fx

from rose_compiler.base.errors import nearest
from rose_compiler.ir import functions
from rose_compiler.ir.dump_names import CALL_WORDS
from rose_compiler.ir.effects import EVERYTHING, GLOBAL_STATES, parse_entry
from rose_compiler.ir.interp import call_graph
from rose_compiler.ir.losses import with_backward
from rose_compiler.ir.ops import DROPPED, KINDS, Op, Signature
from rose_compiler.ir.parse_expr import Expressions, Reader, Value, is_strings


def decorator(function: ast.FunctionDef, reader: Reader) -> tuple[str, dict[str, ast.expr]]:
    """The name of a function's decorator and its keyword arguments; ("", {}) without one."""
    if not function.decorator_list:
        return "", {}
    if len(function.decorator_list) > 1:
        raise reader.error(function, f"{function.name!r} has several decorators")
    found = function.decorator_list[0]
    if not (isinstance(found, ast.Call) and isinstance(found.func, ast.Name)) or found.args:
        raise reader.error(found, "a decorator must read `@op(...)` or `@program(...)`")
    told: dict[str, ast.expr] = {}
    for word in found.keywords:
        if word.arg is None or word.arg in told:
            raise reader.error(found, "`**` or an argument given twice")
        told[word.arg] = word.value
    return found.func.id, told


class _Told:
    """The arguments of a decorator, checked one by one."""

    def __init__(
        self, reader: Reader, function: ast.FunctionDef, told: dict[str, ast.expr]
    ) -> None:
        self.reader, self.function, self.told = reader, function, dict(told)

    def take(self, word: str, fits: Callable[[Any], bool], expected: str, default: Any) -> Any:
        if word not in self.told:
            return default
        expr = self.told.pop(word)
        found = Expressions(self.reader).constant(expr)
        if not fits(found):
            raise self.reader.error(
                expr,
                f"{word}= of {self.function.name!r} has a wrong value",
                expected=expected,
                found=repr(found),
            )
        return found

    def rest_is_empty(self, known: tuple[str, ...]) -> None:
        for word, expr in self.told.items():
            raise self.reader.error(expr, f"unknown argument {word!r}{nearest(word, known)}")


def _is_count(found: Any) -> bool:
    return type(found) is int and 0 <= found <= 1000


def _is_batch(found: Any) -> bool:
    return isinstance(found, dict) and all(
        type(k) is str and type(v) is int for k, v in found.items()
    )


def _is_attributes(found: Any) -> bool:
    return isinstance(found, dict) and all(type(k) is str for k in found)


_WORDS = (
    *("name", "kind", "params", "reads", "writes", "records", "batch"),
    *("results", "exact", "may_raise", "declared", "calls", "attributes"),
)


def read_op(
    function: ast.FunctionDef,
    told: dict[str, ast.expr],
    reader: Reader,
    bind: Mapping[str, Callable[..., Any]],
) -> Op:
    """The operation that a decorated function declares."""
    if function.name in reader.ops or function.name in CALL_WORDS:
        raise reader.error(function, f"the name {function.name!r} is taken")
    args = _Told(reader, function, told)
    a = function.args
    if a.posonlyargs or a.vararg or a.kwonlyargs or a.kwarg or a.defaults or function.returns:
        raise reader.error(function, f"{function.name!r} must have plain parameters only")
    params: tuple[str, ...] = tuple(p.arg for p in a.args)
    if len(set(params)) != len(params):
        raise reader.error(function, f"{function.name!r} has a parameter twice")
    names = params
    params = tuple(args.take("params", is_strings, "a list of names", list(params)))
    reads = args.take("reads", is_strings, "a list of effect entries", None)
    writes = args.take("writes", is_strings, "a list of effect entries", None)
    records = args.take("records", is_strings, "a list of effect entries", None)
    batch = args.take("batch", _is_batch, 'a dict like {"obs": 0}', None)
    for entry in (*(reads or ()), *(writes or ()), *(records or ())):
        _check_entry(entry, params, function, reader)
    signature = Signature(
        args.take("name", lambda n: type(n) is str and n != "", "a name", function.name),
        params,
        None if reads is None else tuple(reads),
        None if writes is None else tuple(writes),
        results=args.take("results", _is_count, "a number of results", 1),
        batch=None if batch is None else tuple(batch.items()),
        exact=args.take("exact", lambda e: e is None or type(e) is bool, "True or False", None),
        may_raise=args.take("may_raise", lambda e: type(e) is bool, "True or False", True),
        declared=args.take("declared", lambda e: type(e) is bool, "True or False", False),
        records=None if records is None else tuple(records),
    )
    kinds = tuple(k for k in KINDS if k != "builtin")
    kind = args.take("kind", lambda k: k in kinds, " or ".join(kinds), "block")
    attributes = args.take("attributes", _is_attributes, "a dict with names as keys", {})
    calls = args.take("calls", is_strings, "a list of what it calls", [])
    if calls:
        attributes = {**attributes, "calls": frozenset(calls)}
    args.rest_is_empty(_WORDS)
    if any(o.name == signature.name for o in reader.ops.values()):
        raise reader.error(function, f"two operations are named {signature.name!r}")
    body = None
    dropped = attributes.get(DROPPED, 0)
    if type(dropped) is not int or not 0 <= dropped <= len(names) or dropped % 4:
        raise reader.error(function, f"{DROPPED!r} must count four parameters for each optimizer")
    if not _is_blank(function.body):
        if kind not in ("graph", "loss"):
            problem = "only an operation of kind 'graph' or 'loss' has a body"
            raise reader.error(function.body[0], problem)
        if len(names) != len(params):
            raise reader.error(function, "a traced operation needs its parameters by name")
        body = GraphBody(reader, function, names[: len(names) - dropped]).read()
    run: Callable[..., Any] | None = None
    if body is not None and kind == "loss":
        recorded = attributes.get("recorded", ())
        run = with_backward(functools.partial(call_graph, body), recorded, dropped)
    elif body is not None:
        run = functools.partial(_results, body, signature.results)
    impl = bind.get(signature.name, run)
    return Op(
        signature,
        impl,
        kind=kind,
        body=body,
        source=_source(function, reader),
        attributes=attributes,
    )


def _results(body: fx.GraphModule, results: int, *args: Any) -> Any:
    """Run a traced body; what an operation with so many results gives."""
    found = call_graph(body, *args)
    if results == 1 and isinstance(found, tuple | list) and len(found) == 1:
        return found[0]
    return None if results == 0 else found


def _check_entry(
    text: str, params: tuple[str, ...], function: ast.FunctionDef, reader: Reader
) -> None:
    try:
        entry = parse_entry(text)
    except ValueError:
        raise reader.error(function, f"{text!r} is no effect entry") from None
    known = (*params, *GLOBAL_STATES, EVERYTHING)
    if entry.root not in known and not entry.root.startswith(("rng:", "@")):
        raise reader.error(
            function,
            f"the entry {text!r} of {function.name!r} is rooted at no parameter",
            code="parse-unknown-name",
        )


def _is_blank(body: list[ast.stmt]) -> bool:
    return (
        len(body) == 1
        and isinstance(body[0], ast.Expr)
        and isinstance(body[0].value, ast.Constant)
        and body[0].value.value is Ellipsis
    )


def _source(function: ast.FunctionDef, reader: Reader) -> tuple[str, ...]:
    """The comment lines between the head of a function and its first statement."""
    found = []
    for line in reader.lines[function.lineno : function.body[0].lineno - 1]:
        text = line.strip()
        if text.startswith("#"):
            found.append(text[1:].removeprefix(" "))
    return tuple(found)


class GraphBody(Expressions):
    """The body of a traced operation: torch calls, front to back."""

    def __init__(self, reader: Reader, function: ast.FunctionDef, params: tuple[str, ...]) -> None:
        # names of a body are its own: nothing outside sees them
        names = {n.id for n in ast.walk(function) if isinstance(n, ast.Name)}
        super().__init__(Reader(reader.lines, reader.file, reader.ops, {*names, *params}))
        self.function = function
        self.graph = fx.Graph()
        self.module = torch.nn.Module()
        self.scope: dict[str, fx.Node] = {p: self.graph.placeholder(p) for p in params}

    def read(self) -> fx.GraphModule:
        *statements, last = self.function.body
        for statement in statements:
            self._statement(statement)
        if not isinstance(last, ast.Return):
            raise self.reader.error(last, "the body of a traced operation must end in `return`")
        result = None if last.value is None else self.value(last.value)
        self.graph.output(result)
        return fx.GraphModule(self.module, self.graph)

    def _statement(self, statement: ast.stmt) -> None:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=expr):
                if name in self.scope:
                    raise self.reader.error(statement, f"{name!r} is assigned twice")
                found = self.value(expr, name)
                if not isinstance(found, fx.Node) or not makes_new(found, self.scope):
                    raise self.reader.error(statement, "an assignment without a call")
                self.scope[name] = found
            case ast.Expr(value=ast.Call() as expr):
                self.value(expr)
            case _:
                raise self.reader.error(statement, "this statement can't stand in a traced body")

    def lookup(self, expr: ast.Name) -> Value:
        if expr.id not in self.scope:
            raise self.reader.error(
                expr,
                f"{expr.id!r} is not defined here{nearest(expr.id, self.scope)}",
                code="parse-unknown-name",
            )
        return self.scope[expr.id]

    def make(
        self, where: ast.expr, kind: str, target: Any, args: Any, kwargs: Any, name: str
    ) -> Value:
        return self.graph.create_node(kind, target, args, kwargs, name=name)

    def attribute(self, expr: ast.Attribute, base: Value, name: str | None) -> Value:
        if expr.attr not in functions.ATTRIBUTES or not isinstance(base, fx.Node):
            raise self.reader.error(expr, f"attribute {expr.attr!r} can't be read here")
        return self._function(expr, getattr, [base, expr.attr], {}, name)

    def call_name(self, expr: ast.Call, function: ast.Name, name: str | None) -> Value:
        if function.id != "constant":
            raise self.reader.error(
                expr, f"{function.id!r} is no function of torch", code="parse-unknown-op"
            )
        args = [self.constant(a) for a in expr.args]
        try:
            items, dtype, device = args
            tensor = torch.tensor(items, dtype=dtype, device=device)
        except (TypeError, ValueError, RuntimeError, AssertionError, OverflowError):
            raise self.reader.error(
                expr,
                "constant(...) with arguments that it does not take",
                expected="constant(items, dtype, device)",
            ) from None
        target = self.reader.fresh("_tensor_constant")
        self.module.register_buffer(target, tensor)
        return self.graph.create_node("get_attr", target, name=name)


def makes_new(node: fx.Node, scope: Mapping[str, Value]) -> bool:
    """Whether a node has no name yet."""
    return all(node is not known for known in scope.values())
