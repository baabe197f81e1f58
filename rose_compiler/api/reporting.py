"""A page on a compiled function: one HTML file without references to anything outside."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rose_compiler.api.profiling import Profiling
from rose_compiler.api.tracing import write_whole
from rose_compiler.base.errors import fail
from rose_compiler.base.profile import Profile

#: Letters a line of the page has.
WIDTH = 150


def write_report(path: str | Path, name: str, profiling: Profiling, remarks: str) -> None:
    """Write the page on the schedule that was profiled last.

    Raises:
        ConfigError: when none was, or the file can't be written.
    """
    last = profiling.last
    console = Console(width=WIDTH, record=True, file=StringIO(), color_system=None)
    console.rule(f"{name}: schedule [{profiling.latest}]".replace("[", r"\["), align="left")
    console.print(operations(last.profile))
    console.rule("windows of low activity", align="left")
    console.print(profiling.windows().table(""))
    if last.device_check is not None:
        console.print(last.device_check, markup=False, highlight=False)
    console.rule("cost", align="left")
    console.print(profiling.cost().render(WIDTH), markup=False, highlight=False)
    console.rule("schedules and rewrites", align="left")
    console.print(remarks, markup=False, highlight=False, soft_wrap=True)
    try:
        write_whole(Path(path), console.export_html())
    except OSError as error:
        raise fail(
            "config-argument",
            f"report({str(path)!r}): the page can't be written",
            expected="the path of a file that can be written",
            found=str(error),
        ) from error


def operations(profile: Profile, *, least_share: float = 0.005) -> Table:
    """What each operation takes, as a table for ``rich``; the longest in all first.

    Those that take less than ``least_share`` of an iteration in all are left out.
    """
    iterations = max(1, len(profile.iteration_s))
    whole = sum(profile.iteration_s) / iterations
    table = Table(
        title=f"operations of an iteration of {1e3 * whole:.1f} ms"
        f" (means over {iterations} iterations on {profile.machine})",
        title_justify="left",
    )
    for title in ("loops", "operation", "lane"):
        table.add_column(title, overflow="fold")
    for title in ("runs", "ms in all", "share", "median µs", "p90 µs", "CPU µs", "launch µs",
                  "wait µs", "active"):  # fmt: skip
        table.add_column(title, justify="right")
    for op in sorted(profile.ops, key=lambda o: -o.count * o.mean_s):
        total = op.count * op.mean_s / iterations
        if total < least_share * whole:
            continue
        micro = (op.median_s, op.p90_s, op.cpu_s, op.launch_s, op.wait_s)
        table.add_row(
            " > ".join(op.path),
            op.label.replace("[", r"\["),
            op.lane or "coordinator",
            f"{op.count / iterations:g}",
            f"{1e3 * total:.2f}",
            f"{total / whole:.0%}" if whole > 0 else "",
            *(f"{1e6 * seconds:.0f}" for seconds in micro),
            f"{op.activity:.0%}",
        )
    return table
