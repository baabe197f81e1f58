"""Whether each rewritten operation agrees with the captured one when it is fed eager's inputs.

A whole training iteration can't be compared to a tolerance: a simulator turns one ulp of an action
into percents within a few dozen steps. So the captured program runs in program order and every
result is kept; then the rewritten program runs in program order beside it, and each result that a
rewritten operation makes is compared with the captured one's and replaced by it. What comes next
is fed what eager was fed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
import torch.fx as fx

from rose_compiler.base.errors import SourceLocation
from rose_compiler.ir import facts, interp
from rose_compiler.ir.ops import DRAW, RANDN, Op
from rose_compiler.ir.program import Program, is_call, op_of
from rose_compiler.runtime.probe import ATOL_SHARE, RTOL, Verdict, compare_outputs
from rose_compiler.runtime.rows import kept, rows_of, span

How = Literal["whole", "tiles", "trips"]
_ORDER: tuple[Verdict, ...] = ("bits", "close", "differ")
_RNG = "rng:torch"


@dataclass
class Agreement:
    """How one operation of the rewritten program compares with the captured one it stems from.

    ``how``: it computes the captured operation's batch whole, in tiles, or the batches of several
    trips at once. ``part``: it makes some of the captured operation's results only, or takes its
    random numbers from outside. ``error`` and ``scale`` are the largest absolute difference and the
    largest magnitude among the numbers compared; the tolerance is
    ``atol_share * scale + rtol * |value|`` for each tensor.
    """

    operation: str
    captured: str
    where: SourceLocation | None
    how: How
    part: bool
    calls: int = 0
    verdict: Verdict = "bits"
    error: float = 0.0
    scale: float = 0.0
    missing: int = 0  # rows of the captured operation that it did not compute

    @property
    def rewritten(self) -> bool:
        """Whether it computes otherwise than the captured operation."""
        return self.part or self.how != "whole"

    def __str__(self) -> str:
        place = f" ({self.where})" if self.where else ""
        kind = f"{'part, ' if self.part else ''}{self.how}"
        return (
            f"{self.operation} of {self.captured}{place}: {kind}, {self.calls} calls, "
            f"{self.verdict}, error {self.error:.3g} at scale {self.scale:.3g}"
        )


@dataclass
class Report:
    """What :func:`agree` found. ``drawn`` is how many operations of the captured program draw;
    ``draws`` says where the first of them left torch's generator otherwise, empty if none did.
    """

    operations: list[Agreement]
    drawn: int
    draws: str

    def rewritten(self) -> list[Agreement]:
        """The operations that compute otherwise than captured."""
        return [a for a in self.operations if a.rewritten]

    def faults(self) -> list[str]:
        """What does not agree, one line each."""
        found = [str(a) for a in self.operations if a.verdict == "differ"]
        found += [
            f"{a.operation} of {a.captured} computed {a.missing} rows too few"
            for a in self.operations
            if a.missing
        ]
        # what no pass touched is fed eager's inputs and must give eager's bits
        found += [
            f"not rewritten, other bits: {a}"
            for a in self.operations
            if not a.rewritten and a.verdict == "close"
        ]
        return found + ([self.draws] if self.draws else [])


@dataclass(frozen=True)
class Inputs:
    """What a program is run on: its values by name and the objects of its state roots."""

    values: Mapping[str, Any]
    objects: Mapping[str, Any]


def agree(
    captured: Program,
    rewritten: Program,
    ours: Inputs,
    theirs: Inputs,
    *,
    rtol: float = RTOL,
    atol_share: float = ATOL_SHARE,
) -> Report:
    """Compare every operation of a rewritten program with the captured one it stems from.

    ``ours`` and ``theirs`` are two sets of equal inputs, one for each program. Torch's and numpy's
    generators start both runs from where they are now, and are left where the second run ends.
    Afterwards the objects of both can be compared bit for bit: all that the rewritten program
    stored were eager's values.
    """
    before = torch.get_rng_state(), np.random.get_state()  # noqa: NPY002 (what users draw from)
    reference = _Reference()
    reference.root(captured, _inputs(captured, ours))
    torch.set_rng_state(before[0])
    np.random.set_state(before[1])  # noqa: NPY002
    beside = _Beside(reference, rtol, atol_share)
    beside.root(rewritten, _inputs(rewritten, theirs))
    return Report(beside.finish(), len(reference.generators), beside.draws_differ())


def _inputs(program: Program, given: Inputs) -> list[Any]:
    return [
        *(given.values[n] for n in program.value_params),
        *(given.objects[n] for n in program.state_params),
    ]


def _draws(node: fx.Node) -> bool:
    return _RNG in (op_of(node).signature.writes or ())


class _Reference(interp.Interpreter):
    """Runs the captured program and keeps what each operation gave, call by call."""

    def __init__(self) -> None:
        super().__init__(interp.Hooks())
        self.results: dict[Op, list[Any]] = {}
        self.names: dict[Op, tuple[str, SourceLocation | None]] = {}
        self.generators: list[tuple[str, torch.Tensor]] = []

    def _call(self, node: fx.Node, env: interp.Environment) -> Any:
        result = super()._call(node, env)
        if is_call(node) and op_of(node).kind != "builtin":
            op = op_of(node)
            self.results.setdefault(op, []).append(kept(result))
            self.names.setdefault(op, (op.name, facts.get(node).origin.where))
            if _draws(node):
                self.generators.append((op.name, torch.get_rng_state()))
        return result


@dataclass
class _Cursor:
    """How many rows (of calls: those without rows) of an operation have been compared."""

    told: Agreement
    rows: int
    position: int = 0


@dataclass
class _Beside(interp.Interpreter):
    """Runs the rewritten program; compares, and hands on what the captured one made."""

    reference: _Reference
    rtol: float
    atol_share: float
    cursors: dict[tuple[Any, ...], _Cursor] = field(default_factory=dict)
    generators: list[torch.Tensor] = field(default_factory=list)
    how: dict[fx.Node, How] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__(interp.Hooks())

    def _call(self, node: fx.Node, env: interp.Environment) -> Any:
        result = super()._call(node, env)
        if not is_call(node):
            return result
        op = op_of(node)
        if op.kind == "builtin" and op not in (RANDN, DRAW):
            return result
        if _draws(node):
            self.generators.append(torch.get_rng_state())
        root, positions = op.attributes.get("part_of", (op, None))
        if root not in self.reference.results:
            return result
        return self._compared(node, op, root, positions, result)

    def _compared(
        self,
        node: fx.Node,
        op: Op,
        root: Op,
        positions: tuple[int | None, ...] | None,
        result: Any,
    ) -> Any:
        calls = self.reference.results[root]
        given = _picked(result, positions)
        wanted = [_picked(_taken(c, root, positions), positions) for c in calls]
        rows, all_rows = rows_of(given), rows_of(wanted[0])
        if node not in self.how:
            self.how[node] = _how(rows, all_rows)
        how = self.how[node]
        cursor = self._cursor(op, root, how, 1 if how == "whole" else all_rows or 1, node)
        start, count = cursor.position, 1 if how == "whole" else rows or 1
        cursor.position += count
        cursor.told.calls += 1
        expected = span(wanted, cursor.rows, start, start + count)
        self._judge(cursor.told, *_with_rows(op, positions, how, expected, given))
        if how == "whole" and op is root:
            return result  # its own result, which may share memory with a state
        return _put_back(result, positions, expected)

    def _cursor(self, op: Op, root: Op, how: How, rows: int, node: fx.Node) -> _Cursor:
        key = (op, how)
        if key not in self.cursors:
            name, where = self.reference.names[root]
            where = facts.get(node).origin.where or where
            self.cursors[key] = _Cursor(Agreement(op.name, name, where, how, op is not root), rows)
        return self.cursors[key]

    def _judge(self, told: Agreement, expected: Any, given: Any) -> None:
        for a, b in _pairs(expected, given):
            scale, error = _magnitudes(a, b)
            told.scale, told.error = max(told.scale, scale), max(told.error, error)
            verdict = compare_outputs(a, b, self.rtol, self.atol_share * scale)
            told.verdict = max(told.verdict, verdict, key=_ORDER.index)

    def finish(self) -> list[Agreement]:
        """The operations in order of their first call, with what was left out counted."""
        for (op, _), cursor in self.cursors.items():
            root = op.attributes.get("part_of", (op,))[0]
            cursor.told.missing = cursor.rows * len(self.reference.results[root]) - cursor.position
        return [c.told for c in self.cursors.values()]

    def draws_differ(self) -> str:
        """Where torch's generator went another way than in the captured program."""
        seen = iter(self.generators)
        for name, state in self.reference.generators:
            if not any(torch.equal(state, other) for other in seen):
                return f"{name} left torch's generator in another state"
        last = self.generators[-1:] or [torch.get_rng_state()]
        if self.reference.generators and not torch.equal(last[0], self.reference.generators[-1][1]):
            return "random numbers were drawn behind the last draw of the captured program"
        return ""


def _taken(
    result: Any, root: Op, positions: tuple[int | None, ...] | None
) -> dict[int | None, Any]:
    """The results of a captured call that a rewritten operation makes, by their position."""
    if positions is None:
        return {0: result}
    if root.signature.results == 1 and not isinstance(result, tuple):
        return {0: result}
    return {k: result[k] for k in positions if k is not None}


def _picked(result: Any, positions: tuple[int | None, ...] | None) -> Any:
    if positions is None:
        return result[0] if isinstance(result, dict) and set(result) == {0} else result
    if isinstance(result, dict):
        return tuple(result[k] for k in positions if k is not None)
    if len(positions) == 1:
        return (result,)
    return tuple(r for r, k in zip(result, positions, strict=True) if k is not None)


def _put_back(result: Any, positions: tuple[int | None, ...] | None, expected: Any) -> Any:
    """The result with captured values in the places where there are any."""
    if positions is None:
        return _like(result, expected)
    if len(positions) == 1:
        return result if positions[0] is None else _like(result, expected[0])
    values = iter(expected)
    return tuple(
        r if k is None else _like(r, next(values)) for r, k in zip(result, positions, strict=True)
    )


def _like(result: Any, expected: Any) -> Any:
    if isinstance(result, torch.Tensor) and isinstance(expected, torch.Tensor):
        return result if result.requires_grad else expected
    if isinstance(result, np.ndarray) and isinstance(expected, np.ndarray):
        return expected
    if type(result) is tuple and type(expected) is tuple and len(result) == len(expected):
        return tuple(map(_like, result, expected))
    return result


def _with_rows(
    op: Op, positions: tuple[int | None, ...] | None, how: How, expected: Any, given: Any
) -> tuple[Any, Any]:
    """The results that can be compared: of what has no rows, a tile may have its own."""
    axes = op.signature.separable()
    single = positions is None and op.signature.results == 1
    if how == "whole" or op.signature.batch is None or single:
        return expected, given
    kept_positions = positions or tuple(range(op.signature.results))
    keep = [axes.get(f"return.{k}") == 0 for k, of in enumerate(kept_positions) if of is not None]
    return (
        tuple(v for v, yes in zip(expected, keep, strict=True) if yes),
        tuple(v for v, yes in zip(given, keep, strict=True) if yes),
    )


def _how(rows: int | None, all_rows: int | None) -> How:
    if rows is None or all_rows is None or rows == all_rows:
        return "whole"
    return "tiles" if rows < all_rows else "trips"


def _pairs(expected: Any, given: Any) -> Iterator[tuple[Any, Any]]:
    """What can be compared: numbers, and tensors and arrays of numbers; containers are opened.

    A simulator's infos are no rows: only the whole, merged one can be compared.
    """
    if isinstance(given, torch.Tensor):
        yield expected, given.detach()
    elif isinstance(given, np.ndarray | np.generic | bool | int | float):
        yield expected, given
    elif isinstance(given, tuple | list):
        if not isinstance(expected, tuple | list) or len(expected) != len(given):
            yield expected, given
            return
        for a, b in zip(expected, given, strict=True):
            yield from _pairs(a, b)


def _magnitudes(a: Any, b: Any) -> tuple[float, float]:
    """The largest finite magnitude of ``a`` and the largest difference to ``b``."""
    try:
        x = torch.as_tensor(a).to(torch.float64)
        y = torch.as_tensor(b).to(torch.float64)
    except (TypeError, RuntimeError, ValueError):
        return 0.0, 0.0
    if x.shape != y.shape or x.numel() == 0:
        return 0.0, 0.0
    finite = torch.isfinite(x) & torch.isfinite(y)
    if not bool(finite.any()):
        return 0.0, 0.0
    return float(x[finite].abs().max()), float((x - y)[finite].abs().max())
