"""When a device ran what the coordinator only issued.

The coordinator's spans and those of stream lanes say when something was issued. A kernel belongs to
the span in which it was launched, so the kernels of an iteration tell when each operation ran.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from rose_compiler.base.profile import Span, Timeline
from rose_compiler.runtime.kernels import Kernel

STREAM = "stream:"


def on_device(
    timeline: Timeline, kernels: Sequence[Kernel], begin_s: float = 0.0
) -> Timeline | None:
    """The operations of the coordinator and of stream lanes, from the start of the first kernel of
    each to the end of its last; ``None`` where no kernel belongs to any.

    ``begin_s`` is when the iteration began by the kernels' clock. A span's activity is the share of
    all SMs that its kernels kept busy. What launches nothing is left out.
    """
    issued = sorted(
        (s for s in timeline.spans if not s.lane or s.lane.startswith(STREAM)),
        key=lambda s: s.start_s,
    )
    starts = [span.start_s for span in issued]
    of: dict[int, list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        if kernel.launched_s is None:
            continue
        launched = kernel.launched_s - begin_s
        at = bisect_right(starts, launched) - 1
        if at >= 0 and launched <= issued[at].end_s:
            of[at].append(kernel)
    spans = [_ran(issued[at], found, begin_s) for at, found in of.items()]
    return Timeline(tuple(sorted(spans, key=lambda s: s.start_s))) if spans else None


def _ran(issued: Span, kernels: Sequence[Kernel], begin_s: float) -> Span:
    start, end = min(k.start_s for k in kernels), max(k.end_s for k in kernels)
    busy = sum(k.share * (k.end_s - k.start_s) for k in kernels)
    share = min(1.0, busy / (end - start)) if end > start else 0.0
    return replace(issued, start_s=start - begin_s, end_s=end - begin_s, activity=share)
