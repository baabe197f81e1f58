"""``python -m rose_compiler.testing``: random programs, longer than the tests run them."""

from __future__ import annotations

import time
from typing import Annotated

import torch
import typer
from rich.console import Console

from rose_compiler.testing.fuzz import KINDS, fuzz

app = typer.Typer(add_completion=False, no_args_is_help=True)
console = Console(highlight=False, soft_wrap=True)


@app.callback()
def main() -> None:
    """Checks of the compiler by random programs."""


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


if __name__ == "__main__":
    app()
