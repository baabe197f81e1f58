"""What a call of an operation in a dump must look like."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from rose_compiler.ir.ops import BREAK_IF, CONCAT, CONTINUE_IF, MERGE, RANDN, STATE, Op
from rose_compiler.ir.parse_expr import Reader, Value

# Builtins that take any number of arguments, and the least number.
_OPEN = {CONCAT: 1, MERGE: 1, RANDN: 2}


def check_call(
    reader: Reader, expr: ast.Call, op: Op, args: Sequence[Value], carried: int | None
) -> None:
    """Check the arguments of a call; ``carried`` is what the loop around carries, None outside.

    Raises:
        ParseError: when number or kind of the arguments don't fit the operation.
    """
    least = _OPEN.get(op)
    arity = len(op.signature.params)
    if (len(args) != arity) if least is None else (len(args) < least):
        raise reader.error(
            expr,
            f"{op.name!r} is called with another number of arguments",
            expected=arity if least is None else f"at least {least}",
            found=len(args),
        )
    if op is STATE and type(args[1]) is not str:
        raise reader.error(expr, "the path of a state must be a string")
    if op in (BREAK_IF, CONTINUE_IF):
        if carried is None:
            raise reader.error(expr, f"{op.name} outside a loop")
        if not isinstance(args[1], tuple) or len(args[1]) != carried:
            raise reader.error(
                expr,
                f"{op.name} hands out another number of values than the loop carries",
                expected=carried,
                found=len(args[1]) if isinstance(args[1], tuple) else "no tuple",
            )
