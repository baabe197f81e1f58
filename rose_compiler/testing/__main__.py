"""``python -m rose_compiler.testing``: random programs and faults, more than the tests run."""

from __future__ import annotations

import signal
import time
import warnings
from collections import defaultdict
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from rose_compiler.testing.faults import LIMIT, Outcome, cases, ending, inject
from rose_compiler.testing.fuzz import KINDS, fuzz

#: Seconds after which a case hangs; then every thread's stack is shown, and the command ends.
HANGS = 120.0

app = typer.Typer(add_completion=False, no_args_is_help=True)
# programs are shown as they are: `x[g]` is no markup, and `:a:` no picture
console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)


@app.callback()
def main() -> None:
    """Checks of the compiler by random programs and by faults."""


@app.command("fuzz")
def fuzz_command(
    programs: Annotated[int, typer.Option(min=1, help="how many of each kind")] = 100,
    seed: Annotated[int, typer.Option(help="the same seed draws the same programs")] = 0,
    kinds: Annotated[str, typer.Option(help="some of " + ", ".join(KINDS))] = ",".join(KINDS),
) -> None:
    """Run random programs compiled and as written, and compare all that shows.

    Ends with 1 if any differs, and prints the smallest program found that does.
    """
    wanted = [k.strip() for k in kinds.split(",")]
    if unknown := [k for k in wanted if k not in KINDS]:
        raise typer.BadParameter(f"no kind {unknown[0]!r}; there are {', '.join(KINDS)}")
    torch.set_num_threads(1)  # two threads on a busy machine wait for each other
    failed = False
    for kind in wanted:
        start = time.perf_counter()
        found = fuzz(kind, programs, seed)
        done = ", ".join(f"{name} {n}" for name, n in sorted(found.rewrites.items())) or "nothing"
        took = time.perf_counter() - start
        verdict = "all the same" if found.failure is None else "DIFFERENT"
        console.print(f"{kind}: {found.programs} programs, {took:.0f} s, {verdict} (done: {done})")
        if found.failure is not None:
            failed = True
            console.print(found.failure)
    raise typer.Exit(1 if failed else 0)


@app.command("faults")
def faults_command(
    count: Annotated[int, typer.Option(min=1, help="how many in all, each kind in turn")] = 44,
    seed: Annotated[int, typer.Option(help="the same seed puts them at the same points")] = 0,
) -> None:
    """Let compiled trainings fail at random points, and look at how they end.

    Ends with 1 if a fault ended in another error than it should, took longer than 5 seconds, left
    something behind, or spoilt the next call without saying so.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    # in the background of a shell Ctrl-C is ignored, and it is one of the faults
    signal.signal(signal.SIGINT, signal.default_int_handler)
    found: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for fault, hosts, number in cases(count, seed):
        with ending(HANGS):
            found[fault.name, hosts].append(inject(fault, hosts, number))
    console.print(fault_table(found))
    every = [o for outcomes in found.values() for o in outcomes]
    wrong = [o for o in every if o.wrong]
    console.print(
        f"{len(every)} faults, {sum(o.hung for o in every)} hangs, {len(wrong)} wrong; "
        f"slowest {max(o.seconds for o in every):.2f} s of {LIMIT:.0f} s"
    )
    for o in wrong:
        console.print(f"{o.fault} ({o.hosts}): {o.wrong}")
        if o.stacks:
            console.print(o.stacks)
    raise typer.Exit(1 if wrong else 0)


def fault_table(found: dict[tuple[str, str], list[Outcome]]) -> Table:
    """What became of the faults, a line for each kind and host."""
    table = Table("fault", "shards in", "runs", "wrong", "slowest", "error")
    for (name, hosts), outcomes in found.items():
        last = outcomes[-1].error.partition(":")[0]
        slowest = f"{max(o.seconds for o in outcomes):.2f} s"
        wrong = sum(bool(o.wrong) for o in outcomes)
        table.add_row(name, hosts, str(len(outcomes)), str(wrong), slowest, last)
    return table


if __name__ == "__main__":
    app()
