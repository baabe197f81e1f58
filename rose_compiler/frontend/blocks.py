"""Blocks: the user's own statements as operations with explicit inputs and outputs."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch.fx as fx

from rose_compiler.frontend import liveness, rewrite_ast, slots
from rose_compiler.frontend.scope import Missing, Scope, Static
from rose_compiler.ir import facts
from rose_compiler.ir.block import make_block_function
from rose_compiler.ir.ops import LOADS, STORES, UNBOUND, Op, Signature
from rose_compiler.ir.program import Builder

if TYPE_CHECKING:
    from rose_compiler.frontend.core import Core


def maybe_unbound(binding: Any) -> bool:
    """Whether a binding can be ``UNBOUND`` when it is used."""
    return binding is UNBOUND or (isinstance(binding, fx.Node) and facts.get(binding).maybe_unbound)


class BlockMaker:
    """Makes block operations and binds their results."""

    def __init__(self, lowering: Core) -> None:
        self.lowering = lowering

    def emit(
        self,
        statements: Sequence[ast.stmt],
        scope: Scope,
        builder: Builder,
        live: set[str],
        *,
        kind: str = "block",
        stem: str = "blk",
        attributes: dict[str, Any] | None = None,
    ) -> fx.Node:
        """One operation of the given statements; names in ``live`` that they assign are bound to
        its results."""
        stored = liveness.assigned(statements)
        outputs = [n for n in stored if n in live]
        surely: set[str] = set()
        for statement in statements:
            surely |= liveness.definitely_assigned(statement)
        needed = list(
            dict.fromkeys(
                [*sorted(liveness.reads(statements)), *(o for o in outputs if o not in surely)]
            )
        )
        local_to_block = set(stored) - liveness.live_in(list(statements), set(outputs) - surely)
        inputs: list[str] = []
        arguments: list[Any] = []
        statics: dict[str, Any] = {}
        maybe_unbound_inputs: list[str] = []
        for name in needed:
            if name in local_to_block:
                continue
            binding = scope.lookup(name)
            if isinstance(binding, Missing):
                continue
            if isinstance(binding, Static):
                if not binding.root and name not in scope.bindings:
                    continue  # a function, class or module: looked up when the statements run
                statics[name] = binding
            if maybe_unbound(binding):
                maybe_unbound_inputs.append(name)
            inputs.append(name)
            arguments.append(self.lowering.as_value(binding, scope, builder))
        maybe_unbound_names = set(maybe_unbound_inputs) | {o for o in outputs if o not in inputs}
        maybe_unbound_names |= liveness.deleted(statements)
        conditional = [o for o in outputs if o not in surely]
        name = self.lowering.ops.fresh(stem)
        function = make_block_function(
            name,
            tuple(statements),
            tuple(inputs),
            tuple(outputs),
            scope.source.filename,
            scope.source.globals,
            maybe_unbound=tuple(maybe_unbound_inputs),
            owner=scope.source.owner if _has_private(statements) else None,
            within=scope.source.fn.__code__,
        )
        signature = Signature(name, tuple(inputs), None, None, results=len(outputs))
        op = Op(
            signature,
            function,
            kind=kind,
            source=tuple(line for s in statements for line in ast.unparse(s).splitlines()),
            attributes={
                "stmts": tuple(statements),
                "filename": scope.source.filename,
                "inputs": tuple(inputs),
                "outputs": tuple(outputs),
                "globals": scope.source.globals,
                "owner": scope.source.owner,
                "within": scope.source.fn.__code__,
                "changes": self.lowering.session.changes,
                "statics": statics,
                "maybe_unbound": tuple(maybe_unbound_inputs),
                "conditional": tuple(conditional),
                **(attributes or {}),
            },
        )
        self.lowering.ops.add(op)
        if any(_updates(part, scope, self.lowering) for s in statements for part in ast.walk(s)):
            self.lowering.loops_do("trains")
        first = statements[0]
        label = outputs[0] if len(outputs) == 1 else name
        node = builder.call(op, *arguments, name=label, **self.lowering.known(first, scope))
        for each in stored:
            if each in outputs:
                continue
            scope.bindings.pop(each, None)
        for position, each in enumerate(outputs):
            result = node if len(outputs) == 1 else builder.item(node, position, name=each)
            if each in conditional and each in maybe_unbound_names:
                facts.put(result, maybe_unbound=True)
            scope.bindings[each] = result
        return node

    def value(
        self, expression: ast.expr, scope: Scope, builder: Builder, name: str | None = None
    ) -> Any:
        """The binding of an expression's value: an operation, unless it is a name or a constant.

        ``name`` is what the operation calls its result, for readers; no variable is bound by it.
        """
        folded = scope.fold(expression)
        if not isinstance(folded, Missing):
            return folded
        if isinstance(expression, ast.Name):
            found = scope.lookup(expression.id)
            if not isinstance(found, Missing) and not maybe_unbound(found):
                return found
        static = scope.static(expression)
        if static is not None and static.root and not isinstance(static.value, super):
            return static
        if name is None or name in liveness.reads(expression):
            name = scope.fresh(name or "value")
        owner = slots.slot(expression, scope)
        if owner is not None:
            return self._load(name, expression, owner, scope, builder)  # type: ignore[arg-type]
        statement = rewrite_ast.assign(name, expression, expression)
        leaks = set(liveness.assigned(expression))
        return self._only(name, [statement], scope, builder, leaks)

    def _load(
        self, name: str, expression: ast.Attribute, owner: Static, scope: Scope, builder: Builder
    ) -> fx.Node:
        """What an attribute holds that the program assigns, as an operation of its own."""
        path, new = slots.based(expression, owner, scope)
        assert isinstance(path.value, ast.Name)
        marks = {LOADS: (path.value.id, path.attr)}
        statement = rewrite_ast.assign(name, path, expression)
        made = self._only(name, [statement], scope, builder, set(), marks)
        if new is not None:
            scope.bindings.pop(new)
        return made

    def store(self, target: ast.Attribute, name: str, scope: Scope, builder: Builder) -> None:
        """Put what a variable stands for into an attribute, as an operation of its own."""
        owner = slots.slot(target, scope)
        assert owner is not None
        path, new = slots.based(target, owner, scope)
        assert isinstance(path.value, ast.Name)
        statement = ast.Assign([path], rewrite_ast.name(name, target))
        statement = ast.fix_missing_locations(ast.copy_location(statement, target))
        marks = {STORES: (path.value.id, path.attr, name)}
        self.emit([statement], scope, builder, set(), attributes=marks)
        if new is not None:
            scope.bindings.pop(new)

    def renamed(self, static: Static, scope: Scope, builder: Builder) -> Any:
        """A live object as a value: it may be handed on where a state may not."""
        source, name = scope.fresh("held"), scope.fresh("same")
        scope.bindings[source] = static
        like = scope.source.node.body[0]
        statement = rewrite_ast.assign(name, rewrite_ast.name(source, like), like)
        made = self._only(name, [statement], scope, builder, set())
        scope.bindings.pop(source)
        return made

    def pack(self, binding: tuple[Any, ...], scope: Scope, builder: Builder) -> fx.Node:
        """A tuple of bindings as one value."""
        like = scope.source.node.body[0]
        names = [scope.fresh("item") for _ in binding]
        scope.bindings.update(zip(names, binding, strict=True))
        name = scope.fresh("items")
        text = ast.Tuple([rewrite_ast.name(n, like) for n in names], ast.Load())
        made = self._only(name, [rewrite_ast.assign(name, text, like)], scope, builder, set())
        for each in names:
            scope.bindings.pop(each, None)
        return made

    def listed(
        self,
        name: str,
        items: Sequence[fx.Node],
        like: ast.expr,
        scope: Scope,
        builder: Builder,
    ) -> fx.Node:
        """A new list of some values, made at the place of ``like``."""
        names = [scope.fresh("item") for _ in items]
        scope.bindings.update(zip(names, items, strict=True))
        text = ast.List([rewrite_ast.name(n, like) for n in names], ast.Load())
        made = self._only(name, [rewrite_ast.assign(name, text, like)], scope, builder, set())
        for each in names:
            scope.bindings.pop(each, None)
        return made

    def _only(
        self,
        name: str,
        statements: list[ast.stmt],
        scope: Scope,
        builder: Builder,
        more: set[str],
        attributes: dict[str, Any] | None = None,
    ) -> fx.Node:
        """The result called ``name`` of statements, leaving a variable of that name as it is."""
        had, kept = name in scope.bindings, scope.bindings.get(name)
        self.emit(statements, scope, builder, {name} | more, attributes=attributes)
        made: fx.Node = scope.bindings.pop(name)
        if had:
            scope.bindings[name] = kept
        return made


def _updates(part: ast.AST, scope: Scope, lowering: Core) -> bool:
    """Whether a call is an optimizer's step, or ``backward``."""
    if not isinstance(part, ast.Call) or not isinstance(part.func, ast.Attribute):
        return False
    attr = part.func.attr
    return attr == "backward" or (attr == "step" and lowering.trains(part, scope))


def _has_private(statements: Sequence[ast.stmt]) -> bool:
    """Whether a name like ``__x`` stands in statements, which classes spell differently."""
    for statement in statements:
        for part in ast.walk(statement):
            name = getattr(part, "attr", None) or getattr(part, "id", None) or ""
            if isinstance(name, str) and name.startswith("__") and not name.endswith("__"):
                return True
    return False
