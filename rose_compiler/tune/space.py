"""The handful of schedules that are worth a trial, and the one that needs none."""

from __future__ import annotations

from dataclasses import replace

from rose_compiler.base.decision import Decision

#: More groups than this have not paid on any shape measured so far.
MAX_GROUPS = 4


def candidates(
    shards: int,
    *,
    close: bool,
    threads: int,
    asynchronous: bool,
    eager: bool,
    fuse: bool = False,
    hosted: bool = False,
    overlap: bool = False,
    accumulate: bool = False,
    wrappers: bool = False,
    streams: bool = False,
    copies: bool = False,
) -> list[Decision | None]:
    """Schedules to try, the user's own statements (``None``) or program order first.

    Args:
        shards: independent parts of the largest simulator; 1 when it has none.
        close: whether bits may change, so that thread counts and batching over time may.
        threads: torch's intra-operation threads as the user set them.
        asynchronous: whether the simulator steps beside the caller by itself.
        eager: whether the user's own statements can be run.
        fuse: whether an optimizer's steps can be fused; no candidate is without it then, since a
            fused step does the same work in fewer calls.
        hosted: whether components live in hosts; every candidate runs their calls beside the rest.
        overlap: whether some work may run on threads beside the training; every candidate but one
            lets it.
        accumulate: whether a gradient may add up while its data are collected; every candidate but
            one lets it.
        wrappers: whether wrappers of a simulator's environments can advance at once; every
            candidate lets them, since that gives the same bits in fewer calls.
        streams: whether some work may be queued on streams of its own beside the rest. The first
            two schedules that are tried have one more each that lets it: events cost the
            coordinator time, which small kernels do not win back.
        copies: whether such work can be handed copies of parameters; one more candidate does.
    """
    found: list[Decision | None] = [None if eager else Decision()]
    groups = [g for g in (2, MAX_GROUPS) if g <= shards] or [1]
    lanes = "native" if asynchronous else "inline"
    counts: list[tuple[int | None, int | None]] = [(None, None)]
    if close and threads > 1:
        counts = [(1, None), (1, 1)]
    for rollout, update in counts:
        for group in groups:
            for defer in (True, False):
                found.append(
                    Decision(
                        groups=group,
                        late="shadow" if asynchronous else "inline",
                        defer=defer,
                        lanes=lanes,  # type: ignore[arg-type]
                        rollout_threads=rollout,
                        update_threads=update,
                        fuse=fuse,
                        hosted=hosted,
                    )
                )
    if close and threads > 1:
        found.append(Decision(rollout_threads=1, update_threads=1, fuse=fuse, hosted=hosted))
        found.append(Decision(rollout_threads=1, fuse=fuse, hosted=hosted))
    if overlap:
        plain = [one for one in found[1:2] if one is not None]
        rest = [one for one in found[1:] if one is not None]
        found = [found[0], *(replace(one, overlap=True) for one in rest), *plain]
        if copies:
            found += [replace(found[1], copies=True)] if found[1] is not None else []
    if accumulate:
        plain = [one for one in found[1:2] if one is not None]
        rest = [one for one in found[1:] if one is not None]
        found = [found[0], *(replace(one, accumulate=True) for one in rest), *plain]
    if wrappers:
        found[1:] = [replace(one, wrappers=True) for one in found[1:] if one is not None]
    # program order with what costs nothing: where no window speaks for more, this is left to try
    order = Decision(fuse=fuse, hosted=hosted, wrappers=wrappers)
    if order not in found:
        found.append(order)
    if streams:
        both = [replace(one, streams=True) for one in found[1:3] if one is not None]
        found = [*found[:3], *both, *found[3:]]
    return found


#: Tiles of the rows of a minibatch at most: what each does once a call becomes the greater part.
MOST_TILES = 4


def default_decision(shards: int, asynchronous: bool, close: bool, plain: Decision) -> Decision:
    """The schedule without tuning: two groups of shards, late work in the simulator's shadow, and
    what ``plain`` has.

    Steps and products beside each other want one thread each; in bitwise mode the thread count
    stays the user's, since sums differ in bits between one thread and two.
    """
    if not asynchronous:
        return replace(plain, late="shadow")
    threads = 1 if close else None
    return replace(plain, groups=min(2, shards), late="shadow", rollout_threads=threads)


def with_script(decision: Decision | None, plain: Decision) -> Decision:
    """A schedule with its losses and graphs run by TorchScript, and what ``plain`` has; for the
    user's own statements, program order."""
    return replace(_with_plain(decision, plain), script=True)


def with_tiles(decision: Decision | None, threads: int) -> Decision | None:
    """A schedule with what TorchScript runs in tiles of rows, one for each of torch's threads;
    ``None`` where it has no TorchScript, or there is one thread."""
    if decision is None or not decision.script or decision.tiles > 1 or threads < 2:
        return None
    return replace(decision, tiles=min(threads, MOST_TILES), update_threads=1)


def with_compiled(decision: Decision | None, plain: Decision) -> Decision:
    """A schedule with its losses compiled, and what ``plain`` has; for the user's own statements,
    program order."""
    return replace(_with_plain(decision, plain), compile=True)


def _with_plain(decision: Decision | None, plain: Decision) -> Decision:
    base = decision or plain
    return replace(
        base,
        fuse=base.fuse or plain.fuse,
        hosted=base.hosted or plain.hosted,
        wrappers=base.wrappers or plain.wrappers,
    )
