"""Objects below the roots: looked up once at the top, where nothing rebinds them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

import torch
import torch.fx as fx

from rose_compiler.codegen.names import Names
from rose_compiler.codegen.schedule import Schedule
from rose_compiler.ir import facts, interp
from rose_compiler.ir.effects import related
from rose_compiler.ir.ops import SHARD, STATE
from rose_compiler.ir.program import Program, is_call, op_of


class States:
    """The variables of states below roots and of shards that the function looks up at its top."""

    def __init__(self, plan: Schedule, names: Names) -> None:
        self.program = plan.program
        self.scope = plan.deps.scope
        self.deps = plan.deps
        self.names = names
        self._rebound = _assigned_attributes(self.program)
        self._written: set[str] | None = None
        self._by_text: dict[tuple[fx.Node, Any], str] = {}
        self._names: dict[fx.Node, str] = {}
        self.lookups: list[tuple[str, fx.Node, Any]] = []  # (variable, root, path or shard)
        for node in self.program.nodes():
            if node.users and (is_call(node, STATE) or is_call(node, SHARD)):
                self._look(node)

    def name(self, node: fx.Node) -> str | None:
        """The variable of a state that is looked up at the top; None for anything else."""
        return self._names.get(node)

    def _look(self, node: fx.Node) -> None:
        base, what = node.args
        assert isinstance(base, fx.Node)
        root = self.scope.resolve(base)
        if not (isinstance(root, fx.Node) and root.graph is self.program.graph):
            return
        if root.op != "placeholder" or isinstance(what, fx.Node):
            return
        if is_call(node, STATE) and not self._fixed(node, root, str(what)):
            return
        key = (root, what)
        if key not in self._by_text:
            self._by_text[key] = self.names.fresh(f"{root.name}_{what}", exact=True)
            self.lookups.append((self._by_text[key], root, what))
        self._names[node] = self._by_text[key]

    def _fixed(self, node: fx.Node, root: fx.Node, path: str) -> bool:
        """Whether the path leads to the same object all through the function."""
        if self._rebound & set(path.split(".")):
            return False
        spec = facts.get(node).spec
        found: Any = None
        if (name := facts.get(root).state) in self.program.objects:
            try:
                found = interp.resolve(self.program.objects[name], path)
            except (AttributeError, LookupError, TypeError):
                return False
        if isinstance(found, torch.nn.Parameter | torch.nn.Module | torch.optim.Optimizer):
            return True
        if spec is not None and spec.type_name.endswith("Parameter"):
            return True
        # a module may put a new tensor into a buffer's place whenever it writes to it
        state = facts.get(node).state or f"{facts.get(root).state}.{path}"
        return not any(related(state, written) for written in self._writes())

    def _writes(self) -> set[str]:
        if self._written is None:
            graph = self.program.graph
            self._written = {e.state for n in graph.nodes for e in self.deps.effects(n) if e.write}
        return self._written


def _assigned_attributes(program: Program) -> set[str]:
    """Names of attributes that some statement of the user assigns."""
    return {
        part.attr
        for stmt in _statements(program)
        for part in ast.walk(stmt)
        if isinstance(part, ast.Attribute) and not isinstance(part.ctx, ast.Load)
    }


def _statements(program: Program) -> Iterator[ast.stmt]:
    for node in program.nodes():
        if is_call(node):
            yield from op_of(node).attributes.get("stmts", ())
