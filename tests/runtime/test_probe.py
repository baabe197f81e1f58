"""Comparing results, and probing whether tiles of a batch give what the whole gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rose_compiler.runtime.probe import compare_outputs, probe_tile, same_bits


class TestSameBits:
    @pytest.mark.parametrize(
        ("a", "b"),
        [
            (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")])),
            (np.array([1.0, np.nan]), np.array([1.0, np.nan])),
            ((1, [2.0, None]), (1, [2.0, None])),
            ({"a": torch.ones(2)}, {"a": torch.ones(2)}),
            (float("nan"), float("nan")),
            (torch.ones(2, 3).t(), torch.ones(3, 2)),
            (torch.tensor(1.0), torch.tensor(1.0)),
            (np.array([None, 1], dtype=object), np.array([None, 1], dtype=object)),
            (torch.zeros(0), torch.zeros(0)),
        ],
    )
    def test_equal(self, a: Any, b: Any) -> None:
        assert same_bits(a, b)
        assert compare_outputs(a, b) == "bits"

    @pytest.mark.parametrize(
        ("a", "b"),
        [
            (torch.tensor(0.0), torch.tensor(-0.0)),
            (torch.ones(2), torch.ones(2, dtype=torch.float64)),
            (torch.ones(2), torch.ones(2, 1)),
            (torch.ones(2), np.ones(2)),
            (0.0, -0.0),
            (1, 1.0),
            ((1, 2), [1, 2]),
            ({"a": 1}, {"b": 1}),
            (np.array(0.0), np.array(-0.0)),
        ],
    )
    def test_different(self, a: Any, b: Any) -> None:
        assert not same_bits(a, b)


class TestCompare:
    def test_one_ulp_is_close(self) -> None:
        a = torch.randn(100, generator=torch.Generator().manual_seed(0))
        b = torch.nextafter(a, torch.full_like(a, 10.0))
        assert compare_outputs(a, b) == "close"
        assert compare_outputs(a.numpy(), b.numpy()) == "close"
        assert compare_outputs((a, {"x": a}), (a, {"x": b})) == "close"

    def test_further_off(self) -> None:
        a = torch.ones(3)
        assert compare_outputs(a, a * (1 + 1e-4)) == "differ"
        assert compare_outputs(a, a * (1 + 1e-4), rtol=1e-3) == "close"

    def test_near_zero_beside_large_values(self) -> None:
        a = torch.tensor([1.0, 0.0])
        assert compare_outputs(a, torch.tensor([1.0, 1e-7])) == "close"
        assert compare_outputs(a, torch.tensor([1.0, 1e-7]), atol=0.0) == "differ"

    def test_whole_numbers_are_equal_or_not(self) -> None:
        assert compare_outputs(torch.tensor([1_000_000]), torch.tensor([1_000_001])) == "differ"
        assert compare_outputs(torch.tensor([True]), torch.tensor([False])) == "differ"

    def test_other_types(self) -> None:
        assert compare_outputs(torch.ones(2), None) == "differ"
        assert compare_outputs(torch.ones(2), torch.ones(3)) == "differ"
        assert compare_outputs("a", "b") == "differ"

    def test_nans_must_be_in_the_same_places(self) -> None:
        a = torch.tensor([float("nan"), 1.0])
        assert compare_outputs(a, torch.tensor([1.0, float("nan")])) == "differ"


class TestTiles:
    def test_pointwise_is_equal_in_bits(self) -> None:
        x = torch.randn(8, 3)
        assert probe_tile(lambda x, s: torch.tanh(x) * s, (x, 2.0), {0: 0}, [3, 5]) == "bits"

    def test_rounding_is_close(self) -> None:
        # the tiles divide where the whole multiplies by the reciprocal: other bits, same value
        def fn(x: Tensor) -> Tensor:
            return x / 3 if len(x) < 8 else x * (1 / 3)

        assert probe_tile(fn, (torch.randn(8, 100),), {0: 0}, [4, 4]) == "close"

    def test_coupling_differs(self) -> None:
        assert probe_tile(lambda x: x - x.mean(0), (torch.randn(8, 3),), {0: 0}, [4, 4]) == "differ"

    def test_examples_alone_would_not_show_it(self) -> None:
        # on constant rows the mean of a tile is the mean of the whole, and so it is of no rows done
        x = torch.ones(8, 3)
        assert probe_tile(lambda x: x - x.mean(0), (x,), {0: 0}, [4, 4], trials=0) == "bits"
        assert probe_tile(lambda x: x - x.mean(0), (x,), {0: 0}, [4, 4]) == "differ"
        done = torch.zeros(8, dtype=torch.bool)
        assert probe_tile(lambda d: d ^ (d.sum() % 2 == 1), (done,), {0: 0}, [4, 4]) == "differ"

    def test_axes_of_arguments_and_results(self) -> None:
        def fn(x: Tensor, table: Tensor) -> tuple[Tensor, Tensor, str]:
            return x.t().contiguous() * 2, table, "same"

        args = (torch.randn(3, 8), torch.ones(8))
        assert probe_tile(fn, args, {0: 1}, [2, 6], results={0: 0}) == "bits"
        assert probe_tile(fn, args, {0: 1}, [2, 6], results={0: 0, 1: 0}) == "differ"
        turned = probe_tile(lambda x: x.t() * 2, args[:1], {0: 1}, [2, 6], results={0: 0})
        assert turned == "differ", "joined, its rows lie otherwise in memory"

    def test_a_row_that_is_shown_for_all_is_joined_as_one(self) -> None:
        # the deviation of a Normal: of a contiguous copy powers and sums would be rounded otherwise
        deviation = torch.rand(3)
        fn = lambda x: (x + 1, deviation.exp().expand_as(x))  # noqa: E731
        assert probe_tile(fn, (torch.randn(8, 3),), {0: 0}, [4, 4]) == "bits"
        other = lambda x: x[:1].expand_as(x)  # noqa: E731
        assert probe_tile(other, (torch.randn(8, 3),), {0: 0}, [4, 4]) == "differ"

    def test_arrays_and_whole_numbers(self) -> None:
        def fn(a: np.ndarray[Any, Any], i: Tensor, done: Tensor) -> tuple[Any, ...]:
            return np.clip(a, -1, 1), torch.eye(4)[i], torch.logical_not(done)

        args = (
            np.random.default_rng(0).normal(size=(6, 2)),
            torch.arange(6) % 4,
            torch.ones(6) > 0,
        )
        assert probe_tile(fn, args, {0: 0, 1: 0, 2: 0}, [1, 2, 3]) == "bits"

    def test_arguments_are_left_alone(self) -> None:
        x = torch.randn(4, 2)
        before = x.clone()
        probe_tile(lambda x: x.add_(0) * 1, (x,), {0: 0}, [2, 2])
        assert torch.equal(x, before)

    def test_splits_that_do_not_add_up(self) -> None:
        with pytest.raises(ValueError, match="8 rows along axis 0, the splits have 7"):
            probe_tile(torch.tanh, (torch.randn(8, 2),), {0: 0}, [4, 3])
