"""Spans that are noted while an iteration runs, and made when somebody looks at them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import overload

from rose_compiler.base.profile import Span

#: What is noted of a span: operation, lane, start, end, number in the fault map, CPU seconds, when
#: it was handed over, when it ran; the last three None where that was not seen (:class:`Span`).
Noted = tuple[str, str, float, float, int, float | None, float | None, tuple[float, float] | None]


class SpanLog(Sequence[Span]):
    """The spans of a recording, in the order in which they were noted.

    To make a span takes longer than all else that is done to note one, and what comes next waits
    for it: another step of a simulator, as a rule. So a lane leaves a tuple. Lanes of several
    threads may note at once; one thread looks.
    """

    __slots__ = ("_made", "_noted", "note")

    def __init__(self) -> None:
        self._noted: list[Noted | Span] = []
        self._made: list[Span] = []
        #: Note a span by what is known of it.
        self.note: Callable[[Noted], None] = self._noted.append

    def extend(self, spans: Iterable[Span]) -> None:
        """Note spans that are made already."""
        self._noted.extend(spans)

    def clear(self) -> None:
        """Forget all spans."""
        self._noted.clear()
        self._made.clear()

    def __len__(self) -> int:
        return len(self._noted)

    @overload
    def __getitem__(self, at: int) -> Span: ...

    @overload
    def __getitem__(self, at: slice) -> list[Span]: ...

    def __getitem__(self, at: int | slice) -> Span | list[Span]:
        return self._all()[at]

    def __iter__(self) -> Iterator[Span]:
        return iter(self._all())

    def _all(self) -> list[Span]:
        made = self._made
        made += [_span(one) for one in self._noted[len(made) :]]
        return made


def _span(noted: Noted | Span) -> Span:
    if not isinstance(noted, tuple):
        return noted
    op, lane, start, end, site, cpu, issued, ran = noted
    return Span(op, lane, start, end, site=site, cpu_s=cpu, issue_s=issued, ran_s=ran)
