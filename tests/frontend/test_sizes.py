"""Sizes that traced code reads: constants of a graph where they can't change."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rose_compiler.base.errors import RoseError
from rose_compiler.base.remarks import Blocker
from rose_compiler.frontend.trace import Traced, trace
from rose_compiler.ir.sizes import Items, Shape, Sizes, refused
from tests.frontend.tracing import traced

X = torch.arange(12.0).reshape(4, 3)


def per_row(x: Tensor) -> Tensor:
    return x.pow(2).sum() / x.shape[0]


def by_size(x: Tensor) -> Tensor:
    return x + torch.zeros(x.size(0), 3) * x.size()[0]


def by_numel(x: Tensor) -> Tensor:
    return x.sum() / x.numel()


def unpacked(x: Tensor) -> Tensor:
    n, width = x.shape
    return x.reshape(n * width) * n


@pytest.mark.parametrize("fn", [per_row, by_size, by_numel, unpacked])
def test_a_graph_takes_sizes_that_vary_from_its_inputs(fn: Callable[..., Any]) -> None:
    for options in ({"vary": "rows"}, {"rows": True}):
        found = trace(fn, [X], lifted={}, **options)  # type: ignore[arg-type]
        assert isinstance(found, Traced)
        for rows in (1, 2, 3, 4):
            assert torch.equal(found.gm.forward(X[:rows]), fn(X[:rows]))
    plain = trace(fn, [X], lifted={})
    assert isinstance(plain, Traced)
    assert "size" not in str(plain.gm.code), "where they stay as they are, they cost nothing"


def compared(x: Tensor) -> Tensor:
    return x * 2 if x.shape[0] == 4 else x


def counted(x: Tensor) -> Tensor:
    return x.sum() / len(x)


def width(x: Tensor) -> Tensor:
    return x * 2 if x.shape[1] == 3 else x


def items(xs: list[Tensor]) -> Tensor:
    return torch.stack(xs).sum(0)


@pytest.mark.parametrize(
    ("fn", "value", "options"),
    [
        (compared, X, {"vary": "rows"}),
        (compared, X, {"rows": True}),
        (counted, X, {"vary": "rows"}),
        (width, X, {"vary": "all"}),
        (items, [X, X], {"rows": True}),
    ],
)
def test_what_fixes_a_size_that_varies_is_not_traced(
    fn: Callable[..., Any], value: Any, options: dict[str, Any]
) -> None:
    assert isinstance(trace(fn, [value], lifted={}), Traced)
    found = trace(fn, [value], lifted={}, **options)
    assert isinstance(found, Blocker)
    assert found.code in ("not-traceable", "host-read")


def converted(x: Tensor) -> Tensor:
    return x.float() * 2


def as_another(x: Tensor) -> Tensor:
    return x.to(torch.zeros(())) * 2


def same_array(x: Any) -> Tensor:
    return torch.as_tensor(x.astype(np.float32, copy=False)) * 2


def made_like(x: Tensor) -> Tensor:
    return x + torch.ones(3, dtype=x.dtype)


def or_none(x: Tensor | None) -> Tensor:
    return torch.ones(3) if x is None else x + 1


@pytest.mark.parametrize("fn", [converted, as_another, made_like, same_array])
def test_a_graph_knows_the_dtype_that_was_read_or_that_a_conversion_left(
    fn: Callable[..., Any],
) -> None:
    value = X.numpy() if fn is same_array else X
    known = traced(fn, value).known[0]
    assert isinstance(known, Shape)
    assert known.sizes is None
    sizes = Sizes({"x": known}, refused, refused)
    assert not sizes.differ(("x",), (value,))
    asked = sizes.text({"x": "x"}, lambda thing, name: name)
    test = eval("lambda x: " + asked, {"torch": torch, "ndarray": np.ndarray})
    assert not test(value)
    doubles = value.astype(np.float64) if fn is same_array else X.double()
    for other in (doubles, None, 1.0):
        assert sizes.differ(("x",), (other,))
        assert test(other)


class Part(enum.Enum):
    """Keys of a dict that have no text."""

    PLACE = "place"
    FAR = "far"


def test_a_key_without_text_is_asked_for_by_a_name() -> None:
    known = Items(tuple((key, Shape((2, 3))) for key in (Part.PLACE, "plain", 1, None)), dict)
    names: dict[str, Any] = {}

    def bind(thing: Any, name: str) -> str:
        names[name] = thing
        return name

    text = Sizes({"x": known}, refused, refused).text({"x": "x"}, bind)
    assert names == {"key": Part.PLACE}
    test = eval("lambda x: " + text, {"torch": torch, **names})
    value = {Part.PLACE: X[:2], "plain": X[:2], 1: X[:2], None: X[:2]}
    assert not test(value)
    assert test({**value, Part.PLACE: X})
    assert test({Part.FAR: X[:2], **{k: v for k, v in value.items() if k is not Part.PLACE}})


def test_a_graph_knows_where_none_would_be_something_else_and_pays_nothing_elsewhere() -> None:
    known = traced(or_none, X).known[0]
    assert known == Shape(None)
    assert not traced(lambda x: x * 2, X).known


def of_groups(x: Tensor) -> Tensor:
    return x.view(2, -1).mean(1)


def of_groups_apart(x: Tensor) -> Tensor:
    return x.reshape(2, -1, 3).mean(1)


def in_threes(x: Tensor) -> Tensor:
    return x.reshape(-1, 3) * 2


def flat(x: Tensor) -> Tensor:
    return x.reshape(12)


def by_two(x: Tensor) -> Tensor:
    return torch.stack([part.sum() for part in x.split(2)]).sum()


def by_two_across(x: Tensor) -> Tensor:
    return torch.stack([part.sum() for part in x.t().split(2, 1)]).sum()


def in_three(x: Tensor) -> Tensor:
    return torch.stack([part.mean() for part in x.chunk(3)]).mean()


def row_by_row(x: Tensor) -> Tensor:
    first, *others = x.unbind()
    return first + sum(others)


def column_by_column(x: Tensor) -> Tensor:
    return torch.stack(x.unbind(1)).sum(0)


def by_bytes(x: Tensor) -> Tensor:
    return x / x.nbytes


def by_stride(x: Tensor) -> Tensor:
    return x * x.stride(0)


def by_numpys_shape(x: Any) -> Tensor:
    return torch.as_tensor(x) * np.shape(x)[0]


def by_numpys_size(x: Any) -> Tensor:
    return torch.as_tensor(x) / np.size(x)


def by_an_arrays_bytes(x: Any) -> Tensor:
    return torch.as_tensor(x) / x.nbytes


def by_anothers_length(x: Any) -> Tensor:
    return torch.as_tensor(x) / len(np.asarray(x))


def by_its_own_array(x: Any) -> Tensor:
    return torch.as_tensor(x) / x.__array__().shape[0]


def by_its_interface(x: Any) -> Tensor:
    return torch.as_tensor(x) / x.__array_interface__["shape"][0]


def by_going_through(x: Any) -> Tensor:
    return torch.as_tensor(x) / sum(1 for _ in zip(x, range(9), strict=False))


def by_counting(x: Any) -> Tensor:
    return torch.as_tensor(x) / int(np.count_nonzero(np.ones_like(x)))


OF_ARRAYS = [by_numpys_shape, by_numpys_size, by_an_arrays_bytes, by_anothers_length]
OF_ARRAYS += [by_its_own_array, by_its_interface, by_going_through, by_counting]
OF_TENSORS = [of_groups, of_groups_apart, in_threes, flat, by_two, by_two_across, in_three]
OF_TENSORS += [row_by_row, column_by_column, by_bytes, by_stride]


@pytest.mark.parametrize("fn", [*OF_ARRAYS, *OF_TENSORS])
def test_a_graph_is_right_for_all_sizes_that_it_says_it_is_right_for(
    fn: Callable[..., Any],
) -> None:
    array = fn in OF_ARRAYS
    for options in ({}, {"rows": True}, {"vary": "rows"}, {"vary": "all"}):
        found = trace(fn, [X.numpy() if array else X], lifted={}, **options)  # type: ignore[arg-type]
        if isinstance(found, Blocker):
            assert options, found
            continue
        sizes = Sizes(dict(zip("x", found.known.values(), strict=False)), refused, refused)
        for shape in ((1, 3), (2, 3), (3, 3), (6, 3), (8, 3), (4, 2), (4, 6)):
            made = torch.arange(float(np.prod(shape))).reshape(shape)
            other = made.numpy() if array else made
            if sizes.differ(("x",), (other,)):
                continue
            try:
                expected = fn(other)
            except RuntimeError:
                assert options, "with these sizes it raises"
                continue
            assert torch.equal(found.gm.forward(other), expected), (options, shape)


def by_order(x: Tensor) -> Tensor:
    return x * 2 if x.is_contiguous() else x * 3


def without_gaps(x: Tensor) -> Tensor:
    return x.contiguous().view(-1)


def channels_last(x: Tensor) -> Tensor:
    return x[..., None, None].to(memory_format=torch.channels_last) * 1.5


def drawn_like(x: Tensor) -> Tensor:
    return x + torch.randn_like(x)


def by_array_strides(x: Any) -> Tensor:
    return torch.as_tensor(x) * x.strides[0]


def by_array_flags(x: Any) -> Tensor:
    return torch.as_tensor(x) * (2 if x.flags.c_contiguous else 3)


OF_ARRAYS_LAID = [by_array_strides, by_array_flags]


@pytest.mark.parametrize(
    "fn", [by_order, by_stride, without_gaps, channels_last, drawn_like, *OF_ARRAYS_LAID]
)
def test_a_graph_is_right_for_all_layouts_that_it_says_it_is_right_for(
    fn: Callable[..., Any],
) -> None:
    array = fn in OF_ARRAYS_LAID
    rows, columns = X, X.t().contiguous().t()
    gaps = torch.cat([X, X], 1)[:, :3]
    for seen in (rows, columns, gaps):
        found = trace(fn, [seen.numpy() if array else seen], lifted={})
        assert isinstance(found, Traced)
        sizes = Sizes(dict(zip("x", found.known.values(), strict=False)), refused, refused)
        taken = []
        for other in (rows, columns, gaps):
            given = other.numpy() if array else other
            if sizes.differ(("x",), (given,)):
                continue
            taken.append(other)
            torch.manual_seed(0)
            expected = fn(given)
            torch.manual_seed(0)
            made = found.gm.forward(given)
            assert torch.equal(made, expected)
            assert made.stride() == expected.stride()
        assert any(t is seen for t in taken), "its own"


def test_keys_are_compared_in_their_order() -> None:
    known = Items((("a", None), ("b", Shape((4, 3)))), dict)
    sizes = Sizes({"x": known}, refused, refused)
    assert not sizes.differ(("x",), ({"a": 1, "b": X},))
    for other in ({"b": X, "a": 1}, {"c": 1, "b": X}, {"a": 1, "b": X[:2]}, [1, X]):
        assert sizes.differ(("x",), (other,))


def test_what_nothing_is_right_for_is_refused_by_its_shapes() -> None:
    sizes = Sizes({"x": Shape((4, 3))}, refused, refused)
    assert sizes.differ(("x",), (X[:2],))
    with pytest.raises(RoseError, match=r"\(2, 3\)") as found:
        sizes.stop(X[:2])
    assert found.value.code == "sizes-changed"


def two_heads(x: Tensor) -> Tensor:
    mean, spread = x.chunk(2, -1)
    return mean + spread.exp()


def test_parts_of_each_row_leave_the_number_of_rows_open() -> None:
    found = trace(two_heads, [X.reshape(3, 4)], lifted={}, rows=True)
    assert isinstance(found, Traced)
    assert found.known[0] == Shape((None, 4))
