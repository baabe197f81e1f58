"""From a program to the text of a module with one function, ``run(rt, *values, *states)``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.fx as fx

from rose_compiler.base.errors import SourceLocation
from rose_compiler.base.faultmap import FaultMap
from rose_compiler.base.marks import Mark
from rose_compiler.codegen.expressions import quoted
from rose_compiler.codegen.loops import Function
from rose_compiler.codegen.module import Module
from rose_compiler.codegen.schedule import Schedule, schedule
from rose_compiler.codegen.scopes import Scope
from rose_compiler.ir.ops import JOIN_ROWS, SWITCHES, Op
from rose_compiler.ir.program import Program, is_call, is_item, op_of, output_node, placeholders
from rose_compiler.ir.sizes import takes_parts

_serial = itertools.count(1)
_used: set[str] = set()


@dataclass(frozen=True)
class Emitted:
    """Emitted code: the text, the name it goes by in tracebacks, and what it names.

    ``places`` has the user's line of each emitted line that has one. ``edited`` says that the text
    is a person's copy, which has no such lines. ``marks`` are what the ticks of an instrumented
    function stand for.
    """

    name: str
    source: str
    filename: str
    namespace: Mapping[str, Any]
    faults: FaultMap
    places: Mapping[int, SourceLocation] = field(default_factory=dict)
    plan: Schedule | None = None
    edited: bool = False
    marks: tuple[Mark, ...] = ()


def emit(
    program: Program,
    *,
    filename: str | None = None,
    tick: Callable[[int], object] | None = None,
) -> Emitted:
    """Emit a program of stage "captured" or "scheduled".

    The text needs ``rt`` (:class:`rose_compiler.runtime.support.Runtime`), torch, and the
    operations of its namespace. ``filename`` is made up from the program's name if left out. With
    ``tick``, which is called with the index of a mark behind each thing that the coordinator does,
    the function can be profiled.

    Raises:
        VerifyError: where a slot breaks a dependence.
    """
    plan = schedule(program)
    filename = filename or _filename(program.name)
    module = Module()
    for reserved in ("run", "error"):
        module.names.take(reserved)
    module.joined = _on_joined(program)
    module.parted = frozenset(op_of(n) for n in program.nodes() if is_call(n) and takes_parts(n))
    for op in dict.fromkeys(op_of(n) for n in program.nodes() if is_call(n)):
        if op.kind != "builtin":
            module.function(op)
    function = Function(plan, module, tick)
    _run(function, program)
    return _assembled(program, plan, module, function, filename)


def _on_joined(program: Program) -> frozenset[Op]:
    """Traced operations that are called on joined values of several trips, which may turn out to be
    no rows of one batch."""
    made: set[fx.Node] = set()
    found: set[Op] = set()
    for node in program.nodes():
        of_joined = not made.isdisjoint(node.all_input_nodes)
        if is_call(node, JOIN_ROWS) or (of_joined and is_item(node)):
            made.add(node)
        elif of_joined and is_call(node) and op_of(node).kind == "graph":
            made.add(node)
            found.add(op_of(node))
    return frozenset(found)


def _filename(name: str) -> str:
    found = f"<rose:{name}>"
    if found in _used:
        found = f"<rose:{name}#{next(_serial)}>"
    _used.add(found)
    return found


def _run(f: Function, program: Program) -> None:
    params = ", ".join(["rt", *(f.variables[p] for p in placeholders(program.graph))])
    with f.writer.block(f"def run({params}):"):
        for lane in f.plan.lanes:
            f.writer.line(f"{f.lane(lane)} = rt.lane({quoted(lane)})")
        for variable, root, what in f.states.lookups:
            word = "shard" if isinstance(what, int) else "state"
            f.writer.line(
                f"{variable} = rt.{word}({f.variables[root]}, {f.module.printer.value(what, {})})"
            )
        body = f.plan.bodies[program.graph]
        # what is switched on for a run is switched off behind it, however it ends
        switched = any(is_call(n, op) for n in program.nodes() for op in SWITCHES)
        if f.plan.plain and not switched:
            _body(f, program, f.scope_of(body))
            return
        with f.writer.block("try:"):
            _body(f, program, f.scope_of(body))
        if not f.plan.plain:
            with f.writer.block("except BaseException as error:"):
                f.writer.line("rt.fault(error, FAULTS)")
                f.writer.line("raise")
        with f.writer.block("finally:"):
            f.writer.line("rt.drain()")


def _body(f: Function, program: Program, scope: Scope) -> None:
    f.actions(f.plan.bodies[program.graph], scope)
    output = output_node(program.graph)
    result: Any = output.args[0]
    used: dict[fx.Node, str] = {n: f.ref(n, scope, None) for n in output.all_input_nodes}
    # only what is returned itself is read here; an unbound variable inside a tuple was read before
    if not isinstance(result, tuple):
        f.check(output, result, used)
    text = f.module.printer.value(result, used)
    if isinstance(result, tuple) and len(result) > 1:
        text = text[1:-1]
    f.writer.line(f"return {text}")


def _assembled(
    program: Program, plan: Schedule, module: Module, function: Function, filename: str
) -> Emitted:
    head = list(_head(program, module, function))
    shift = len(head)
    faults = FaultMap(
        filename,
        tuple(function.sites),
        tuple(function.bodies),
        {line + shift: levels for line, levels in function.writer.faults.items()},
    )
    return Emitted(
        program.name,
        "\n".join([*head, *function.writer.lines]) + "\n",
        filename,
        {**module.namespace, "FAULTS": faults},
        faults,
        {line + shift: where for line, where in function.writer.places.items()},
        plan,
        marks=tuple(function.ticks.marks),
    )


def _head(program: Program, module: Module, function: Function) -> Iterator[str]:
    yield f"# {program.name}, {program.stage}. An edited copy runs with ROSE_EDIT=<file>."
    text = "\n".join([*itertools.chain(*module.functions), *function.writer.lines])
    if "torch." in text:
        yield "import torch"
    if "F." in text:
        yield "import torch.nn.functional as F"
    yield ""
    for lines in module.functions:
        yield ""
        yield from lines
        yield ""
    yield ""
