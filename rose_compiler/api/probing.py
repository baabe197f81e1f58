"""Whether rows of a batch may be computed apart, asked of the operation itself."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from rose_compiler.ir import facts
from rose_compiler.ir.contexts import entered
from rose_compiler.ir.ops import STATE
from rose_compiler.ir.program import Program, is_call, is_state, op_of
from rose_compiler.ir.scope import Scope
from rose_compiler.passes.base import Verdict
from rose_compiler.runtime.probe import probe_tile

_DTYPES = {
    str(d).removeprefix("torch."): d
    for d in (
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.bool,
        torch.uint8,
    )
}


class Prober:
    """Runs an operation on some rows at a time and compares with all rows at once.

    Values come from the first trip where an input was seen there, else they are random numbers of
    the type that was seen; parameters are the live ones.
    """

    def __init__(self, program: Program, examples: dict[str, Any]) -> None:
        self.program = program
        self.examples = examples
        self._seen: dict[tuple[Any, ...], Verdict] = {}

    def __call__(self, node: fx.Node, rows: tuple[int, ...]) -> Verdict:
        op = op_of(node)
        key = (id(op), rows, torch.get_num_threads())
        if key not in self._seen:
            self._seen[key] = self._probe(node, rows)
        return self._seen[key]

    def _probe(self, node: fx.Node, rows: tuple[int, ...]) -> Verdict:
        op = op_of(node)
        axes = op.signature.separable()
        total = sum(rows)
        arguments: list[Any] = []
        batched: dict[int, int] = {}
        for position, (name, argument) in enumerate(
            zip(op.signature.params, node.args, strict=True)
        ):
            value = self._value(name, argument)
            if value is None:
                return "unknown"
            if name in axes:
                value = _with_rows(value, total, axes[name])
                batched[position] = axes[name]
            arguments.append(value)
        if not batched or not op.bound:
            return "unknown"
        with entered(facts.get(node).context):
            return probe_tile(op, tuple(arguments), batched, list(rows))

    def _value(self, name: str, argument: Any) -> Any:
        if not isinstance(argument, fx.Node):
            return argument
        if is_state(argument):
            return self._live(argument)
        found = self.examples.get(argument.name)
        spec = facts.get(argument).spec
        if found is not None:
            return found
        if spec is None or spec.kind not in ("tensor", "array") or spec.dtype not in _DTYPES:
            return None
        generator = torch.Generator().manual_seed(0)
        made = torch.randn(spec.shape, generator=generator).to(_DTYPES[spec.dtype])
        return made if spec.kind == "tensor" else made.numpy()

    def _live(self, node: fx.Node) -> Any:
        resolved = Scope(self.program).resolve(node)
        if isinstance(resolved, fx.Node) and is_call(resolved, STATE):
            base = self._live(resolved.args[0])  # type: ignore[arg-type]
            for part in str(resolved.args[1]).split("."):
                base = (
                    base[int(part)]
                    if part.isdigit() and not hasattr(base, part)
                    else getattr(base, part)
                )
            return base
        return self.program.objects.get(
            facts.get(resolved).state if isinstance(resolved, fx.Node) else ""
        )


def _with_rows(value: Any, rows: int, axis: int) -> Any:
    """The value with that many rows: cut, or repeated with noise so that rows differ."""
    if not isinstance(value, torch.Tensor):
        import numpy as np

        repeats = -(-rows // max(value.shape[axis], 1))
        return np.concatenate([value] * repeats, axis=axis).take(range(rows), axis=axis)
    have = value.shape[axis]
    if have >= rows:
        return value.narrow(axis, 0, rows)
    parts = [value]
    generator = torch.Generator().manual_seed(1)
    while sum(p.shape[axis] for p in parts) < rows:
        noise = torch.randn(value.shape, generator=generator)
        parts.append(value + 0.1 * noise.to(value.dtype) if value.is_floating_point() else value)
    return torch.cat(parts, dim=axis).narrow(axis, 0, rows).contiguous()
