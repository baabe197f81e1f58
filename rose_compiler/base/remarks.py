"""What a pass did, or did not do and why.

A question about legality or gain answers ``None`` or a :class:`Blocker`, whose code is one of
the closed set :data:`BLOCKER_CODES`; so the test itself is the diagnostic. ``docs/remarks.md``
has a section for each code.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, overload

from rose_compiler.base.errors import SourceLocation, nearest

Kind = Literal["applied", "missed", "note"]
Verdict = Literal["illegal", "does-not-fit", "not-worth-it", "unknown"]


class BlockerCode(NamedTuple):
    """What a blocker code means, and how final it is.

    ``illegal``: the result would change. ``does-not-fit``: legal, but there is no place for it.
    ``not-worth-it``: legal, and predicted or measured slower. ``unknown``: not known to be legal;
    a declaration or a longer look could tell.
    """

    verdict: Verdict
    description: str


#: What notes, and what was done beyond a pass of that name, are about.
NOTE_CODES: dict[str, str] = {
    "cuda-graph": "something compiled is captured and replayed as a CUDA graph",
    "decision-cache": "a schedule kept for later runs could not be read or written, or was deleted",
    "few-points": "a plan of quotas rests on fewer measured points of a lane than three",
    "inductor": "a loss or a graph is compiled by Inductor",
    "interval": "the time of a trip of a pipelined loop, and what sets it",
    "lost": "a shard of a simulator was lost",
    "moved": "a component was moved under other quotas",
    "native-scan": "a recurrence is run by a kernel in C",
    "observed-effect": "an operation reads or writes what it did not declare, or what was not seen",
    "other-program": "a file that was to run in place of the emitted code is no copy of it",
    "over-limit": "the loop as written needs more memory than is allowed; it runs all the same",
    "re-captured": "the function was captured anew, and what had changed",
    "replanned": "quotas were planned anew, since times have changed",
    "revived": "a host was started again and brought to where the lost one was",
    "script": "a loss or a graph is one call of TorchScript",
    "sm-quotas": "the SMs that streams are given",
    "spared": "what is done once for many trips, and what that spares",
    "tiles": "a loss is computed in tiles of its minibatch's rows",
    "tune": "the schedule that was kept, with its times and those predicted",
    "turns": "this process has no quota on the GPU, and takes turns with those that have",
    "unchecked": "a part that the checking mode can't compare",
}

#: Every reason not to do a rewrite. Closed: a pass that needs another adds it here and to the docs.
BLOCKER_CODES: dict[str, BlockerCode] = {
    # illegal: the dependences or the promised results forbid it
    "effects-conflict": BlockerCode(
        "illegal", "two operations touch the same state, and one of them writes it"
    ),
    "value-dependence": BlockerCode("illegal", "one operation uses a value that the other makes"),
    "carried-dependence": BlockerCode(
        "illegal", "a trip of the loop needs what an earlier trip hands on, sooner than it is made"
    ),
    "reads-loop-state": BlockerCode(
        "illegal",
        "the operation reads a state that the loop writes, so it varies from trip to trip",
    ),
    "varies-in-loop": BlockerCode(
        "illegal", "the operation uses a value made inside the loop, so it varies from trip to trip"
    ),
    "not-pure": BlockerCode(
        "illegal",
        "the operation writes a state, so it can't be run more often, less often or not at all",
    ),
    "may-not-run": BlockerCode(
        "illegal", "the loop or branch may not run at all, and then the operation must not either"
    ),
    "may-raise": BlockerCode(
        "illegal", "an earlier operation may raise, and run_ahead=False schedules nothing past it"
    ),
    "batch-coupling": BlockerCode(
        "illegal", "rows of the batch influence each other, so shards can't be computed apart"
    ),
    "probe-bits-differ": BlockerCode(
        "illegal",
        'in shards the probe\'s bits differ from the whole batch, and numerics="bitwise" holds',
    ),
    "probe-values-differ": BlockerCode(
        "illegal",
        "fed the same inputs, the rewritten operation's values differ beyond the tolerance",
    ),
    "data-dependent-draw": BlockerCode(
        "illegal",
        "whether or how much is drawn at random depends on data, so draws keep their place",
    ),
    "draw-order": BlockerCode(
        "illegal", "random numbers would be drawn from one generator in another order"
    ),
    "whole-collection": BlockerCode(
        "illegal",
        "what a loss needs is made of all groups (whitening, a normalizer), so none can be trained "
        "on before the last is collected",
    ),
    "incomplete-group": BlockerCode(
        "illegal", "a group's loss may use data that a later trip of the collecting loop brings"
    ),
    "parameters-change": BlockerCode(
        "illegal",
        "training on one group changes parameters that later groups are collected or compared with",
    ),
    "early-exit": BlockerCode(
        "illegal", "the loop may stop on a value, and nothing past that test is done ahead of it"
    ),
    "host-read": BlockerCode(
        "illegal", "Python reads the value before it goes on, so nothing can pass this point"
    ),
    "grad-graph": BlockerCode(
        "illegal", "the autograd graph holds on to tensors or modes that the rewrite would change"
    ),
    "mode-change": BlockerCode(
        "illegal", "the two places run under different modes (grad, autocast, train or eval)"
    ),
    "borrowed-buffer": BlockerCode(
        "illegal", "the value lives in a buffer that its owner writes again, and can't be kept"
    ),
    "retained-instance": BlockerCode(
        "illegal", "a callee may have kept the container, so it can't be renamed from trip to trip"
    ),
    "component-rebound": BlockerCode(
        "illegal", "the component is replaced by another object while the loop runs"
    ),
    "hosted-elsewhere": BlockerCode(
        "illegal", "the component lives in another process and can't be moved, copied or restarted"
    ),
    "staleness-bound": BlockerCode(
        "illegal", "parameters would be used at a greater age than `staleness=` allows"
    ),
    "cross-element": BlockerCode(
        "illegal", "the recurrence mixes elements, so it is no scan along one axis"
    ),
    "not-affine": BlockerCode(
        "illegal",
        "what a loop carries enters otherwise than by sums and products with other values",
    ),
    # does-not-fit: legal, but there is no room or no place for it
    "no-window": BlockerCode("does-not-fit", "there is no window of low activity it could fill"),
    "window-too-short": BlockerCode("does-not-fit", "the work is longer than the window"),
    "single-shard": BlockerCode(
        "does-not-fit", "the simulator is one piece, so there are no shards to advance in turn"
    ),
    "uneven-shards": BlockerCode(
        "does-not-fit", "the shards differ in size where the rewrite needs them equal"
    ),
    "single-trip": BlockerCode("does-not-fit", "the loop makes one trip, so no trips can overlap"),
    "memory-limit": BlockerCode("does-not-fit", "it would need more memory than `memory_limit=`"),
    "no-lane": BlockerCode(
        "does-not-fit", "the machine has no core, stream or host left for another lane"
    ),
    "over-committed": BlockerCode(
        "does-not-fit", "the quotas of the lanes add up to more than the device has"
    ),
    "not-available": BlockerCode(
        "does-not-fit", "the machine or an installed package lacks what the rewrite needs"
    ),
    "unsupported-shape": BlockerCode(
        "does-not-fit", "the program has a form that the pass does not handle"
    ),
    "candidate-failed": BlockerCode(
        "does-not-fit", "a schedule that was tried can't be built, or its own code failed"
    ),
    "out-of-fuel": BlockerCode("does-not-fit", "ROSE_FUEL allows no further rewrite"),
    "switched-off": BlockerCode("does-not-fit", "an argument or a setting leaves the rewrite out"),
    # not-worth-it: legal, and slower or no faster
    "predicted-slower": BlockerCode("not-worth-it", "the predictor expects no gain from it"),
    "measured-slower": BlockerCode(
        "not-worth-it", "it was tried on real iterations and did not win"
    ),
    "too-small": BlockerCode(
        "not-worth-it", "the work is shorter than handing it to another lane takes"
    ),
    "resource-full": BlockerCode(
        "not-worth-it", "both sides need a resource that one of them already fills"
    ),
    # unknown: not known to be legal
    "opaque-call": BlockerCode(
        "unknown", "a call whose source can't be seen, with nothing declared"
    ),
    "unknown-effects": BlockerCode(
        "unknown", "the operation has no signature, so it reads and writes everything"
    ),
    "not-proven-separable": BlockerCode(
        "unknown", "nothing proves or declares that rows of the batch are computed apart"
    ),
    "not-traceable": BlockerCode(
        "unknown", "the block can't be traced, so its inside can't be seen"
    ),
    "draw-shape-unknown": BlockerCode(
        "unknown", "the size of a random draw isn't known when the loop starts"
    ),
    "trip-count-unknown": BlockerCode(
        "unknown", "the number of trips isn't known when the loop starts"
    ),
    "may-alias": BlockerCode("unknown", "two names may stand for the same storage or object"),
    "never-run": BlockerCode(
        "unknown", "this arm has not run yet, so what it reads and writes has not been seen"
    ),
    "not-probed": BlockerCode(
        "unknown", "nothing shows yet that shards give the values of the whole batch"
    ),
    "not-measured": BlockerCode("unknown", "there is no profile yet to predict a gain from"),
}


def verdict_of(code: str) -> Verdict:
    """The verdict that belongs to a blocker code; raises ``ValueError`` for one not in the set."""
    entry = BLOCKER_CODES.get(code)
    if entry is None:
        raise ValueError(f"{code!r} is no blocker code{nearest(code, BLOCKER_CODES)}")
    return entry.verdict


@dataclass(frozen=True)
class Blocker:
    """Why something is not done. ``allow`` says what would allow it, ``where`` who is in the way.

    Raises ``ValueError`` if ``code`` is not in :data:`BLOCKER_CODES`.
    """

    code: str
    why: str
    allow: str | None = None
    changes_training: bool = False
    where: tuple[SourceLocation, ...] = ()

    def __post_init__(self) -> None:
        verdict_of(self.code)

    @property
    def verdict(self) -> Verdict:
        """How final it is."""
        return verdict_of(self.code)


@dataclass(frozen=True)
class Remark:
    """One line of what a pass did, or did not do and why.

    ``where`` names the user's lines, both ends of a dependence in order. ``changes_training``
    says whether following ``allow`` would. ``gain`` is in seconds an iteration, predicted or
    measured. A missed remark has a blocker's code and, left out, that code's verdict; other codes
    raise ``ValueError``.
    """

    kind: Kind
    pass_name: str
    where: tuple[SourceLocation, ...]
    code: str
    why: str
    allow: str | None = None
    changes_training: bool = False
    verdict: Verdict | None = None
    gain: float | None = None

    def __post_init__(self) -> None:
        if self.kind == "missed":
            verdict = verdict_of(self.code)
            if self.verdict is None:
                object.__setattr__(self, "verdict", verdict)

    @classmethod
    def from_blocker(
        cls, pass_name: str, blocker: Blocker, where: Sequence[SourceLocation] = ()
    ) -> Remark:
        """The missed remark that says what ``blocker`` says, for the operation at ``where``."""
        places = tuple(dict.fromkeys((*where, *blocker.where)))
        return cls(
            "missed",
            pass_name,
            places,
            blocker.code,
            blocker.why,
            blocker.allow,
            blocker.changes_training,
        )


_HEADINGS: tuple[tuple[Kind, Verdict | None, str], ...] = (
    ("applied", None, "Applied"),
    ("missed", "illegal", "Missed: illegal, the result would change"),
    ("missed", "does-not-fit", "Missed: does not fit"),
    ("missed", "not-worth-it", "Missed: not worth it"),
    ("missed", "unknown", "Missed: unknown whether it is legal"),
    ("note", None, "Notes"),
)


class RemarkLog(Sequence[Remark]):
    """Remarks in the order they were made."""

    def __init__(self, remarks: Iterable[Remark] = ()) -> None:
        self._remarks = list(remarks)

    def add(self, remark: Remark) -> None:
        """Append a remark."""
        self._remarks.append(remark)

    def extend(self, remarks: Iterable[Remark]) -> None:
        """Append several remarks."""
        self._remarks.extend(remarks)

    def __len__(self) -> int:
        return len(self._remarks)

    def __iter__(self) -> Iterator[Remark]:
        return iter(self._remarks)

    @overload
    def __getitem__(self, index: int) -> Remark: ...
    @overload
    def __getitem__(self, index: slice) -> RemarkLog: ...
    def __getitem__(self, index: int | slice) -> Remark | RemarkLog:
        if isinstance(index, slice):
            return RemarkLog(self._remarks[index])
        return self._remarks[index]

    def __repr__(self) -> str:
        return f"RemarkLog({self._remarks!r})"

    def applied(self) -> RemarkLog:
        """What was done."""
        return RemarkLog(r for r in self if r.kind == "applied")

    def missed(self) -> RemarkLog:
        """What was not done."""
        return RemarkLog(r for r in self if r.kind == "missed")

    def for_pass(self, name: str) -> RemarkLog:
        """What one pass said."""
        return RemarkLog(r for r in self if r.pass_name == name)

    def render(self, width: int = 100) -> str:
        """The remarks as text, grouped by kind and verdict; equal ones once, with their number."""
        sections = []
        for kind, verdict, heading in _HEADINGS:
            group = [
                r for r in self if r.kind == kind and (kind != "missed" or r.verdict == verdict)
            ]
            if group:
                lines = [f"{heading} ({len(group)})"]
                lines += [line for entry in _merge(group) for line in _entry(*entry, width)]
                sections.append("\n".join(lines))
        return "\n\n".join(sections) if sections else "No remarks."


def _merge(remarks: Iterable[Remark]) -> list[tuple[Remark, int, float | None]]:
    """Equal remarks as one, with how many there were and what they gain together."""
    merged: dict[tuple[object, ...], tuple[Remark, int, float | None]] = {}
    for r in remarks:
        # lines, not columns: entries that read the same are the same
        key = (r.pass_name, *map(str, r.where), r.code, r.why, r.allow, r.changes_training)
        first, count, gain = merged.get(key, (r, 0, None))
        merged[key] = (first, count + 1, gain if r.gain is None else (gain or 0.0) + r.gain)
    return list(merged.values())


def _entry(remark: Remark, count: int, gain: float | None, width: int) -> list[str]:
    head = f"{remark.pass_name} [{remark.code}]"
    if remark.where:
        head += "  " + " -> ".join(map(str, remark.where))
    if count > 1:
        head += f"  ({count} times)"
    lines = [*_wrap(head, width, indent=2), *_wrap(remark.why, width)]
    if remark.allow is not None:
        changes = " (changes training)" if remark.changes_training else ""
        lines += _wrap(f"would allow it{changes}: {remark.allow}", width)
    if gain is not None:
        word = "loss" if gain < 0 else "gain"
        lines += _wrap(f"{word}: {abs(gain) * 1e3:.3g} ms an iteration", width)
    return lines


def _wrap(text: str, width: int, indent: int = 6) -> list[str]:
    return textwrap.wrap(
        text,
        max(width, 30),
        initial_indent=" " * indent,
        subsequent_indent=" " * max(indent, 6),
        break_long_words=False,
        break_on_hyphens=False,
    )
