"""Whether rows of a batch may be computed apart, asked of the operation itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.fx as fx

from rose_compiler.ir import facts
from rose_compiler.ir.contexts import entered
from rose_compiler.ir.facts import Spec
from rose_compiler.ir.interp import resolve
from rose_compiler.ir.ops import CONCAT, RANDN, ROWS, SNAPSHOT, STATE, Op
from rose_compiler.ir.program import Program, is_call, is_item, is_state, op_of
from rose_compiler.ir.scope import Scope
from rose_compiler.passes.base import Verdict
from rose_compiler.passes.graphs import without_checks
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
#: How often an operation is tried at least: on the values of the first trip, then on values near
#: them.
TRIALS = 3
#: Where every bit counts, so many rows are tried in all, in at most so many trials. Two ways to sum
#: a short product can agree in most rows: a layer of 8 weights differed in 4 trials of 10, with 4
#: rows each.
EXACT_ROWS, EXACT_TRIALS = 512, 128


def trials(rows: int, exact: bool) -> int:
    """How often to try an operation on so many rows."""
    if not exact:
        return TRIALS
    return min(max(TRIALS, EXACT_ROWS // max(rows, 1)), EXACT_TRIALS)


class Prober:
    """Runs an operation on some rows at a time and compares with all rows at once.

    Values come from the first trip where an input was seen there; an input that a pass made is
    computed from such values by the traced operations in front; what is left are random numbers of
    the type that was seen. Parameters are the live ones. Operations that look at values and raise
    are left out: what is made up need not pass them. ``exact``: every bit counts, so an operation
    is tried more often.
    """

    def __init__(self, program: Program, examples: Mapping[str, Any], exact: bool = False) -> None:
        self.program = program
        self.examples = examples
        self.exact = exact
        self._seen: dict[tuple[Op, tuple[int, ...], int], Verdict] = {}

    def __call__(self, node: fx.Node, rows: tuple[int, ...]) -> Verdict:
        op = op_of(node)
        key = (op, rows, torch.get_num_threads())
        if key not in self._seen:
            self._seen[key] = self._probe(node, rows)
        return self._seen[key]

    def arguments(self, node: fx.Node, rows: int | None = None) -> tuple[Any, ...]:
        """What to call a node's operation with, its batch of ``rows`` rows, or of as many as were
        seen: live objects, and copies of all else.

        Raises:
            Exception: where there is no value for an argument, or none of so many rows.
        """
        signature = op_of(node).signature
        axes = signature.separable() if rows is not None else {}
        values = _Values(self, rows or 0, 0)
        made = []
        for name, argument in zip(signature.params, node.args, strict=True):
            value = values.of(argument, axes.get(name))
            live = isinstance(argument, fx.Node) and is_state(argument)
            made.append(value if live else _copied(value))
        return tuple(made)

    def _probe(self, node: fx.Node, rows: tuple[int, ...]) -> Verdict:
        op = op_of(node)
        axes = op.signature.separable()
        batched = {k: axes[p] for k, p in enumerate(op.signature.params) if p in axes}
        if not batched or not op.bound:
            return "unknown"
        run = without_checks(op)
        worst: Verdict = "bits"
        for trial in range(trials(sum(rows), self.exact)):
            values = _Values(self, sum(rows), trial)
            try:
                arguments = [
                    values.of(argument, axes.get(name))
                    for name, argument in zip(op.signature.params, node.args, strict=True)
                ]
                with entered(facts.get(node).context):
                    verdict = probe_tile(run, tuple(arguments), batched, list(rows), trials=0)
            except Exception:  # an operation may refuse made-up values, in any way
                return "unknown"
            if verdict == "differ":
                return verdict
            if verdict == "close":
                worst = "close"
                if trial + 1 >= TRIALS:
                    break
        return worst


class _Unknown(Exception):
    """There is no value to try an operation on."""


class _Values:
    """Values of one trial, with ``total`` rows where they are batched."""

    def __init__(self, prober: Prober, total: int, trial: int) -> None:
        self.program = prober.program
        self.examples = prober.examples
        self.scope = Scope(prober.program)
        self.total = total
        self.trial = trial
        self.made: dict[tuple[fx.Node, int | None], Any] = {}

    def of(self, argument: Any, axis: int | None) -> Any:
        """The value of an argument; along ``axis`` it has the rows of the trial."""
        if not isinstance(argument, fx.Node):
            return argument
        if (argument, axis) not in self.made:
            self.made[argument, axis] = self._make(argument, axis)
        return self.made[argument, axis]

    def _make(self, node: fx.Node, axis: int | None) -> Any:
        if is_state(node):
            return self._live(node)
        if node.name in self.examples and _is_of(self.examples[node.name], facts.get(node).spec):
            return self._rows(self._near(self.examples[node.name]), axis)
        outer = self.scope.resolve(node)
        if outer is not node:
            return self.of(outer, axis)
        computed = self._computed(node, axis)
        return self._random(node, axis) if computed is None else computed

    def _computed(self, node: fx.Node, axis: int | None) -> Any:
        """A value by way of the operations that make it; None where they may do more."""
        if is_item(node):
            base = self._computed(node.args[0], axis)  # type: ignore[arg-type]
            return None if base is None else base[node.args[1]]
        if is_call(node, CONCAT) or is_call(node, ROWS) or is_call(node, SNAPSHOT):
            # parts of a batch and wholes are alike here: each gets the rows of the trial
            return self.of(node.args[0], axis)
        if is_call(node, RANDN):
            return self._random(node, axis)
        if not is_call(node) or op_of(node).kind != "graph" or op_of(node).signature.writes:
            return None
        op = op_of(node)
        axes = op.signature.separable()
        args = [
            self.of(a, axes.get(p)) for p, a in zip(op.signature.params, node.args, strict=True)
        ]
        with entered(facts.get(node).context):
            return without_checks(op)(*args)

    def _random(self, node: fx.Node, axis: int | None) -> Any:
        generator = torch.Generator().manual_seed(self.trial)
        return self._rows(_random_of(node, facts.get(node).spec, generator), axis)

    def _near(self, example: Any) -> Any:
        """The example on the first trial, then values around it: as far as each is from zero on
        every other one, else as far as all are, since what was still zero when it was seen (an
        hour of the day, a velocity) says nothing of later values."""
        if not self.trial:
            return example
        if isinstance(example, dict):
            return {key: self._near(item) for key, item in example.items()}
        if isinstance(example, np.ndarray) and example.dtype.kind == "f":
            return self._near(torch.from_numpy(np.array(example))).numpy()
        if not isinstance(example, torch.Tensor) or not example.is_floating_point():
            return example
        generator = torch.Generator().manual_seed(self.trial)
        noise = torch.randn(example.shape, generator=generator, device="cpu").to(example)
        data = example.detach()
        sizes = data.abs()
        if self.trial % 2 and sizes.numel():
            sizes = sizes.clamp(min=float(sizes.nan_to_num(0.0, 0.0, 0.0).mean()) or 1.0)
        return data + noise * sizes.clamp(min=1e-3)

    def _rows(self, value: Any, axis: int | None) -> Any:
        return value if axis is None else _with_rows(value, self.total, axis)

    def _live(self, node: fx.Node) -> Any:
        resolved = self.scope.resolve(node)
        if isinstance(resolved, fx.Node) and is_call(resolved, STATE):
            return resolve(self._live(resolved.args[0]), str(resolved.args[1]))  # type: ignore[arg-type]
        name = facts.get(resolved).state if isinstance(resolved, fx.Node) else ""
        if name not in self.program.objects:
            raise _Unknown(name)
        return self.program.objects[name]


def _is_of(value: Any, spec: Spec | None) -> bool:
    """Whether a value is of this type but for its number of rows: nodes of two bodies can have one
    name."""
    if spec is not None and spec.keys:
        entries = zip(spec.keys, spec.items, strict=True)
        return isinstance(value, dict) and all(_is_of(value.get(k), item) for k, item in entries)
    if spec is None or spec.kind not in ("tensor", "array"):
        return True
    kind = torch.Tensor if spec.kind == "tensor" else np.ndarray
    return isinstance(value, kind) and tuple(value.shape[1:]) == spec.shape[1:]


def _copied(value: Any) -> Any:
    """A copy of tensors and arrays, without a graph to go back through."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return value.copy() if isinstance(value, np.ndarray) else value


def _random_of(node: fx.Node, spec: Spec | None, generator: torch.Generator) -> Any:
    """Random numbers of a type that was seen."""
    if spec is not None and spec.keys:
        entries = zip(spec.keys, spec.items, strict=True)
        return {key: _random_of(node, item, generator) for key, item in entries}
    if spec is None or spec.kind not in ("tensor", "array") or spec.dtype not in _DTYPES:
        raise _Unknown(node.name)
    dtype = _DTYPES[spec.dtype]
    if dtype.is_floating_point or dtype == torch.bool:
        made = torch.randn(spec.shape, generator=generator, device="cpu").to(dtype)
    else:  # whole numbers are mostly places in something: of the fewest that a choice has
        made = torch.randint(0, 2, spec.shape, generator=generator, device="cpu").to(dtype)
    return made if spec.kind == "tensor" else made.numpy()


def _with_rows(value: Any, rows: int, axis: int) -> Any:
    """The value with that many rows: cut, or repeated with noise so that rows differ."""
    if isinstance(value, dict):
        return {key: _with_rows(item, rows, axis) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        repeats = -(-rows // max(value.shape[axis], 1))
        return np.concatenate([value] * repeats, axis=axis).take(range(rows), axis=axis)
    if not isinstance(value, torch.Tensor):
        raise _Unknown(type(value).__name__)
    value = value.detach()
    have = value.shape[axis]
    if have >= rows:
        return value.narrow(axis, 0, rows)
    parts = [value]
    generator = torch.Generator().manual_seed(1)
    while sum(p.shape[axis] for p in parts) < rows:
        noise = torch.randn(value.shape, generator=generator, device="cpu")
        parts.append(value + 0.1 * noise.to(value.dtype) if value.is_floating_point() else value)
    return torch.cat(parts, dim=axis).narrow(axis, 0, rows).contiguous()
