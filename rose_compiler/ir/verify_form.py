"""Rules of form: bodies, arguments, placeholders and calls are what the views take them for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.fx as fx

from rose_compiler.ir import bodies, facts, program
from rose_compiler.ir.ops import BRANCH, BUILTINS, CONCAT, DROPPED, LOOP, MERGE, RANDN, Op
from rose_compiler.ir.program import LoopView, is_call, is_item
from rose_compiler.ir.scope import nodes_in
from rose_compiler.ir.summary import PURE_OPERATORS
from rose_compiler.ir.verify_rules import Body, Fault, Rule, Subject

_BOUNDS = {"range": 3, "iter": 1, "while": 0}
#: Built-in operations that take any number of arguments, and the least.
_VARIADIC = {CONCAT: 1, MERGE: 1, RANDN: 2}


def _bodies(subject: Subject) -> Iterator[Fault]:
    seen: dict[fx.GraphModule, fx.Node] = {}
    stack: list[Any] = [subject.program.root]
    while stack:
        module = stack.pop()
        if module.graph.owning_module is not module:
            yield Fault("a body's graph belongs to another module")
        for node in module.graph.nodes:
            if is_call(node, LOOP) or is_call(node, BRANCH):
                faults = list(_arguments(node))
                yield from faults
                for used in [] if faults else nodes_in(node.args[:3]):
                    if used.op != "get_attr":
                        continue
                    name = str(used.target)
                    child = module._modules.get(name)
                    if hasattr(fx.GraphModule, name):
                        # found first by attribute look-up, so the body would be out of reach
                        yield Fault(f"a body is named {name!r} like a member of Module", node)
                    elif not isinstance(child, fx.GraphModule):
                        yield Fault(f"there is no body {name!r}", node)
                    elif child in seen or child is subject.program.root:
                        yield Fault(f"body {name!r} is used a second time", node)
                    else:
                        seen[child] = node
                        stack.append(child)
            elif program.is_exit(node):
                if len(node.args) != 2 or not isinstance(node.args[1], tuple):
                    yield Fault("an exit takes a predicate and a tuple of values", node)
            elif node.op == "get_attr":
                users = [u for u in node.users if is_call(u, LOOP) or is_call(u, BRANCH)]
                if len(users) != len(node.users):
                    yield Fault("only loops and branches have bodies", node)


def _arguments(node: fx.Node) -> Iterator[Fault]:
    if len(node.args) != 4:
        yield Fault("a loop or branch takes four arguments", node, 4, len(node.args))
        return
    if not isinstance(node.args[3], tuple) or not all(isinstance(a, fx.Node) for a in node.args[3]):
        yield Fault("captured values are a tuple of nodes", node)
    elif len(set(node.args[3])) != len(node.args[3]):
        yield Fault("a value is captured twice", node)
    attributes = node.args[:1] if is_call(node, LOOP) else node.args[1:3]
    if not all(isinstance(a, fx.Node) and a.op == "get_attr" for a in attributes):
        yield Fault("a body is named by an attribute", node)
    if not is_call(node, LOOP):
        return
    bounds, carried = node.args[1], node.args[2]
    if not isinstance(bounds, tuple) or not isinstance(carried, tuple):
        yield Fault("bounds and carried values are tuples", node)
        return
    kind = (facts.get(node).loop or facts.LoopFacts()).kind
    if len(bounds) != _BOUNDS.get(kind, -1):
        yield Fault(f"a loop of kind {kind!r}", node, _BOUNDS, f"{len(bounds)} bounds")
    elif kind == "range" and bounds[2] == 0 and isinstance(bounds[2], int):
        yield Fault("the step of a range is zero", node)


def _lint(subject: Subject) -> Iterator[Fault]:
    for body in subject.bodies:
        yield from _lint_graph(body.graph, body.path)


def _lint_graph(graph: fx.Graph, path: str) -> Iterator[Fault]:
    try:
        graph.lint()
    except Exception as error:  # lint raises RuntimeError, ValueError or AssertionError
        yield Fault(f"torch.fx refuses the graph of {path}: {error}")


def _own_nodes(subject: Subject) -> Iterator[Fault]:
    for body in subject.bodies:
        own = set(body.graph.nodes)
        for node in body.graph.nodes:
            for used in node.all_input_nodes:
                if used not in own:
                    yield Fault(f"uses {used}, which is in another body or erased", node)


def _placeholders(subject: Subject) -> Iterator[Fault]:
    for body in subject.bodies:
        params = program.placeholders(body.graph)
        roles = [facts.get(p).role for p in params]
        expected = list(_expected_roles(body, len(params)))
        if roles != expected:
            yield Fault(
                f"the placeholders of {body.path}", body.owner, _counted(expected), _counted(roles)
            )
        for node in body.graph.nodes:
            if node.op != "placeholder" and facts.get(node).role:
                yield Fault(f"a role {facts.get(node).role!r} on no placeholder", node)
    root = subject.program.graph
    names = (*subject.program.value_params, *subject.program.state_params)
    found = tuple(str(p.target) for p in program.placeholders(root))
    if found != names:
        yield Fault("the parameters of the program", None, names, found)


def _expected_roles(body: Body, count: int) -> Iterator[str]:
    if body.owner is None:
        values = sum(facts.get(p).role != "state" for p in program.placeholders(body.graph))
        yield from ["value"] * values + ["state"] * (count - values)
    elif is_call(body.owner, LOOP):
        yield "index"
        yield from ["carried"] * len(body.owner.args[2])  # type: ignore[arg-type]
        yield from ["captured"] * len(body.owner.args[3])  # type: ignore[arg-type]
    else:
        yield from ["captured"] * len(body.owner.args[3])  # type: ignore[arg-type]


def _counted(roles: list[str]) -> str:
    found: list[list[Any]] = []
    for role in roles:
        if found and found[-1][1] == role:
            found[-1][0] += 1
        else:
            found.append([1, role])
    return ", ".join(f"{n} {role or 'without role'}" for n, role in found) or "none"


def _carried(subject: Subject) -> Iterator[Fault]:
    for body in subject.bodies:
        if body.owner is None:
            for node in bodies.exits(body.graph):
                yield Fault("an exit outside a loop", node)
            continue
        handed = program.output_node(body.graph).args[0]
        if not isinstance(handed, tuple):
            yield Fault(f"{body.path} hands on no tuple", body.owner, "a tuple", type(handed))
        elif is_call(body.owner, LOOP):
            count = len(LoopView(body.owner).carried_init)
            if len(handed) != count:
                yield Fault(f"next values of {body.path}", body.owner, count, len(handed))
            for node in bodies.exits(body.graph):
                if len(node.args[1]) != count:  # type: ignore[arg-type]
                    yield Fault(
                        "values handed out by an exit",
                        node,
                        count,
                        len(node.args[1]),  # type: ignore[arg-type]
                    )
        else:
            first = program.output_node(program.BranchView(body.owner).then.graph).args[0]
            if isinstance(first, tuple) and len(first) != len(handed):
                yield Fault("results of the two arms", body.owner, len(first), len(handed))


def _calls(subject: Subject) -> Iterator[Fault]:
    table = subject.program.ops.by_name
    for name, op in table.items():
        if op.name != name:
            yield Fault(f"operation {op.name!r} is in the table as {name!r}")
        if name in BUILTINS:
            yield Fault(f"operation {name!r} hides a built-in one")
    for body in subject.bodies:
        for node in body.graph.nodes:
            if node.op in ("call_method", "call_module"):
                yield Fault(f"a node of kind {node.op}", node, "a call of an operation")
            if node.op != "call_function":
                continue
            if node.kwargs:
                yield Fault("a call with keyword arguments", node)
            if not isinstance(node.target, Op):
                if node.target not in PURE_OPERATORS:
                    yield Fault(f"a call of {node.target}, which is no operation", node)
                continue
            yield from _call(node, node.target, table)


def _call(node: fx.Node, op: Op, table: dict[str, Op]) -> Iterator[Fault]:
    known = BUILTINS[op.name].op if op.name in BUILTINS else table.get(op.name)
    if known is not op:
        what = "is not in the table" if known is None else "has a namesake in the table"
        yield Fault(f"operation {op.name!r} {what}", node)
    wanted, found = len(op.signature.params), len(node.args)
    if op in _VARIADIC:
        if found < _VARIADIC[op]:
            yield Fault(f"too few arguments of {op.name!r}", node, _VARIADIC[op], found)
    elif wanted != found:
        yield Fault(f"arguments of {op.name!r}", node, op.signature.params, found)
    if op.signature.results == 0 and node.users:
        yield Fault(f"{op.name!r} has no result, and it is used", node)


def _items(subject: Subject) -> Iterator[Fault]:
    for body in subject.bodies:
        for node in body.graph.nodes:
            if not is_item(node):
                continue
            of = node.args[0]
            count = _results(of) if isinstance(of, fx.Node) else None
            position = node.args[1]
            if count is not None and not (isinstance(position, int) and 0 <= position < count):
                yield Fault(f"picks a result of {of}", node, f"0 to {count - 1}", position)


def _results(node: fx.Node) -> int | None:
    if is_call(node, LOOP):
        return len(LoopView(node).carried_init)
    if is_call(node, BRANCH):
        outputs = program.output_node(program.BranchView(node).then.graph).args[0]
        return len(outputs)  # type: ignore[arg-type]
    if is_call(node) and program.op_of(node).signature.results > 1:
        return program.op_of(node).signature.results
    return None


def _traced(subject: Subject) -> Iterator[Fault]:
    for op in subject.program.ops.by_name.values():
        if (op.kind in ("graph", "loss")) != (op.body is not None):
            yield Fault(
                f"operation {op.name!r}: of kind 'graph' or 'loss' are those with a traced body"
            )
        if op.body is None:
            continue
        yield from _lint_graph(op.body.graph, op.name)
        params = program.placeholders(op.body.graph)
        handed = len(op.signature.params) - op.attributes.get(DROPPED, 0)
        if len(params) != handed:
            yield Fault(
                f"parameters of the body of {op.name!r}",
                None,
                len(op.signature.params),
                len(params),
            )
        results = program.output_node(op.body.graph).args[0]
        # the body of a loss has the loss itself in front of its results
        wanted = op.signature.results + (op.kind == "loss")
        if (wanted > 1 or op.kind == "loss") and (
            not isinstance(results, tuple | list) or len(results) != wanted
        ):
            yield Fault(f"results of the body of {op.name!r}", None, wanted, results)


FORM: tuple[Rule, ...] = (
    Rule(
        "bodies", "every loop and branch has well-formed arguments and bodies of its own", _bodies
    ),
    Rule("own-nodes", "nodes use nodes of their own graph", _own_nodes),
    Rule("lint", "torch.fx accepts every graph, the bodies included", _lint),
    Rule(
        "placeholders", "every body has the placeholders its owner hands values to", _placeholders
    ),
    Rule("carried", "trips, exits and arms hand on as many values as are taken", _carried),
    Rule("calls", "calls are of known operations, with as many arguments as they take", _calls),
    Rule("items", "results that are picked exist", _items),
    Rule("traced", "traced bodies fit the signatures of their operations", _traced),
)
