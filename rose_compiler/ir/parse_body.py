"""Statements of a dump, read from syntax trees into the graphs of a program."""

from __future__ import annotations

import ast
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Never

import torch.fx as fx

from rose_compiler.base.errors import nearest
from rose_compiler.ir import facts
from rose_compiler.ir.dump import default_state
from rose_compiler.ir.facts import Context, LoopFacts
from rose_compiler.ir.ops import BRANCH, LOOP, STATE, Op
from rose_compiler.ir.parse_calls import check_call
from rose_compiler.ir.parse_expr import (
    BINARY,
    UNARY,
    Expressions,
    Reader,
    Value,
    builtin,
    makes_node,
)
from rose_compiler.ir.parse_marks import parameter_facts, read_context, split_marks
from rose_compiler.ir.program import Builder, is_call

Contexts = tuple[Context, ...]
_OPERATORS = frozenset((*BINARY.values(), *UNARY.values(), operator.getitem))


class _Builder(Builder):
    """A builder whose own nodes never take a name that stands in the text."""

    def __init__(self, reader: Reader, parent: Builder | None) -> None:
        super().__init__(parent)
        self.reader = reader

    def attach(self, stem: str, child: fx.GraphModule) -> fx.Node:
        name = self.reader.fresh(f"body_{stem}")
        self.module.add_module(name, child)
        return self.graph.create_node("get_attr", name)


@dataclass
class _Arm:
    """How an arm of a branch ends: what it assigns, or nothing."""

    body: Body
    form: str = ""  # "": no results, "tuple": the tuple as a whole, "each": result by result
    names: tuple[str, ...] = ()
    outputs: tuple[Value, ...] = ()
    where: ast.stmt | None = None


class Body(Expressions):
    """One graph of a program while its text is read."""

    def __init__(self, reader: Reader, parent: Body | None = None) -> None:
        super().__init__(reader)
        self.parent = parent
        self.builder: _Builder = _Builder(reader, parent.builder if parent else None)
        self.scope: dict[str, Value] = {}
        self.outer: set[str] = set()  # names of enclosing bodies that were used here
        self.loops: dict[fx.Node, tuple[str, ...]] = {}  # loops of this body: what they carry
        self.carried: int | None = parent.carried if parent else None  # of the loop around
        self.context: Contexts = parent.context if parent else ()

    # names

    def lookup(self, expr: ast.Name) -> Value:
        if expr.id in self.scope:
            return self.scope[expr.id]
        if self.parent is None:
            raise self.reader.error(
                expr,
                f"{expr.id!r} is not defined here{nearest(expr.id, self.scope)}",
                code="parse-unknown-name",
            )
        found = self.builder.use(self.parent.lookup(expr))
        self.outer.add(expr.id)
        return found

    def define(self, where: Any, name: str, node: fx.Node) -> None:
        if name in self.scope or name in self.outer:
            raise self.reader.error(where, f"{name!r} means another value in this body already")
        self.scope[name] = node

    # functions

    def parameters(self, main: ast.FunctionDef) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Make the placeholders of the root graph; the names of its values and of its states."""
        a = main.args
        if a.posonlyargs or a.vararg or a.kwarg or a.defaults or any(a.kw_defaults) or main.returns:
            raise self.reader.error(main, f"{main.name!r} must have plain parameters only")
        for role, group in (("value", a.args), ("state", a.kwonlyargs)):
            for arg in group:
                known = parameter_facts(arg, self.reader, role)
                self.define(arg, arg.arg, self.builder.placeholder(arg.arg, role, **known))
        return tuple(p.arg for p in a.args), tuple(p.arg for p in a.kwonlyargs)

    def root(self, main: ast.FunctionDef) -> fx.GraphModule:
        *statements, last = main.body
        self.block(statements)
        if not isinstance(last, ast.Return):
            raise self.reader.error(last, "the program must end in `return`")
        return self.builder.finish(None if last.value is None else self.value(last.value))

    # statements

    def block(self, statements: Sequence[ast.stmt]) -> None:
        for statement in statements:
            self._statement(statement)

    def _statement(self, statement: ast.stmt) -> None:
        match statement:
            case ast.Pass():
                pass
            case ast.With():
                self._with(statement)
            case ast.For():
                self._loop(statement)
            case ast.If():
                self._branch(statement)
            case ast.Assign(targets=[ast.Name() as target], value=expr):
                self._assign(target, expr, None)
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=expr):
                self._unpack(statement, targets, expr)
            case ast.AnnAssign(target=ast.Name() as target, value=ast.expr() as expr):
                self._assign(target, expr, statement.annotation)
            case ast.Expr(value=expr) if not isinstance(expr, ast.Yield):
                self._node(expr, None)
            case _:
                raise self.reader.error(statement, "this statement can't stand here")

    def _node(self, expr: ast.expr, name: str | None) -> fx.Node:
        """The new node of a statement, with its facts."""
        inner, marks = split_marks(expr, self.reader)
        node = self.value(inner, name)
        if not makes_node(inner) or not isinstance(node, fx.Node):
            raise self.reader.error(expr, "a statement must call something")
        facts.put(node, **marks.facts(self.context, ("lane", "facts", "under")))
        return node

    def _assign(self, target: ast.Name, expr: ast.expr, born: ast.expr | None) -> None:
        node = self._node(expr, target.id)
        if born is not None:
            state: Any = None
            match born:
                case ast.Name(id="state"):
                    state = f"%{target.id}"
                case ast.Call(func=ast.Name(id="state"), args=[arg], keywords=[]):
                    state = self.constant(arg)
            if type(state) is not str:
                raise self.reader.error(born, "an annotation must be `state` or `state(name)`")
            facts.put(node, state=state)
        self.define(target, target.id, node)

    def _names(self, where: ast.stmt, targets: Sequence[ast.expr]) -> tuple[str, ...]:
        names = []
        for target in targets:
            if not isinstance(target, ast.Name):
                raise self.reader.error(where, "only names can be assigned")
            names.append(target.id)
        return tuple(names)

    def _unpack(self, where: ast.stmt, targets: Sequence[ast.expr], expr: ast.expr) -> None:
        names = self._names(where, targets)
        node = self._node(expr, None)
        count = node.target.signature.results if isinstance(node.target, Op) else None
        if count is None or count < 2 or count != len(names) or is_call(node, LOOP):
            raise self.reader.error(
                where,
                "an operation with other results is unpacked",
                expected=len(names),
                found="no operation" if count is None else count,
            )
        self._pick(where, node, names)

    def _pick(self, where: ast.stmt, node: fx.Node, names: tuple[str, ...]) -> None:
        for position, name in enumerate(names):
            if name != "_":
                self.define(where, name, self.builder.item(node, position, name))

    def _with(self, statement: ast.With) -> None:
        before = self.context
        for item in statement.items:
            if item.optional_vars is not None:
                raise self.reader.error(statement, "`as` can't stand here")
            self.context = (*self.context, read_context(item.context_expr, self.reader))
        self.block(statement.body)
        self.context = before

    def _loop(self, statement: ast.For) -> None:
        where, reader = statement, self.reader
        inner, marks = split_marks(statement.iter, reader)
        if not (isinstance(inner, ast.Call) and isinstance(inner.func, ast.Name)):
            raise reader.error(where, "a loop must read `for t, a in name(0, T, 1, a=init)`")
        if statement.orelse:
            raise reader.error(where, "a loop can't have `else`")
        targets = [statement.target]
        if isinstance(statement.target, ast.Tuple):
            targets = statement.target.elts
        index, *carried = self._names(where, targets)
        words = tuple(k.arg for k in inner.keywords)
        if words != tuple(carried):
            raise reader.error(
                where,
                "the carried values differ between the two sides of `in`",
                expected=", ".join(carried) or "none",
                found=", ".join(map(str, words)) or "none",
            )
        bounds = tuple(self.value(b) for b in inner.args)
        if len(bounds) not in (0, 1, 3):
            raise reader.error(where, "a loop has 0, 1 or 3 bounds", found=len(bounds))
        body = Body(reader, self)
        body.carried = len(carried)
        at = body.builder.placeholder(index, "index", **marks.index())
        body.define(where, index, at)
        inits = []
        for keyword in inner.keywords:
            init, known = split_marks(keyword.value, reader)
            inits.append(self.value(init))
            assert keyword.arg is not None
            param = body.builder.placeholder(keyword.arg, "carried", **known.facts((), ("facts",)))
            body.define(where, keyword.arg, param)
        outputs = body.read_loop(statement.body)
        kind = {0: "while", 1: "iter", 3: "range"}[len(bounds)]
        name = inner.func.id
        known_loop = marks.loop(LoopFacts(kind, label=name, index=index))
        allowed = ("lane", "facts", "under", "loop", "index")
        node = self.builder.loop(
            body.builder,
            outputs,
            bounds,
            tuple(inits),
            known_loop,
            name=name,
            **marks.facts(self.context, allowed),
        )
        self.define(where, name, node)
        self.loops[node] = tuple(carried)

    def read_loop(self, statements: list[ast.stmt]) -> tuple[Value, ...]:
        """Read the body of a loop; the next carried values."""
        last = statements[-1]
        if not (isinstance(last, ast.Expr) and isinstance(last.value, ast.Yield)):
            self.block(statements)
            if self.carried:
                raise self.reader.error(last, "the body must end in `yield` of the carried values")
            return ()
        self.block(statements[:-1])
        expr = last.value.value
        if self.carried == 1 and expr is not None:
            return (self.value(expr),)
        found = self.value(expr) if expr is not None else ()
        if not isinstance(found, tuple) or len(found) != self.carried:
            raise self.reader.error(
                last,
                "`yield` has another number of values than the loop carries",
                expected=self.carried,
                found=len(found) if isinstance(found, tuple) else 1,
            )
        return found

    def _branch(self, statement: ast.If) -> None:
        inner, marks = split_marks(statement.test, self.reader)
        pred = self.value(inner)
        then = Body(self.reader, self).read_arm(statement.body)
        orelse = Body(self.reader, self).read_arm(statement.orelse)
        if (then.form, then.names) != (orelse.form, orelse.names):
            raise self.reader.error(
                orelse.where or then.where or statement,
                "both arms of a branch must assign the same names last",
                expected=", ".join(then.names) or "none",
                found=", ".join(orelse.names) or "none",
            )
        if len(then.outputs) != len(orelse.outputs):
            raise self.reader.error(
                orelse.where or statement,
                "the arms of a branch have different numbers of results",
                expected=len(then.outputs),
                found=len(orelse.outputs),
            )
        whole = then.form == "tuple"
        node = self.builder.branch(
            pred,
            then.body.builder,
            then.outputs,
            orelse.body.builder,
            orelse.outputs,
            name=then.names[0] if whole else self.reader.fresh("branch"),
            **marks.facts(self.context, ("lane", "facts", "under")),
        )
        if whole:
            self.define(statement, then.names[0], node)
        else:
            self._pick(statement, node, then.names)

    def read_arm(self, statements: list[ast.stmt]) -> _Arm:
        """Read one arm of a branch."""
        last = statements[-1] if statements else None
        if not isinstance(last, ast.Assign) or makes_node(split_marks(last.value, self.reader)[0]):
            self.block(statements)
            return _Arm(self)
        self.block(statements[:-1])
        names: tuple[str, ...]
        match last:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Tuple(elts=elts)):
                form, names = "tuple", (name,)
                outputs = tuple(self.value(e) for e in elts)
            case ast.Assign(targets=[ast.Name(id=name)], value=expr):
                form, names, outputs = "each", (name,), (self.value(expr),)
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=elts)):
                form, names = "each", self._names(last, targets)
                outputs = tuple(self.value(e) for e in elts)
                if len(names) != len(outputs):
                    raise self.reader.error(
                        last,
                        "another number of values than of names",
                        expected=len(names),
                        found=len(outputs),
                    )
            case _:
                raise self.reader.error(last, "this assignment can't end an arm")
        return _Arm(self, form, names, outputs, last)

    # calls

    def make(
        self, where: ast.expr, kind: str, target: Any, args: Any, kwargs: Any, name: str
    ) -> Value:
        if kind != "call_function" or kwargs or target not in _OPERATORS:
            self._refuse(where, target)
        if target is operator.getitem and len(args) != 2:
            raise self.reader.error(where, "getitem takes two values")
        node = self.builder.graph.create_node("call_function", target, args, {}, name=name)
        facts.put(node, context=self.context)
        return node

    def _refuse(self, where: ast.expr, target: Any) -> Never:
        raise self.reader.error(
            where,
            f"{getattr(target, '__name__', target)} is called outside an operation",
            code="parse-unknown-op",
            expected="operations, operators and picks of results",
        )

    def attribute(self, expr: ast.Attribute, base: Value, name: str | None) -> Value:
        if not isinstance(base, fx.Node) or base not in self.loops:
            raise self.reader.error(expr, f"{expr.attr!r} can only be picked from a loop")
        words = self.loops[base]
        if expr.attr not in words:
            raise self.reader.error(
                expr,
                f"the loop carries no {expr.attr!r}{nearest(expr.attr, words)}",
                code="parse-unknown-name",
            )
        return self._function(expr, operator.getitem, [base, words.index(expr.attr)], {}, name)

    def call_name(self, expr: ast.Call, function: ast.Name, name: str | None) -> Value:
        op = self.reader.ops.get(function.id) or builtin(function.id)
        if op is None or op in (LOOP, BRANCH):
            known = nearest(function.id, self.reader.ops)
            raise self.reader.error(
                expr, f"there is no operation {function.id!r}{known}", code="parse-unknown-op"
            )
        args, kwargs = self.arguments(expr)
        if kwargs:
            raise self.reader.error(expr, f"{function.id!r} is called with keywords")
        check_call(self.reader, expr, op, args, self.carried)
        node = self.builder.call(op, *args, name=name or self.reader.fresh(op.name))
        facts.put(node, context=self.context)
        state = default_state(node)
        if op is STATE and not state:
            raise self.reader.error(expr, "state(...) of something that is no state")
        facts.put(node, state=state)
        return node
