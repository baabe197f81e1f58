"""The module around an emitted function: what it calls, by name, and traced operations as text."""

from __future__ import annotations

import ast
import builtins
import itertools
from typing import Any

import torch
import torch.fx as fx

from rose_compiler.codegen.expressions import Printer
from rose_compiler.codegen.names import Names
from rose_compiler.codegen.writer import Writer
from rose_compiler.ir.block import make_block_function, runs_statements
from rose_compiler.ir.ops import UNBOUND, Op
from rose_compiler.ir.program import output_node, placeholders
from rose_compiler.ir.sizes import Sizes, sizes_of

#: Builtins that emitted code uses.
_BUILTINS = frozenset(
    ("range", "slice", "float", "len", "isinstance", "hasattr", "tuple", "list", "dict")
) | {"BaseException"}
#: Names that emitted code uses itself.
RESERVED = _BUILTINS | {"rt", "torch", "F", "UNBOUND", "FAULTS", "_"}


class Module:
    """Collects the functions and objects that emitted code names."""

    def __init__(self) -> None:
        self.names = Names(RESERVED)
        self.namespace: dict[str, Any] = {"UNBOUND": UNBOUND}
        self.printer = Printer(self.bind)
        self.functions: list[list[str]] = []  # the text of each traced operation
        self.joined: frozenset[Op] = frozenset()  # called on joined values of several trips
        self.parted: frozenset[Op] = frozenset()  # called on rows of some shards or of more trips
        self._ops: dict[tuple[Op, frozenset[str]], str] = {}
        self._bound: dict[int, str] = {}

    def bind(self, thing: Any, name: str) -> str:
        """A name for an object that has no text."""
        if name in _BUILTINS and thing is getattr(builtins, name):
            return name
        if id(thing) not in self._bound:
            self._bound[id(thing)] = self.names.fresh(name)
            self.namespace[self._bound[id(thing)]] = thing
        return self._bound[id(thing)]

    def count(self) -> str:
        """The name of an endless counter."""
        return self.bind(itertools.count, "count")

    def function(self, op: Op, unset: frozenset[str] = frozenset()) -> str:
        """The name of a function that does what the operation does.

        ``unset`` are the variables of a block that may be unbound when it is called.
        """
        unset -= frozenset(op.attributes.get("maybe_unbound", ()))
        key = (op, unset)
        if key in self._ops:
            return self._ops[key]
        name = self._ops[key] = self.names.fresh(op.name)
        if op.kind in ("graph", "loss") and op.body is not None:
            text = graph_function(name, op, self.printer, self.sizes(op))
            if op in self.joined:
                at = next(k for k, line in enumerate(text) if line.startswith("def "))
                text.insert(at, f"@{self.bind(op.by_trip, 'by_trip')}")
            self.functions.append(text)
        elif unset:
            known = op.attributes
            self.namespace[name] = make_block_function(
                op.name,
                known["stmts"],
                known["inputs"],
                known["outputs"],
                known["filename"],
                known["globals"],
                maybe_unbound={*unset, *known.get("maybe_unbound", ())},
                owner=class_of(known),
                within=known.get("within"),
            )
        else:
            # without the operation around it a call costs what calling the user's function costs
            self.namespace[name] = op if op.impl is None else op.impl
        return name

    def sizes(self, op: Op) -> Sizes | None:
        """What an operation was proven for, as it is called here."""
        found = sizes_of(op)
        return found.of_parts() if found is not None and op in self.parted else found


def is_block(op: Op) -> bool:
    """Whether the operation does what the user's statements say that it holds."""
    needed = ("stmts", "inputs", "outputs", "filename", "globals")
    known = op.attributes
    return all(k in known for k in needed) and runs_statements(op.impl, known["stmts"])


def class_of(known: dict[str, Any]) -> str | None:
    """The class that a block's statements must be compiled in, for the sake of private names."""
    owner = known.get("owner")
    if owner is None:
        return None
    for stmt in known["stmts"]:
        for part in ast.walk(stmt):
            name = getattr(part, "id", None) or getattr(part, "attr", None)
            if isinstance(name, str) and name.startswith("__") and not name.endswith("__"):
                return str(owner)
    return None


def graph_function(name: str, op: Op, printer: Printer, sizes: Sizes | None = None) -> list[str]:
    """A traced operation as a Python function. For other ``sizes`` than it was proven for it calls
    what is right for them; who calls a loss has seen to that.

    A result takes over the variable of an operand that nothing else needs, as one would write it by
    hand (``h = tanh(h)``): so intermediate values are freed as early as in eager code.
    """
    assert op.body is not None
    graph = op.body.graph
    names = Names(RESERVED | _globals(op, name, printer, sizes))
    refs: dict[fx.Node, str] = {}
    for node in placeholders(graph):
        refs[node] = names.fresh(node.name)
    writer = Writer()
    for line in (row for text in op.source for row in text.splitlines()):
        writer.lines.append(f"# {line}")  # a comment is not laid out like a call
    reused = _reused(graph)
    params = dict(zip(op.signature.params, refs.values(), strict=False))
    asked = sizes if op.kind == "graph" else None
    others = "" if asked is None else asked.text(params, printer.bind)
    instead = "" if asked is None else _instead(asked, name, printer)
    with writer.block(f"def {name}({', '.join(refs.values())}):"):
        if others:
            with writer.block(f"if {others}:"):
                writer.line(f"return {instead}({', '.join(refs.values())})")
        for node in graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            if node.op == "get_attr":
                refs[node] = _constant(op.body, node, name, printer)
                continue
            text = printer.plain(node, refs)
            if not node.users:
                writer.line(text)
                continue
            if node in reused:
                refs[node] = refs[reused[node]]
            else:
                refs[node] = names.fresh("h" if node in reused.values() else node.name)
            writer.line(f"{refs[node]} = {text}")
        result = output_node(graph).args[0]
        alone = op.kind == "graph" and op.signature.results == 1
        if alone and isinstance(result, tuple | list) and len(result) == 1:
            result = result[0]
        if isinstance(result, list):
            result = tuple(result)
        text = printer.value(result, refs)
        if isinstance(result, tuple) and len(result) > 1:
            text = text[1:-1]
        writer.line(f"return {text}")
    return writer.lines


def _constant(body: fx.GraphModule, node: fx.Node, name: str, printer: Printer) -> str:
    return printer.bind(_attribute(body, str(node.target)), f"{name}_constant")


def _instead(sizes: Sizes, name: str, printer: Printer) -> str:
    """The name of what is called for other sizes."""
    return printer.bind(sizes.instead, f"{name}_as_written")


def _globals(op: Op, name: str, printer: Printer, sizes: Sizes | None) -> frozenset[str]:
    """The names bound in the module that the function will use: no local may hide them."""
    body = op.body
    assert body is not None
    found: set[str] = set()

    def bind(thing: Any, wanted: str) -> str:
        made = printer.bind(thing, wanted)
        found.add(made)
        return made

    watching = Printer(bind)
    if sizes is not None and op.kind == "graph":
        sizes.text({p: p for p in op.signature.params}, bind)
        _instead(sizes, name, watching)
    for node in body.graph.nodes:
        refs = {n: n.name for n in node.all_input_nodes}
        if node.op == "get_attr":
            found.add(_constant(body, node, name, printer))
        elif node.op == "output":
            watching.value(node.args[0], refs)
        elif node.op != "placeholder":
            watching.plain(node, refs)
    return frozenset(found)


def _reused(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """For each node, the operand whose variable it takes over, if there is one."""
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        for used in node.all_input_nodes:
            last[used] = node
    found: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        free = [n for n in node.all_input_nodes if last[n] is node and n.op.startswith("call_")]
        if free and node.users:
            found[node] = free[0]
    return found


def _attribute(module: torch.nn.Module, path: str) -> Any:
    found: Any = module
    for part in path.split("."):
        found = getattr(found, part)
    return found
