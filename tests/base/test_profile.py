from __future__ import annotations

import dataclasses
import json

import pytest

from rose_compiler.base.profile import OpTime, Profile, Span, Timeline, Window

TIMELINE = Timeline(
    (
        Span("step", "sim", 1.0, 4.0, 0.5, trip=(0,)),
        Span("act", "infer", 0.0, 1.0, 1.0, trip=(0,)),
        Span("act", "infer", 2.0, 3.5, 1.0, trip=(1,)),
    )
)
PROFILE = Profile(
    machine="two cores",
    iteration_s=(4.0, 4.25),
    ops=(
        OpTime("act", 2, 1.25, 1.5, cpu_s=1.2, launch_s=1e-5, wait_s=0.1),
        OpTime("step", 1, 3.0, 3.0, activity=0.5),
    ),
    timeline=TIMELINE,
    windows=(Window(1.0, 2.0, "cpu", 0.5, "rollout", 1, before="act", after="act"),),
)


def test_profile_survives_json() -> None:
    text = json.dumps(PROFILE.to_dict())
    assert Profile.from_dict(json.loads(text)) == PROFILE


def test_profile_without_a_timeline_survives_json() -> None:
    bare = Profile("m", (1.0,))
    assert Profile.from_dict(json.loads(json.dumps(bare.to_dict()))) == bare


def test_unknown_field_is_refused() -> None:
    with pytest.raises(TypeError, match="durability"):
        OpTime.from_dict({**PROFILE.ops[0].to_dict(), "durability": 1})


def test_op_is_found_by_name() -> None:
    assert PROFILE.op("step").median_s == 3.0
    with pytest.raises(KeyError, match="update"):
        PROFILE.op("update")


def test_timeline_measures() -> None:
    assert TIMELINE.duration_s == 4.0
    assert TIMELINE.lanes() == ("infer", "sim")
    assert [s.trip for s in TIMELINE.on_lane("infer")] == [(0,), (1,)]
    assert TIMELINE.overlap_s("infer", "sim") == 1.5
    assert Timeline().duration_s == 0.0


def test_values_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        PROFILE.machine = "other"  # type: ignore[misc]
    assert PROFILE.windows[0].duration_s == 1.0
