"""What a user sees: explanations that fit the terminal, short paths, no dumps of data."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rose_compiler
from rose_compiler.base.errors import CaptureError, ConfigError, SourceLocation
from tests.api.loops import Training, iteration


@pytest.fixture
def training() -> Iterator[Training]:
    made = Training()
    yield made
    made.close()


@pytest.mark.parametrize("width", [60, 80, 100])
def test_no_row_is_wider_than_asked(training: Training, width: int) -> None:
    fast = rose_compiler.compile(iteration)
    training.run(fast, 3)
    fast._last.unit.tuning()._chooser.verdicts[1] = "slower by a lot, " * 20
    text = fast.explain(width=width)
    assert "schedule" in text
    assert max(map(len, text.splitlines())) <= width
    fast.close()


def test_the_terminal_decides_how_wide(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = rose_compiler.compile(iteration)
    training.run(fast, 2)
    widths = []
    for columns in ("60", "140"):
        monkeypatch.setenv("COLUMNS", columns)
        widths.append(max(map(len, fast.explain().splitlines())))
    assert widths[0] <= 60 < widths[1] <= 140
    fast.close()


def test_paths_below_the_working_directory_are_relative(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = rose_compiler.compile(iteration, tune=False)
    training.run(fast, 2)
    root = Path(__file__).resolve().parents[2]
    monkeypatch.chdir(root)
    assert "tests/api/loops.py:" in fast.explain()
    assert str(root) not in fast.explain()
    monkeypatch.chdir(root / "tests" / "api")
    assert str(SourceLocation(str(root / "tests" / "api" / "loops.py"), 3)) == "loops.py:3"
    assert str(SourceLocation(str(root / "README.md"), 3)) == f"{root / 'README.md'}:3"
    fast.close()


def test_the_message_that_nothing_was_called_quotes_the_function() -> None:
    fast = rose_compiler.compile(iteration)
    with pytest.raises(ConfigError, match="'iteration' was not called yet"):
        fast.explain()


@pytest.mark.parametrize("thing", [torch.zeros(1000), {"obs": torch.zeros(1000)}, [0.0] * 10000])
def test_a_value_in_place_of_a_function_is_not_printed_whole(thing: Any) -> None:
    with pytest.raises(CaptureError, match="capture-not-callable") as caught:
        rose_compiler.compile(thing)
    assert len(str(caught.value)) < 300
    assert type(thing).__name__ in str(caught.value)


def test_a_partial_names_its_function() -> None:
    with pytest.raises(CaptureError, match="'iteration'"):
        rose_compiler.compile(functools.partial(iteration, torch.zeros(1000)))


def test_a_compiled_function_is_compiled_anew_with_other_options(training: Training) -> None:
    first = rose_compiler.compile(iteration)
    second = rose_compiler.compile(first, tune=False, numerics="bitwise")
    training.run(second, 2)
    assert second.settled
    assert second.__name__ == "iteration"
    second.close()


def test_dumps_are_free_of_what_nobody_reads(training: Training) -> None:
    fast = rose_compiler.compile(iteration, tune=False)
    training.run(fast, 2)
    for name in ("captured", None):
        assert "frozenset" not in fast.ir(name)
    assert "calls=[" in fast.ir("captured")
    fast.close()
