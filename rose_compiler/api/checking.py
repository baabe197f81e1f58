"""Checking mode: an iteration runs one operation at a time, and everything that a pass changed is
computed a second time, as captured.

The rewritten program is run in its own order. Where a pass cut an operation into tiles, into parts
or joined several trips of it, the captured operation is called on the joined inputs, its random
numbers drawn again from where the generator stood, and the results are compared. What components
declare is held against what each of their calls touches. The first difference ends the iteration.
Parts whose inputs can't be put together again are left unchecked, and :attr:`Checker.unchecked`
says so. Orders and lanes are checked by :mod:`rose_compiler.api.orders`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx

from rose_compiler.api.observing import Observer, lacking, reached, written
from rose_compiler.api.undeclared import undeclared
from rose_compiler.base.errors import RoseError, VerifyError, fail, register
from rose_compiler.base.remarks import Remark, RemarkLog
from rose_compiler.ir import facts, interp
from rose_compiler.ir.contexts import entered
from rose_compiler.ir.deps import Dependences
from rose_compiler.ir.effects import RNG_TORCH
from rose_compiler.ir.ops import DRAW, JOIN_ROWS, RANDN, ROWS, STATE, Op
from rose_compiler.ir.program import Program, is_call, is_item, is_state, op_of, placeholders
from rose_compiler.ir.scope import Scope
from rose_compiler.ir.sizes import sizes_of
from rose_compiler.runtime.probe import compare_outputs
from rose_compiler.runtime.rows import cut, join, kept, rows_of, span

register(
    "check-values-differ",
    VerifyError,
    "checking mode: a rewritten operation gave other values than the captured one",
    "leave the pass out with ROSE_PASSES=-name, or correct a `batch=` that promises too much",
)
register(
    "check-draws-differ",
    VerifyError,
    "checking mode: a rewritten operation drew other random numbers than the captured one",
    "leave out the pass that took the draws away: ROSE_PASSES=-hoist",
)


@dataclass
class _Root:
    """A captured operation that passes rewrote: how to call it, and what it gave so far."""

    node: fx.Node
    rows: int
    inner: dict[str, int]  # position of an argument, by the name that parts know it by
    results: list[Any] = field(default_factory=list)


@dataclass
class _Batch:
    """Calls of one part until they make up the captured operation's batch."""

    inputs: list[tuple[Any, ...]] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    rows: int = 0
    start: int = 0  # rows compared so far


class Checker(interp.Interpreter):
    """Runs one iteration of a rewritten program and checks it.

    ``unchecked`` has the names of rewritten operations that could not be computed again, and why;
    ``checked`` how many calls were.
    """

    def __init__(
        self,
        captured: Program,
        rewritten: Program,
        states: Mapping[str, Any],
        numerics: str,
    ) -> None:
        self.observer = Observer(captured, None, every=True)
        super().__init__(self.observer)
        self.rewritten = rewritten
        self.numerics = numerics
        self.states = states
        self.scope = Scope(captured)
        self.deps = Dependences(rewritten)
        self._written = written(rewritten, self.deps)
        self.checked = 0
        self.unchecked: dict[str, str] = {}
        self._generators: dict[fx.Node, tuple[torch.Tensor, torch.Tensor]] = {}
        self._batches: dict[tuple[Op, str], _Batch] = {}
        self._roots: dict[Op, _Root] = {}
        self._captured = {
            op_of(n): n for n in captured.nodes() if is_call(n) and op_of(n).kind != "builtin"
        }

    def run(self, values: Mapping[str, Any]) -> Any:
        """Run one iteration on these values.

        Raises:
            VerifyError: where a rewritten operation differs from the captured one.
            DeclarationError: where a component does what its declaration leaves out.
            Exception: what an operation raises.
        """
        program = self.rewritten
        given = [values[n] for n in program.value_params]
        return self.root(program, [*given, *(self.states[n] for n in program.state_params)])

    def tell(self, log: RemarkLog) -> None:
        """Leave a remark on each operation that could not be checked, once."""
        for name, why in self.unchecked.items():
            remark = Remark("note", "check", (), "unchecked", f"`{name}` was not checked: {why}")
            if remark not in log:
                log.add(remark)

    def _call(self, node: fx.Node, env: interp.Environment) -> Any:
        draws = is_call(node) and RNG_TORCH in (op_of(node).signature.writes or ())
        before = torch.get_rng_state() if draws else None
        args = self._read(env, node.args)
        result = super()._call(node, env)
        if before is not None:
            self._generators[node] = before, torch.get_rng_state()
        if not is_call(node) or op_of(node).kind == "builtin":
            return result
        self._declared(node)
        op = op_of(node)
        root, positions = op.attributes.get("part_of", (op, None))
        found = self._root(root)
        if found is not None and op_of(node).kind != "step":
            self._check(node, op, root, found, positions, args, result)
        return result

    # -- declarations

    def _declared(self, node: fx.Node) -> None:
        if not self.observer.found:
            return
        observation = self.observer.found.pop()
        effects, names = self.deps.effects(node), self.observer.names
        writes, reads = lacking(observation, effects, names)
        more = reached(observation, effects, names)
        reads |= {s: line for s, line in more.items() if s not in reads and self._written(s)}
        for word, states in (("writes", writes), ("reads", reads)):
            for state, line in states.items():
                raise undeclared(node, word, state, line)

    # -- values

    def _root(self, op: Op) -> _Root | None:
        if op in self._roots:
            return self._roots[op]
        node = self._captured.get(op)
        if node is None or not _pure(op):
            return None
        axes = op.signature.separable() or dict(op.attributes.get("rows", {}))
        rows = None
        for name, argument in zip(op.signature.params, node.args, strict=True):
            spec = facts.get(argument).spec if isinstance(argument, fx.Node) else None
            if axes.get(name) == 0 and spec is not None and spec.shape:
                rows = rows or spec.shape[0]
        names = op.signature.params
        if op.body is not None:
            names = tuple(n.name for n in placeholders(op.body.graph))
        if rows is None:
            return None
        self._roots[op] = _Root(node, rows, {name: k for k, name in enumerate(names)})
        return self._roots[op]

    def _check(
        self,
        node: fx.Node,
        op: Op,
        root: Op,
        found: _Root,
        positions: tuple[int | None, ...] | None,
        args: tuple[Any, ...],
        result: Any,
    ) -> None:
        rows = _batch_rows(op, args) or rows_of(result)
        if rows is None or (op is root and rows == found.rows):
            return
        kind = "tiles" if rows < found.rows else "trips" if rows > found.rows else "whole"
        batch = self._batches.setdefault((op, kind), _Batch())
        batch.inputs.append(args)
        batch.outputs.append(kept(result))
        batch.rows += rows
        if batch.rows < found.rows:
            return
        first = batch.start // found.rows
        missing = (batch.start + batch.rows) // found.rows - len(found.results)
        if missing > 0 and not self._again(node, op, root, found, batch, missing):
            self._batches[op, kind] = _Batch(start=batch.start + batch.rows)
            return
        wanted = [_picked(r, root, positions) for r in found.results]
        parts = [_results(output, op, positions) for output in batch.outputs]
        if kind != "whole":
            # of what has no rows, such as infos, a tile has its own
            kept_ones = comparable(op, positions)
            wanted = [tuple(itertools.compress(w, kept_ones)) for w in wanted]
            parts = [tuple(itertools.compress(p, kept_ones)) for p in parts]
        start, self._batches[op, kind] = batch.start, _Batch(start=batch.start + batch.rows)
        given = join(parts)  # raises for other keys, as joining them outside of checking does
        try:
            expected = span(wanted, found.rows, start, start + batch.rows)
        except ValueError as error:
            self.unchecked[op.name] = str(error)
            return
        self.checked += 1
        self._compare(node, root, found, expected, given, first)

    def _again(
        self, node: fx.Node, op: Op, root: Op, found: _Root, batch: _Batch, missing: int
    ) -> bool:
        """Call the captured operation on the joined inputs; whether that can be."""
        names = op.signature.params
        if op is not root and op.body is not None:
            names = tuple(n.name for n in placeholders(op.body.graph))
        elif op is root:
            names = tuple(found.inner)
        axes = op.signature.separable() or dict(op.attributes.get("rows", {}))
        params = dict(zip(names, op.signature.params, strict=True))
        given: dict[str, Any] = {}
        for k, name in enumerate(names):
            parts = [i[k] for i in batch.inputs]
            try:
                given[name] = join(parts) if axes.get(params[name]) == 0 else parts[0]
            except ValueError as error:
                self.unchecked[op.name] = str(error)
                return False
        states = self._states(found)
        lack = [n for n in found.inner if n not in given and n not in states]
        if lack:
            self.unchecked[op.name] = f"it is not handed {', '.join(lack)}"
            return False
        drawn = [_draw_of(a) for a in node.args if isinstance(a, fx.Node)]
        draws = RNG_TORCH in (root.signature.writes or ())
        generators = [
            self._generators[d] for d in (*drawn, node) if draws and d in self._generators
        ]
        if draws and not generators:
            self.unchecked[op.name] = "where its random numbers were drawn is not known"
            return False
        total = batch.rows
        for number in range(missing):
            low = number * found.rows
            args = []
            for name in found.inner:
                value = states[name] if name in states else given[name]
                batched = axes.get(params.get(name, "")) == 0
                args.append(cut(value, low, low + found.rows, total) if batched else value)
            try:
                found.results.append(self._reference(node, root, found, args, generators))
            except RoseError:
                raise
            except Exception as error:  # the user's code, on tiles of what may be more than rows
                self.unchecked[op.name] = f"on joined inputs it raises {type(error).__name__}"
                return False
        return True

    def _reference(
        self,
        node: fx.Node,
        root: Op,
        found: _Root,
        args: list[Any],
        generators: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> Any:
        now = torch.get_rng_state()
        try:
            if generators:
                torch.set_rng_state(generators[0][0])
            with entered(facts.get(found.node).context), torch.no_grad():
                sizes = sizes_of(root)
                whole = root if sizes is None else sizes.or_instead(root, root.signature.params)
                result = kept(whole(*args))
            drawn = torch.get_rng_state()
        finally:
            torch.set_rng_state(now)
        if generators and not torch.equal(drawn, generators[-1][1]):
            raise fail(
                "check-draws-differ",
                f"`{root.name}` leaves torch's generator in another state than its hoisted draws",
                where=facts.get(found.node).origin.where,
            )
        return result

    def _states(self, found: _Root) -> dict[str, Any]:
        """The live objects that the captured operation is handed, by inner name."""
        made = {}
        for name, k in found.inner.items():
            argument = found.node.args[k]
            if isinstance(argument, fx.Node) and is_state(argument):
                made[name] = self._live(argument)
            elif not isinstance(argument, fx.Node):
                made[name] = argument
        return made

    def _live(self, node: fx.Node) -> Any:
        resolved = self.scope.resolve(node)
        assert isinstance(resolved, fx.Node)
        if is_call(resolved, STATE):
            return interp.resolve(self._live(resolved.args[0]), str(resolved.args[1]))  # type: ignore[arg-type]
        return self.states[resolved.name]

    def _compare(
        self, node: fx.Node, root: Op, found: _Root, expected: Any, given: Any, call: int
    ) -> None:
        verdict = compare_outputs(expected, given)
        if verdict == "bits" or (verdict == "close" and self.numerics != "bitwise"):
            return
        where = facts.get(found.node).origin.where
        passes = facts.get(node).origin.passes
        what, captured, rewritten = _first_difference(expected, given)
        raise fail(
            "check-values-differ",
            f"`{op_of(node).name}` differs from `{root.name}` in call {call} of the iteration: "
            f"{what}",
            where=where,
            expected=f"{captured} (as captured)",
            found=f"{rewritten} (after {', '.join(passes) or 'no pass'})",
        )


def _pure(op: Op) -> bool:
    writes = op.signature.writes
    return writes is not None and not set(writes) - {RNG_TORCH} and op.bound


def _batch_rows(op: Op, args: tuple[Any, ...]) -> int | None:
    axes = op.signature.separable()
    for name, value in zip(op.signature.params, args, strict=True):
        if axes.get(name) == 0 and (n := rows_of(value)) is not None:
            return n
    return None


def _draw_of(value: fx.Node) -> fx.Node | None:
    """The draw whose numbers, or some rows of them, a value is."""
    while is_call(value, ROWS) or is_call(value, JOIN_ROWS) or is_item(value):
        inner = value.args[0]
        if not isinstance(inner, fx.Node):
            return None
        value = inner
    return value if is_call(value, RANDN) or is_call(value, DRAW) else None


def _picked(result: Any, root: Op, positions: tuple[int | None, ...] | None) -> tuple[Any, ...]:
    """The results of a captured call that a part makes."""
    whole = result if root.signature.results != 1 else (result,)
    if positions is None:
        return tuple(whole)
    return tuple(whole[k] for k in positions if k is not None)


def _results(result: Any, op: Op, positions: tuple[int | None, ...] | None) -> tuple[Any, ...]:
    whole = result if op.signature.results != 1 else (result,)
    if positions is None:
        return tuple(whole)
    return tuple(r for r, k in zip(whole, positions, strict=True) if k is not None)


def comparable(op: Op, positions: tuple[int | None, ...] | None) -> list[bool]:
    """For each result of an operation that is one of the captured one's: whether it has rows."""
    axes = op.signature.separable()
    count = max(op.signature.results, 1)
    kept_positions = positions or tuple(range(count))
    return [axes.get(f"return.{k}") == 0 for k, of in enumerate(kept_positions) if of is not None]


def _first_difference(expected: Any, given: Any) -> tuple[str, Any, Any]:
    """Where two results differ first, with both values."""
    for k, (a, b) in enumerate(zip(expected, given, strict=True)):
        if compare_outputs(a, b) == "bits":
            continue
        try:
            x, y = torch.as_tensor(a), torch.as_tensor(b)
        except (TypeError, RuntimeError, ValueError):
            return f"result {k}", a, b
        if x.shape != y.shape:
            return f"result {k}", f"shape {tuple(x.shape)}", f"shape {tuple(y.shape)}"
        differ = (x != y).nonzero()
        worst = max(differ, key=lambda at: float((x - y).abs()[tuple(at)]))
        index = tuple(int(i) for i in worst)
        at = f"result {k} at {list(index)}, the largest of {len(differ)} differences"
        return at, float(x[index]), float(y[index])
    return "the results", expected, given
