"""Whether statements may put another tensor in the place of a parameter or buffer."""

from __future__ import annotations

import ast

from rose_compiler.ir.ops import Op

#: Functions and methods that rebind nothing, beside those of tensors that end in ``_``.
_HARMLESS = frozenset(
    (
        *("zip", "enumerate", "range", "len", "list", "tuple", "float", "int", "min", "max"),
        *("parameters", "named_parameters", "buffers", "named_buffers", "state_dict", "values"),
        *("items", "modules", "children", "no_grad", "lerp", "mul", "add", "sub", "div", "detach"),
        *("clone", "view", "reshape", "pow", "sqrt", "clamp", "mean", "sum", "std", "var"),
        *("zero_grad", "item", "is_floating_point", "_foreach_lerp_", "_foreach_mul_"),
        *("_foreach_add_", "_foreach_copy_", "load_state_dict"),
    )
)


def writes_in_place(op: Op, *, items: bool = False) -> bool:
    """Whether all that a block writes to tensors it writes into them: none takes another's place.

    ``x.data = y`` gives a parameter other memory and leaves it the parameter that it is. With
    ``items``, what stores to items (``x[t] = y``) counts: where ``x`` is a tensor, it stays so.
    """
    statements = op.attributes.get("stmts")
    if op.kind != "block" or not statements:
        return False
    parts = [part for s in statements for part in ast.walk(s)]
    if items:
        parts = [p for p in parts if not isinstance(p, ast.Subscript)]
    return all(map(_harmless, parts))


def _harmless(part: ast.AST) -> bool:
    if isinstance(part, ast.Call):
        name = _name(part.func)
        assigns = any(k.arg == "assign" for k in part.keywords)
        in_place = name.endswith("_") and not name.endswith("__")
        return not assigns and (in_place or name in _HARMLESS)
    if isinstance(part, ast.Attribute) and not isinstance(part.ctx, ast.Load):
        return part.attr == "data"
    if isinstance(part, ast.Subscript) and not isinstance(part.ctx, ast.Load):
        return False
    return not isinstance(
        part, ast.Lambda | ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom | ast.Await
    )


def _name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else "?"
