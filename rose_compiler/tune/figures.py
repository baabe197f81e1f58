"""What the operations that a schedule calls otherwise were measured to take, as figures to tell."""

from __future__ import annotations

from collections.abc import Iterable

from rose_compiler.tune.local import Identity, Local, Which
from rose_compiler.tune.transfer import Use

#: Operations named in what is said of a schedule: those that change most.
SHOWN = 2


def figures(uses: Iterable[Use], local: Local) -> str:
    """What was measured of the operations that a schedule calls on other rows or threads, in words,
    and whether they are slower beyond noise, all together; empty where nothing was."""
    before = after = 0.0
    lines: list[tuple[float, str]] = []
    seen: set[Identity] = set()
    for use in uses:
        if use.known is None or use.identity in seen or not use.changed(local.threads):
            continue
        seen.add(use.identity)
        whole = _iteration(use, local, 1.0, 0)
        other = _iteration(use, local, use.rows, use.threads)
        if whole is None or other is None:
            continue
        before += whole[2]
        after += other[1]
        lines.append((abs(other[0] - whole[0]), _said(use, local, whole[0], other[0])))
    lines.sort(key=lambda line: -line[0])
    slower = ["slower beyond noise"] if after > before else []
    return "; ".join([*(text for _, text in lines[:SHOWN]), *slower])


def _iteration(use: Use, local: Local, rows: float, threads: int) -> tuple[float, ...] | None:
    """Seconds an iteration of all calls of an operation, and their quartiles, if each is on so many
    rows."""
    assert use.known is not None
    names: tuple[Which, ...] = ("seconds", "low", "high")
    each = [local.seconds(use.identity, rows, threads, which) for which in names]
    found = [s for s in each if s is not None]
    return tuple(use.known.runs / rows * s for s in found) if len(found) == len(each) else None


def _said(use: Use, local: Local, before: float, after: float) -> str:
    size = local.sizes.get(use.identity, 0)
    count = use.threads or local.threads
    ways: tuple[list[str], list[str]] = ([], [])
    if use.rows != 1.0 and size:
        ways[0].append(f"in calls of {round(size * use.rows)} rows")
        ways[1].append(f"in calls of {size}")
    if count != local.threads:
        ways[0].append(f"with {count} thread{'s' * (count != 1)}")
        ways[1].append(f"with {local.threads}")
    mine, theirs = ("".join(f" {w}" for w in way) for way in ways)
    return (
        f"`{use.identity[0]}` alone takes {1e3 * after:.3g} ms an iteration{mine}, "
        f"{1e3 * before:.3g}{theirs}"
    )
