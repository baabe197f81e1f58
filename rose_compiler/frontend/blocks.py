"""Blocks: the user's own statements as operations with explicit inputs and outputs."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch.fx as fx

from rose_compiler.frontend import liveness
from rose_compiler.frontend.loops import maybe_unbound
from rose_compiler.frontend.scope import Missing, Scope, Static
from rose_compiler.ir import facts
from rose_compiler.ir.block import make_block_function
from rose_compiler.ir.ops import UNBOUND, Op, Signature
from rose_compiler.ir.program import Builder

if TYPE_CHECKING:
    from rose_compiler.frontend.capture import Lowering


class BlockMaker:
    """Makes block operations and binds their results."""

    def __init__(self, lowering: Lowering) -> None:
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
        """One operation of the given statements; names in ``live`` that they assign are bound to its
        results."""
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
            if isinstance(binding, Static) and not binding.root:
                if name not in scope.bindings or binding.value is getattr(builtins, name, None):
                    continue
            if isinstance(binding, Static):
                statics[name] = binding
            if maybe_unbound(binding):
                maybe_unbound_inputs.append(name)
            inputs.append(name)
            arguments.append(self.lowering.as_value(binding, scope, builder))
        maybe_unbound_names = set(maybe_unbound_inputs) | {o for o in outputs if o not in inputs}
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
                "statics": statics,
                "maybe_unbound": tuple(maybe_unbound_inputs),
                "conditional": tuple(conditional),
                **(attributes or {}),
            },
        )
        self.lowering.ops.add(op)
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

    def value(self, expression: ast.expr, scope: Scope, builder: Builder, stem: str = "v") -> Any:
        """The binding of an expression's value: an operation, unless it is a name or a constant."""
        folded = scope.fold(expression)
        if not isinstance(folded, Missing):
            return folded
        if isinstance(expression, ast.Name):
            found = scope.lookup(expression.id)
            if not isinstance(found, Missing) and found is not UNBOUND:
                return found
        static = scope.static(expression)
        if static is not None and static.root:
            return static
        temp = self.lowering.temp(stem)
        made = ast.Assign([ast.Name(temp, ast.Store())], expression)
        made = ast.fix_missing_locations(ast.copy_location(made, expression))
        self.emit([made], scope, builder, {temp})
        return scope.bindings.pop(temp)

    def pack(self, binding: tuple[Any, ...], scope: Scope, builder: Builder) -> fx.Node:
        """A tuple of bindings as one value."""
        names: list[str] = []
        for each in binding:
            temp = self.lowering.temp("item")
            scope.bindings[temp] = each
            names.append(temp)
        temp = self.lowering.temp("tuple")
        where = scope.source.node.body[0]
        text = ast.Tuple([ast.Name(n, ast.Load()) for n in names], ast.Load())
        made = ast.fix_missing_locations(
            ast.copy_location(ast.Assign([ast.Name(temp, ast.Store())], text), where)
        )
        self.emit([made], scope, builder, {temp})
        for each in names:
            scope.bindings.pop(each, None)
        node: fx.Node = scope.bindings.pop(temp)
        return node
