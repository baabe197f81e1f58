"""Arguments of ``compile`` are checked at once, in the user's words."""

from __future__ import annotations

from typing import Any

import pytest

import rose_compiler
from rose_compiler.base.errors import ConfigError
from rose_compiler.passes.hoist import HoistInvariant
from rose_compiler.passes.pipeline import pipeline
from tests.api.loops import iteration


@pytest.mark.parametrize(
    ("passes", "found"),
    [
        ("hoist", "'hoist'"),
        (["hoist"], "'hoist'"),
        ([HoistInvariant], "the class HoistInvariant"),
        ([HoistInvariant(), None], "None"),
        (HoistInvariant(), "a single pass, hoist"),
        (7, "7"),
    ],
)
def test_passes_are_objects_and_a_name_is_refused_with_the_way_out(passes: Any, found: str) -> None:
    with pytest.raises(ConfigError, match="config-argument") as caught:
        rose_compiler.compile(iteration, passes=passes)
    assert caught.value.found == found
    assert "ROSE_PASSES" in str(caught.value)
    assert "pipeline" in str(caught.value)


def test_two_passes_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="config-argument") as caught:
        rose_compiler.compile(iteration, passes=pipeline([HoistInvariant()]))
    assert "'hoist'" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("numerics", "exact"),
        ("numerics", None),
        ("backend", "tpu"),
        ("backend", 3),
        ("tune", "no-such-decision.json"),
        ("tune", 1),
        ("memory_limit", -1),
        ("memory_limit", True),
        ("memory_limit", "2 apples"),
        ("memory_limit", "0 GiB"),
        ("tune_budget", 0),
        ("tune_budget", None),
        ("iterations", 0),
        ("iterations", 1.5),
        ("timeout", 0),
        ("timeout", "5 s"),
        ("timeout", float("nan")),
        ("run_ahead", "no"),
        ("check", "yes"),
    ],
)
def test_a_value_that_does_not_exist_is_refused_before_anything_is_captured(
    name: str, value: Any
) -> None:
    with pytest.raises(ConfigError) as caught:
        rose_compiler.compile(iteration, **{name: value})
    assert repr(value) in str(caught.value) or value == "0 GiB"
    assert name in str(caught.value) or caught.value.code == "config-decision"


def test_the_decorator_checks_when_it_is_made() -> None:
    with pytest.raises(ConfigError):
        rose_compiler.compile(numerics="exact")


def test_how_long_to_tune_changes_no_schedule() -> None:
    """A cached decision holds for runs of any length."""
    first = rose_compiler.compile(iteration, tune_budget=5, iterations=100)._options
    second = rose_compiler.compile(iteration)._options
    assert first != second
    assert first.asked() == second.asked()
    assert first.asked() != rose_compiler.compile(iteration, memory_limit="1MiB")._options.asked()


def test_a_misspelled_name_in_rose_passes_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ROSE_PASSES", "-hoits")
    for fn in (iteration, lambda x: x):  # a setting concerns more than one function
        with pytest.raises(ConfigError, match="config-pass") as caught:
            rose_compiler.compile(fn)
        assert "hoist" in str(caught.value)


def test_a_name_misspelled_later_is_refused_before_anything_runs() -> None:
    calls = []

    def step(counts: list[int]) -> None:
        counts.append(1)

    fast = rose_compiler.compile(step)
    with rose_compiler.knobs(passes="late,hoits"), pytest.raises(ConfigError, match="config-pass"):
        fast(calls)
    assert not calls
    fast(calls)
    assert calls
    fast.close()
