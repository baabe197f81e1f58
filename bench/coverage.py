"""What the compiler makes of whole training scripts: ``python -m bench.coverage``.

Every script of ``tests/loops`` trains for four iterations, its simulator in two shards where it can
be made of shards, under one fixed schedule that tiles, overlaps and defers. One row a script; no
times, so that the table is the same on every machine with the same versions.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch.fx as fx

from rose_compiler.api import Compiled
from rose_compiler.base.remarks import Remark
from rose_compiler.ir import facts
from rose_compiler.ir.deps import Dependences
from rose_compiler.ir.ops import BRANCH, LOOP
from rose_compiler.ir.program import Program, is_call, is_exit, op_of
from rose_compiler.passes.base import is_work
from rose_compiler.passes.modulo import Modulo
from tests.loops.harness import SHARDED, Script, compiled
from tests.loops.registry import SCRIPTS

#: Blockers that say no more than that the schedule at hand leaves something out.
_CHOSEN = frozenset(("switched-off",))
#: Remarks that stand for what capture says, not for a pass.
_CAPTURE = frozenset(("trace",))


@dataclass
class Row:
    """One script."""

    name: str
    loops: int
    branches: int
    operations: int
    opaque: int
    graphs: int
    traced: int
    rewrites: Counter[str]
    lanes: int
    beside: int
    blockers: Counter[str]

    def cells(self) -> tuple[str, ...]:
        """The row as text."""
        overlapped = f"{self.beside} on {self.lanes} lanes" if self.lanes > 1 else "-"
        if self.lanes == 1:
            overlapped = f"{self.beside} beside 1 lane"
        return (
            self.name,
            f"{self.loops} / {self.branches}",
            str(self.operations),
            str(self.opaque),
            f"{self.traced} in {self.graphs}" if self.graphs else "-",
            _counts(self.rewrites),
            overlapped,
            _counts(self.blockers),
        )


HEAD = (
    "script",
    "loops / branches",
    "operations",
    "opaque",
    "statements in graphs",
    "rewrites",
    "operations beside a step",
    "what blocked the rest",
)


def _counts(counter: Counter[str]) -> str:
    rows = sorted(counter.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{name} {count}" for name, count in rows) or "-"


def calls(program: Program) -> list[fx.Node]:
    """The user's operations: no structure, no exits, nothing that the compiler added."""
    return [
        n for n in program.nodes() if is_call(n) and op_of(n).kind != "builtin" and not is_exit(n)
    ]


def beside_steps(program: Program) -> tuple[int, set[str]]:
    """How many operations run while a step is on a lane, and the lanes, in a scheduled program."""
    deps, lanes, found = Dependences(program), set(), set()
    for graph in program.graphs():
        slots = {n: slot for n in graph.nodes if (slot := facts.get(n).slot) is not None}
        steps = [n for n, slot in slots.items() if slot.lane]
        if not steps:
            continue
        order = tuple(sorted(slots, key=lambda n: slots[n].order))
        edges = tuple(e for e in deps.edges(graph) if e.src in slots and e.dst in slots)
        modulo = Modulo(order, {n: slot.stage for n, slot in slots.items()}, edges)
        for step in steps:
            lanes.add(slots[step].lane)
            found |= {n for n in modulo.beside(step) if is_work(n) and n not in steps}
    return len(found), lanes


def statements(remarks: Iterable[Remark]) -> tuple[int, int]:
    """Statements of the user's in graphs, and graphs, as tracing reported them."""
    traced = [r for r in remarks if r.kind == "applied" and r.pass_name == "trace"]
    return sum(int(r.why.split(" ")[0]) for r in traced), len(traced)


def row_of(script: Script) -> Row:
    """Train a script and tell what was made of it."""
    with compiled(script, SHARDED if script.sharded else None) as trained:
        row = Row(script.name, 0, 0, 0, 0, 0, 0, Counter(), 0, 0, Counter())
        for function in trained.compiled:
            _add(row, function)
        return row


def _add(row: Row, function: Compiled) -> None:
    assert function._last is not None
    whole = function._last.captured.program
    row.loops += sum(is_call(n, LOOP) for n in whole.nodes())
    row.branches += sum(is_call(n, BRANCH) for n in whole.nodes())
    row.operations += len(calls(whole))
    unit = function._last.unit
    row.opaque += sum(
        op_of(n).signature.reads is None or op_of(n).signature.writes is None
        for n in calls(unit.program)
    )
    schedule = function._schedule()
    remarks = [*function._log, *unit.watch.remarks, *schedule.history.remarks]
    traced, graphs = statements(remarks)
    row.traced, row.graphs = row.traced + traced, row.graphs + graphs
    for remark in remarks:
        if remark.kind == "applied" and remark.pass_name not in _CAPTURE:
            row.rewrites[remark.pass_name] += 1
        elif remark.kind == "missed" and remark.code not in _CHOSEN:
            row.blockers[remark.code] += 1
    beside, lanes = beside_steps(schedule.program)
    row.beside, row.lanes = row.beside + beside, row.lanes + len(lanes)


def table(rows: Iterable[Row]) -> str:
    """The rows as a table in Markdown."""
    lines = [HEAD, tuple("---" for _ in HEAD), *(row.cells() for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main(argv: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="bench.coverage", description=__doc__.split("\n")[0])
    parser.add_argument("--only", help="scripts whose name contains this")
    args = parser.parse_args(argv)
    rows = [row_of(s) for s in SCRIPTS if args.only is None or args.only in s.name]
    print(table(rows))


if __name__ == "__main__":
    main()
