"""CUDA graphs in tuning: when they are asked for, and what is told of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rose_compiler.api.followups import FollowUps
from rose_compiler.api.verdicts import Verdicts, remarks_of
from rose_compiler.base.decision import Decision
from rose_compiler.base.remarks import RemarkLog
from rose_compiler.runtime.inductor import Note


class Asked:
    """A search that only notes what is to be tried."""

    def __init__(self, best: Decision | None) -> None:
        self.candidates, self.best = [best], 0
        self.ended_early = False

    def challenge(self, decision: Decision) -> None:
        self.candidates.append(decision)


@pytest.mark.parametrize(
    ("chosen", "cuda", "asked"),
    [
        (Decision(groups=2, compile=True), True, True),
        (Decision(groups=2, compile=True), False, False),
        (Decision(groups=2), True, False),
        (None, True, False),
        (Decision(compile=True, cuda_graphs=True), True, False),
    ],
)
def test_what_was_compiled_meets_itself_replayed_once(
    chosen: Any, cuda: bool, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    search = Asked(chosen)
    follow_ups = FollowUps(Verdicts(RemarkLog()), Decision())
    for _ in range(2):
        follow_ups._capture(search)  # type: ignore[arg-type]
    wanted = [Decision(groups=2, compile=True, cuda_graphs=True)] if asked else []
    assert search.candidates[1:] == wanted


def test_what_became_of_a_capture_is_told() -> None:
    notes = [
        Note("loss", 0.5, kind="cuda-graph", gain="20 us instead of 90"),
        Note("act", 0.25, "replayed, it differs by 1", kind="cuda-graph"),
        Note("act", 4.0),
    ]
    kept, refused, compiled = remarks_of(notes)
    assert (kept.kind, kept.code) == ("note", "cuda-graph")
    assert kept.why == "loss captured as a CUDA graph in 0.5 s: 20 us instead of 90"
    assert (refused.kind, refused.code) == ("missed", "probe-values-differ")
    assert refused.why.startswith("act, as a CUDA graph, 0.2 s: replayed")
    assert compiled.why == "act compiled by Inductor in 4.0 s"
