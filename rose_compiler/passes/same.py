"""Whether two values of a program are the same number, made twice."""

from __future__ import annotations

import torch.fx as fx

from rose_compiler.ir.deps import Dependences
from rose_compiler.ir.effects import EVERYTHING, related
from rose_compiler.ir.ops import BRANCH, LOOP
from rose_compiler.ir.program import Value, is_call, op_of


def same_value(a: Value, b: Value, deps: Dependences) -> bool:
    """Whether two values, of loops' bounds for example, are equal: constants, one value, or two
    runs of the same statements over what nothing in the program writes."""
    a, b = deps.scope.resolve(a), deps.scope.resolve(b)
    if not isinstance(a, fx.Node) or not isinstance(b, fx.Node):
        return type(a) is type(b) and a == b
    if a is b:
        return True
    if deps.scope.state(a) or deps.scope.state(b):
        return deps.scope.state(a) == deps.scope.state(b)
    if a.op != "call_function" or b.op != "call_function" or len(a.args) != len(b.args):
        return False
    if is_call(a) != is_call(b) or (not is_call(a) and a.target is not b.target):
        return False
    if is_call(a) and not _same_statements(a, b, deps):
        return False
    return all(same_value(x, y, deps) for x, y in zip(a.args, b.args, strict=True))


def _same_statements(a: fx.Node, b: fx.Node, deps: Dependences) -> bool:
    one, other = op_of(a), op_of(b)
    if any(is_call(n, kind) for n in (a, b) for kind in (LOOP, BRANCH)):
        return False
    if one.source != other.source or one.signature != other.signature or not one.source:
        return one is other and one.signature.writes == ()
    effects = [e for n in (a, b) for e in deps.effects(n)]
    if one.signature.writes != () or any(e.write or e.state == EVERYTHING for e in effects):
        return False
    return not any(
        e.write and (e.state == EVERYTHING or any(related(e.state, r.state) for r in effects))
        for node in deps.program.nodes()
        if is_call(node)
        for e in deps.effects(node)
    )
