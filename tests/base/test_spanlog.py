"""Spans are noted as tuples and made when somebody looks."""

from __future__ import annotations

import pytest

from rose_compiler.base import phases, spanlog
from rose_compiler.base.profile import Span
from rose_compiler.base.spanlog import Noted, SpanLog

FULL: Noted = ("step", "shard:0", 1.0, 2.0, 7, 0.5, 1.0, (1.25, 1.75))
BARE: Noted = ("add", "thread:0", 2.0, 3.0, 8, None, None, None)
SPANS = [
    Span("step", "shard:0", 1.0, 2.0, site=7, cpu_s=0.5, issue_s=1.0, ran_s=(1.25, 1.75)),
    Span("add", "thread:0", 2.0, 3.0, site=8),
]


def test_a_log_is_the_sequence_of_its_spans() -> None:
    log = SpanLog()
    assert not log
    log.note(FULL)
    assert list(log) == SPANS[:1]
    log.note(BARE)
    assert len(log) == 2
    assert [log[0], log[-1]] == SPANS
    assert log[1:] == SPANS[1:]
    log.extend(SPANS)
    assert list(log) == [*SPANS, *SPANS]
    log.clear()
    assert list(log) == []
    log.note(BARE)
    assert list(log) == SPANS[1:]


def test_no_span_is_made_before_somebody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def span(op: str, *args: object, **kwargs: object) -> Span:
        made.append(op)
        return Span(op, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(spanlog, "Span", span)
    log = SpanLog()
    log.note(FULL)
    log.note(BARE)
    assert (len(log), made) == (2, [])
    for _ in range(2):
        assert list(log) == SPANS
    assert made == ["step", "add"], "each once"


def test_phases_are_noted_among_them() -> None:
    log = SpanLog()
    with phases.recording(log):
        phases.note([("render", 1.0, 2.0)], "shard:0")
        log.note(BARE)
    phases.note([("late", 1.0, 2.0)])
    assert [(s.op, s.lane, s.kind) for s in log] == [
        ("render", "shard:0", phases.KIND),
        ("add", "thread:0", ""),
    ]
