"""What all parts of lowering share: the session, state nodes, and how bindings become arguments."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch.fx as fx

from rose_compiler.base.errors import SourceLocation, fail
from rose_compiler.frontend import components, rewrite_ast
from rose_compiler.frontend.blocks import BlockMaker, maybe_unbound
from rose_compiler.frontend.scope import Scope, Session, Static
from rose_compiler.frontend.source import FunctionSource
from rose_compiler.ir import facts
from rose_compiler.ir.contexts import ALIKE
from rose_compiler.ir.ops import OpTable
from rose_compiler.ir.program import Builder

__all__ = ["Core", "LoopFrame", "maybe_unbound", "names_of_tuple"]


@dataclass
class LoopFrame:
    """The innermost loop being lowered: what an exit has to hand out, and its body."""

    carried: tuple[str, ...]
    builder: Builder
    scope: Scope
    where: SourceLocation


class Core:
    """State of one lowering; one instance a captured function."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.ops = OpTable()
        self.contexts: tuple[facts.Context, ...] = ()
        self._regions = 0
        self.loops: list[LoopFrame] = []
        self.inline_chain: tuple[SourceLocation, ...] = ()
        self.inlining: list[Any] = []
        self.trained = 0  # calls of optimizers lowered so far
        self.root = Builder()
        self.blocks = BlockMaker(self)
        self._state_nodes: dict[str, fx.Node] = {}
        self._enterable: dict[CodeType, bool] = {}
        session.new_root = self._new_root

    # -- roots and states ----------------------------------------------------------------------

    def _new_root(self, name: str, value: Any) -> None:
        self._state_nodes[name] = self.root.placeholder(name, "state", state=name)

    def state_node(self, static: Static) -> fx.Node:
        """The node of a live object in the root graph."""
        found = self._state_nodes.get(static.full)
        if found is None:
            root = self._state_nodes[static.root]
            anchor = self.root.graph._root
            for node in self.root.graph.nodes:
                if node.op != "placeholder" and not facts.get(node).state:
                    anchor = node
                    break
            with self.root.graph.inserting_before(anchor):
                found = self.root.state(root, static.path)
            state = self.session.names.name_of(static.value)
            if state is not None:
                facts.put(found, state=state)
            self._state_nodes[static.full] = found
        return found

    def prepared(self, function: FunctionSource, scope: Scope) -> FunctionSource:
        """A function whose statements can stand outside of it: its closure variables that may be
        rebound are read from their cells, ``super()`` names its class."""
        cells: dict[str, str] = {}
        for each, cell in function.closure.items():
            if self.session.changes.cell(cell):
                cells[each] = scope.fresh(f"cell_of_{each}")
                scope.bindings[cells[each]] = self.session.root(cells[each], cell)
        node = rewrite_ast.spelled_out(function.node, cells)
        return function if node is function.node else dataclasses.replace(function, node=node)

    def entering(self, contexts: Iterable[facts.Context]) -> tuple[facts.Context, ...]:
        """The modes of what is lowered next, where ``contexts`` are entered around it by one
        ``with`` or one call of a decorated function."""
        entered = [c for c in contexts if c.kind != "phase"]
        for k, context in enumerate(entered):
            if context.kind not in ALIKE:
                self._regions += 1
                entered[k] = dataclasses.replace(context, region=self._regions)
        return (*self.contexts, *entered)

    def loops_do(self, what: str) -> None:
        """Remember of the loops around here that they step a simulator, or train."""
        for frame in self.loops:
            self.session.loops.setdefault(frame.where, set()).add(what)
        if what == "trains":
            self.trained += 1
            self.session.trains = True

    def trains(self, call: ast.Call, scope: Scope) -> bool:
        """Whether a call is an optimizer's, or a scaler's for one."""
        raise NotImplementedError

    def statements(
        self, statements: Sequence[ast.stmt], scope: Scope, builder: Builder, live_out: set[str]
    ) -> None:
        """Lower a list of statements; ``live_out`` are the names read after it."""
        raise NotImplementedError

    def statement(self, node: ast.stmt, scope: Scope, builder: Builder, live: set[str]) -> None:
        """Lower one statement that leaves no loop."""
        raise NotImplementedError

    def refuse_rebinding(self, node: ast.stmt, scope: Scope) -> None:
        """Inside a loop a component keeps its name."""
        if not self.loops and not isinstance(node, (ast.For, ast.While)):
            return
        for target in ast.walk(node):
            if isinstance(target, (ast.Name, ast.Attribute)) and isinstance(target.ctx, ast.Store):
                known = scope.binding_object(target)
                if known is not None and components.is_component(known):
                    raise fail(
                        "capture-rebind-component",
                        f"`{ast.unparse(target)}` is rebound inside a loop",
                        where=scope.source.where(target),
                        found=type(known).__name__,
                    )

    def known(self, node: ast.AST, scope: Scope) -> dict[str, Any]:
        """The facts of an operation made from a node: origin and context."""
        where = scope.source.where(node)
        return {
            "origin": facts.Origin(where, self.inline_chain),
            "context": self.contexts,
        }

    def as_value(self, binding: Any, scope: Scope, builder: Builder) -> Any:
        """A binding as an argument of a node in ``builder``."""
        if isinstance(binding, Static):
            if not binding.root:
                stem = getattr(binding.value, "__name__", "object")
                binding = self.session.root(stem.strip("<>_") or "object", binding.value)
            return builder.use(self.state_node(binding))
        if isinstance(binding, tuple) and any(
            isinstance(b, (fx.Node, Static, tuple)) for b in binding
        ):
            return self.blocks.pack(binding, scope, builder)
        if isinstance(binding, fx.Node):
            return builder.use(binding)
        return binding

    def as_output(self, binding: Any, scope: Scope, builder: Builder) -> Any:
        """A binding as a value that leaves a body or a loop carries: never a state itself."""
        if isinstance(binding, Static):
            return self.blocks.renamed(binding, scope, builder)
        return self.as_value(binding, scope, builder)


def names_of_tuple(target: ast.expr) -> list[str] | None:
    """The names of a target that is a flat tuple of them."""
    if not isinstance(target, (ast.Tuple, ast.List)):
        return None
    names = [e.id for e in target.elts if isinstance(e, ast.Name)]
    return names if len(names) == len(target.elts) else None
