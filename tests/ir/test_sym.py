"""Index expressions, distances, trip counts and costs, against plain integers."""

from __future__ import annotations

import itertools

import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

from rose_compiler.ir import sym
from rose_compiler.ir.effects import Effect, Region, conflicts, disjoint, parse_entry, related

T, N = sym.index_symbol("t"), sym.index_symbol("n")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("t", T),
        ("t + 1", T + 1),
        ("2*(t - 1)*3 + k", 6 * T - 2),
        ("-t + n", N - T),
        ("+5", sympy.Integer(5)),
        ("k*t", 4 * T),
        ("t*k*2 - n*3", 8 * T - 3 * N),
    ],
)
def test_affine_expressions_are_read(text: str, expected: sympy.Expr) -> None:
    assert sym.affine(text, {"t": T, "n": N, "k": 4}) == expected


@pytest.mark.parametrize(
    "text",
    [
        "t*n",
        "t // 2",
        "t % 2",
        "f(t)",
        "t[0]",
        "t.x",
        "1.5",
        "True",
        "'a'",
        "t:5",
        "unknown",
        "opaque",
        "t +",
        "",
        "__import__('os').getpid()",
        "(lambda: 1)()",
        "t if t else n",
        "(" * 300 + "t" + ")" * 300,
    ],
)
def test_anything_else_is_unknown(text: str) -> None:
    assert sym.affine(text, {"t": T, "n": N, "opaque": None}) is None


def test_a_symbol_that_is_not_affine_is_unknown() -> None:
    assert sym.affine("x + 1", {"x": T**2}) is None
    assert sym.affine("x + 1", {"x": sympy.Rational(1, 2) * T}) is None


def index(coefficient: int, shift: int) -> sympy.Expr:
    return coefficient * T + shift


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(-3, 3), st.integers(0, 2), st.integers(-3, 3)),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from([-2, -1, 1, 2, 3]),
)
def test_distances_agree_with_trying_all_trips(
    axes: list[tuple[int, int, int, int]], step: int
) -> None:
    a = Region(tuple(index(c, k) for c, k, _, _ in axes))
    b = Region(tuple(index(c, k) for _, _, c, k in axes))
    found = sym.distance(a, b, T, step=step)
    trips = range(-12, 13)
    meets = {
        m - n
        for n, m in itertools.product(trips, repeat=2)
        if all(c * n * step + k == d * m * step + j for c, k, d, j in axes)
    }
    equal_slopes = all(c == d for c, _, d, _ in axes)
    if found == "never":
        assert not meets
    elif found is not None:
        assert meets <= {found}
        assert meets == {found} or not equal_slopes
    elif equal_slopes:
        assert {0, 1, 2} <= meets


def test_distance_over_an_unknown_step_keeps_equal_indices_apart() -> None:
    here, there = Region((T,)), Region((T + 1,))
    assert sym.distance(here, here, T, step=None) == 0
    assert sym.distance(here, there, T, step=None) is None


def test_distance_leaves_other_symbols_open() -> None:
    assert sym.distance(Region((N, T)), Region((N, T + 1)), T) == -1
    assert sym.distance(Region((N,)), Region((T,)), T) is None
    assert sym.distance(Region((N, sympy.Integer(1))), Region((N, sympy.Integer(2))), T) == "never"
    assert sym.distance(Region((None, T)), Region((N, T)), T) == 0
    assert sym.distance(None, Region((T,)), T) is None
    # fewer axes cover the missing ones
    assert sym.distance(Region((T,)), Region((T, N)), T) == 0


@given(st.integers(-5, 5), st.integers(-5, 5), st.sampled_from([-3, -2, -1, 1, 2, 3]))
def test_trip_counts_are_those_of_range(start: int, stop: int, step: int) -> None:
    count = sym.trip_count(start, stop, step)
    assert count == len(range(start, stop, step))
    a, b, c = sympy.symbols("a b c", integer=True)
    symbolic = sym.trip_count(a, b, c)
    assert sym.evaluate(symbolic, {"a": start, "b": stop, "c": step}) == len(
        range(start, stop, step)
    )


def test_a_range_without_step_is_refused() -> None:
    with pytest.raises(ValueError, match="zero"):
        sym.trip_count(0, T, 0)
    with pytest.raises(ValueError, match="zero"):
        sym.trip_count(0, 5, 0)


def test_costs_and_bounds() -> None:
    trips = sympy.Symbol("T", integer=True, positive=True)
    total = sym.total_cost(0.5, trips) + 2
    assert sym.evaluate(total, {"T": 4}) == 4.0
    bound = sym.lower_bound(critical_path=3, work=trips, capacity=2.0)
    assert sym.evaluate(bound, {"T": 4}) == 3.0
    assert sym.evaluate(bound, {"T": 10}) == 5.0
    with pytest.raises(ValueError, match="capacity"):
        sym.lower_bound(1, 1, 0)
    with pytest.raises(KeyError):
        sym.evaluate(total, {})


def test_intervals_of_linear_forms() -> None:
    form = sym.linear(3 - 2 * T + N)
    assert form is not None
    assert form.interval({T: (0, 4), N: (1, 1)}) == (-4, 4)
    assert form.interval({T: (0, None), N: (1, 1)}) == (None, 4)
    assert form.interval({}) == (None, None)
    assert form.expr() == 3 - 2 * T + N
    assert form.coefficient(T) == -2
    assert form.coefficient(sympy.Symbol("other")) == 0


# -- effects


def test_entries_split_at_commas_outside_brackets() -> None:
    assert parse_entry("buf.obs[f(a, b), t, :]").index == ("f(a, b)", "t", None)
    assert parse_entry("buf").index is None
    assert str(parse_entry(" buf.obs[t,:] ")) == "buf.obs[t, :]"


@pytest.mark.parametrize("text", ["", "1x", "a..b", "a[t", "a b", "a.[t]", "a.b()"])
def test_malformed_entries_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not an effect entry"):
        parse_entry(text)


def test_related_states() -> None:
    assert related("a", "a.b")
    assert related("a.b", "a")
    assert related("*", "rng:torch")
    assert not related("a", "ab")
    assert not related("a.b", "a.c")


def test_disjoint_regions_on_one_trip() -> None:
    assert disjoint(Region((T,)), Region((T + 1,)))
    assert not disjoint(Region((T,)), Region((N,)))
    assert not disjoint(Region((T,)), None)
    assert disjoint(Region((T * (N + 1),)), Region((T * N + T + 1,)))
    write, read = Effect(True, "s", Region((T,))), Effect(False, "s", Region((T + 1,)))
    assert not conflicts(write, read)
    assert not conflicts(read, read)
    assert conflicts(write, Effect(False, "s"))
    # below the state the index says nothing
    assert conflicts(write, Effect(False, "s.x", Region((T + 1,))))
    assert [str(write), str(read)] == ["W s[t]", "R s[t + 1]"]
