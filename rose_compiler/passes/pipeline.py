"""The passes in order, with the reason for each one's place, and those of other packages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points

from rose_compiler.base.errors import fail
from rose_compiler.passes.accumulate import Accumulate
from rose_compiler.passes.base import Pass
from rose_compiler.passes.batch_wrappers import BatchWrappers
from rose_compiler.passes.canonicalize import Canonicalize
from rose_compiler.passes.defer import Defer
from rose_compiler.passes.drop_gradients import DropGradients
from rose_compiler.passes.fuse import Fuse
from rose_compiler.passes.hoist import HoistInvariant
from rose_compiler.passes.hosts import Hosts
from rose_compiler.passes.interleave import Interleave
from rose_compiler.passes.late import LateWork
from rose_compiler.passes.next_reset import NextReset
from rose_compiler.passes.overlap import Overlap
from rose_compiler.passes.pipeline_loops import PipelineLoops
from rose_compiler.passes.place import Place
from rose_compiler.passes.scan import Scan
from rose_compiler.passes.split import Split
from rose_compiler.passes.streams import Streams
from rose_compiler.passes.tile_batch import TileBatch
from rose_compiler.passes.unswitch import Unswitch
from rose_compiler.passes.versions import Versions

#: Packages register passes under this group: ``name = "package.module:PassClass"``.
ENTRY_POINTS = "rose_compiler.passes"


@dataclass(frozen=True)
class Entry:
    """One pass and why it stands where it does."""

    one: Pass
    reason: str


ORDER: tuple[Entry, ...] = (
    Entry(Canonicalize(), "first: no later pass should reason about dead or static code"),
    Entry(
        HoistInvariant(),
        "before split and tile_batch: a draw in a policy keeps it from being tiled, and what "
        "does not vary needs no place in a schedule",
    ),
    Entry(
        Scan(),
        "after hoist: what is left in the body of a recurrence varies; it steps no simulator, so "
        "nothing below looks into it",
    ),
    Entry(
        Interleave(),
        "after scan, which takes loops as they stand; before all that finds work for the shadow of "
        "a step in the loop around it",
    ),
    Entry(
        Split(),
        "before tile_batch: late outputs need not be cut into shards, and before late and defer: "
        "they move whole operations",
    ),
    Entry(BatchWrappers(), "before tile_batch: a step is one of the whole simulator until then"),
    Entry(TileBatch(), "after split: it clones what is left on the way to the step"),
    Entry(Defer(), "after tile_batch: it collects whole batches, joined again by then"),
    Entry(Fuse(), "anywhere: it moves nothing; before late, which fixes where operations stand"),
    Entry(
        DropGradients(),
        "after fuse, which looks for each backward by its name; before all that moves them",
    ),
    Entry(
        Unswitch(),
        "before late: on trips on which nothing waits for an update, it is late work",
    ),
    Entry(LateWork(), "behind all that make or remove operations: it fixes the order of the rest"),
    Entry(
        PipelineLoops(),
        "behind late: it places the loops anew that the decision names, with the copies of lent "
        "buffers that late has made",
    ),
    Entry(Place(), "behind late: lanes for steps that nothing else has placed, and thread counts"),
    Entry(
        Hosts(),
        "behind late: bodies with steps are placed by then, and keep the order that steps want",
    ),
    Entry(
        Accumulate(),
        "behind place, which gives each of the loops that it fuses its threads, and behind late: "
        "steps of a loop that goes to a thread as a whole lose their lanes; before next_reset, "
        "which places what stands around the loops",
    ),
    Entry(
        Versions(),
        "before next_reset and overlap: copies stand in the order that they give, and what waits "
        "for training without them need not wait with them",
    ),
    Entry(
        NextReset(),
        "before overlap, which adds lanes to bodies that are placed: it lets trips overlap, and so "
        "gives all that stands in them their order",
    ),
    Entry(
        Overlap(),
        "behind those: it gives lanes to what the others left to the coordinator, in the order "
        "that they gave, and takes those of steps in loops that go aside as wholes",
    ),
    Entry(
        Streams(),
        "last: what has a thread or a host needs no stream; it keeps the order of bodies that are "
        "placed",
    ),
)


def registered() -> tuple[Pass, ...]:
    """The passes that installed packages register, ordered by name.

    Raises:
        ConfigError: when an entry point is no pass.
    """
    found = []
    for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda p: p.name):
        made = point.load()
        one = made() if isinstance(made, type) else made
        if not isinstance(one, Pass):
            raise fail(
                "config-pass",
                f"entry point {point.name!r} of {ENTRY_POINTS} is no pass",
                expected="a subclass of rose_compiler.passes.base.Pass, or an instance",
                found=point.value,
            )
        found.append(one)
    return tuple(found)


def pipeline(extra: Sequence[Pass] | None = None) -> tuple[Pass, ...]:
    """All passes in order. Those of other packages run before the ones that place operations.

    ``extra`` replaces the registered ones.
    """
    others = registered() if extra is None else tuple(extra)
    own = [entry.one for entry in ORDER]
    at = next(k for k, one in enumerate(own) if isinstance(one, LateWork))
    return (*own[:at], *others, *own[at:])


#: The passes as a compiled function runs them.
PIPELINE: tuple[Pass, ...] = pipeline()
