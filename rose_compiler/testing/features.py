"""Which features of training loops occur in a program, so that tests can tell what they tested."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator

import torch.fx as fx

from rose_compiler.ir import facts
from rose_compiler.ir.effects import parse_entry
from rose_compiler.ir.ops import BRANCH, BREAK_IF, CONTINUE_IF, LOOP
from rose_compiler.ir.program import (
    LoopView,
    Program,
    children,
    is_call,
    is_item,
    op_of,
    placeholders,
)

#: What :func:`features_of` can find in programs.
PROGRAM_FEATURES = (
    *("loop", "loop in a loop", "endless loop", "iterator", "branch", "early exit"),
    *("carried over 1 trip", "carried over 2 trips", "carried over 3 trips", "maybe unbound"),
    *("indexed store", "index of a later trip", "index out of data", "mutable local", "alias"),
    *("write through an alias", "borrowed buffer", "simulator", "thread-local mode", "host output"),
    *("torch's generator", "a generator of its own", "numpy generator", "several generators"),
    *("opaque call", "effects at random", "loss with a graph", "backward", "optimizer step"),
)
#: What :func:`features_of_text` can find in functions.
TEXT_FEATURES = (
    *("for", "while", "if", "break", "continue", "with", "try", "loop in a loop"),
    *("attribute store", "indexed store", "in-place operator", "call"),
)
_GENERATORS = {
    "rng:torch": "torch's generator",
    "gen": "a generator of its own",
    "chance": "numpy generator",
}


def features_of(program: Program) -> Counter[str]:
    """How many programs of one, so 0 or 1, have each feature."""
    found: set[str] = set()
    _body(program.root, found, loops=0)
    if len(found & set(_GENERATORS.values())) > 1:
        found.add("several generators")
    return Counter(found)


def _body(module: fx.GraphModule, found: set[str], loops: int) -> None:
    indices = {n for n in placeholders(module.graph) if facts.get(n).role == "index"}
    for node in module.graph.nodes:
        if node.op == "placeholder" and facts.get(node).maybe_unbound:
            found.add("maybe unbound")
        if not is_call(node):
            continue
        if facts.get(node).context:
            found.add("thread-local mode")
        if is_call(node, LOOP):
            _loop(LoopView(node), found)
            if loops:
                found.add("loop in a loop")
        elif is_call(node, BRANCH):
            found.add("branch")
        elif is_call(node, BREAK_IF) or is_call(node, CONTINUE_IF):
            found.add("early exit")
        else:
            found.update(_operation(node, indices))
    for owner, child in children(module):
        _body(child, found, loops + is_call(owner, LOOP))


def _loop(loop: LoopView, found: set[str]) -> None:
    found.add({"while": "endless loop", "iter": "iterator"}.get(loop.facts.kind, "loop"))
    position = {p: k for k, p in enumerate(loop.carried)}
    for param in loop.carried:
        trips, value = 1, loop.carried_next[position[param]]
        while isinstance(value, fx.Node) and value in position and trips < 4:
            trips, value = trips + 1, loop.carried_next[position[value]]
        if isinstance(value, fx.Node) and value.op == "call_function" and param.users:
            found.add(f"carried over {trips} trip{'s' * (trips > 1)}")


def _operation(node: fx.Node, indices: set[fx.Node]) -> Iterator[str]:
    op, known = op_of(node), facts.get(node)
    signature = op.signature
    if signature.reads is None or signature.writes is None:
        yield "opaque call"
    if op.name.startswith("strange"):
        yield "effects at random"
    if op.kind == "step":
        yield "simulator"
    calls = op.attributes.get("calls", ())
    if "backward" in calls:
        yield "backward"
    if "optimizer" in calls:
        yield "optimizer step"
    if op.name == "forward":
        yield "loss with a graph"
    if known.state.startswith("%"):
        yield "mutable local"
    if known.borrowed:
        yield "borrowed buffer"
    elif known.alias and not is_item(node):
        yield "alias"
    given = dict(zip(signature.params, node.args, strict=False))
    for text in signature.writes or ():
        entry = parse_entry(text)
        name = entry.absolute or entry.root
        if name in _GENERATORS:
            yield _GENERATORS[name]
        if name == "host":
            yield "host output"
        target = given.get(entry.root)
        if isinstance(target, fx.Node) and facts.get(target).alias and not facts.get(target).state:
            yield "write through an alias"
        if "[" in text:
            yield "indexed store"
            index = given.get("i")
            if isinstance(index, fx.Node) and index not in indices and index.op != "placeholder":
                yield "index out of data" if is_call(index) else "index of a later trip"


def features_of_text(text: str) -> Counter[str]:
    """How many functions of one, so 0 or 1, have each feature of the source."""
    found: set[str] = set()
    names = {
        ast.For: "for",
        ast.While: "while",
        ast.If: "if",
        ast.Break: "break",
        ast.Continue: "continue",
        ast.With: "with",
        ast.Try: "try",
        ast.AugAssign: "in-place operator",
        ast.Call: "call",
    }
    for node in ast.walk(ast.parse(text)):
        if type(node) in names:
            found.add(names[type(node)])
        if isinstance(node, ast.For | ast.While) and any(
            isinstance(inner, ast.For | ast.While) for inner in ast.walk(node) if inner is not node
        ):
            found.add("loop in a loop")
        targets = node.targets if isinstance(node, ast.Assign) else ()
        found.update("attribute store" for t in targets if isinstance(t, ast.Attribute))
        found.update("indexed store" for t in targets if isinstance(t, ast.Subscript))
    return Counter(found)
