"""Symbolic integers: index expressions, trip counts, dependence distances and costs.

Index text is read by :mod:`ast` alone, never evaluated. On hot paths an expression is a
:class:`Linear`, a constant and integer coefficients by symbol; sympy holds what is kept and shown.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import sympy

from rose_compiler.ir.effects import Region

#: Least and greatest value of a symbol, each ``None`` where unknown.
Ranges = Mapping[sympy.Symbol, tuple[int | None, int | None]]
Never = Literal["never"]


@dataclass(frozen=True)
class Linear:
    """``constant + sum(coefficient * symbol)``; coefficients are integers, none of them zero."""

    constant: int = 0
    terms: tuple[tuple[sympy.Symbol, int], ...] = ()

    def coefficient(self, symbol: sympy.Symbol | None) -> int:
        """The coefficient of a symbol, 0 where it does not occur."""
        for s, c in self.terms:
            if s is symbol or s == symbol:
                return c
        return 0

    def without(self, symbol: sympy.Symbol | None) -> tuple[tuple[sympy.Symbol, int], ...]:
        """The terms in the other symbols."""
        return tuple(term for term in self.terms if term[0] != symbol)

    def plus(self, other: Linear, factor: int = 1) -> Linear:
        """``self + factor * other``."""
        terms = dict(self.terms)
        for s, c in other.terms:
            terms[s] = terms.get(s, 0) + factor * c
        ordered = sorted(((s, c) for s, c in terms.items() if c), key=lambda term: term[0].name)
        return Linear(self.constant + factor * other.constant, tuple(ordered))

    def times(self, factor: int) -> Linear:
        """``factor * self``."""
        return Linear().plus(self, factor)

    def expr(self) -> sympy.Expr:
        """The same as a sympy expression."""
        return _expr(self)

    def interval(self, ranges: Ranges) -> tuple[int | None, int | None]:
        """Least and greatest value while every symbol stays in its range; ``None`` if unknown."""
        low: int | None = self.constant
        high: int | None = self.constant
        for s, c in self.terms:
            least, most = ranges.get(s, (None, None))
            if c < 0:
                least, most = most, least
            low = None if low is None or least is None else low + c * least
            high = None if high is None or most is None else high + c * most
        return low, high


@lru_cache(maxsize=4096)
def _expr(linear: Linear) -> sympy.Expr:
    return sympy.Add(sympy.Integer(linear.constant), *(c * s for s, c in linear.terms))


@lru_cache(maxsize=4096)
def linear(expr: sympy.Expr) -> Linear | None:
    """A sympy expression as a linear form; ``None`` where it is not affine with integers."""
    total = Linear()
    for term in sympy.Add.make_args(expr):
        coefficient, rest = term.as_coeff_Mul()
        if not coefficient.is_Integer:
            return None
        if rest is sympy.S.One:
            total = total.plus(Linear(int(coefficient)))
        elif rest.is_Symbol:
            total = total.plus(Linear(0, ((rest, int(coefficient)),)))
        else:
            return None
    return total


def index_symbol(name: str) -> sympy.Symbol:
    """The symbol that stands for a loop's index."""
    return sympy.Symbol(name, integer=True)


@lru_cache(maxsize=1024)
def _parsed(text: str) -> ast.expr | None:
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def affine_linear(text: str, names: Mapping[str, Linear | None]) -> Linear | None:
    """An index expression over names with known linear forms.

    Sums, differences and products by constants of integers and ``names`` are understood; anything
    else, a name without a form included, gives ``None``.
    """
    tree = _parsed(text)
    return None if tree is None else _walk(tree, names)


def _walk(tree: ast.expr, names: Mapping[str, Linear | None]) -> Linear | None:
    if isinstance(tree, ast.Constant):
        return Linear(tree.value) if type(tree.value) is int else None
    if isinstance(tree, ast.Name):
        return names.get(tree.id)
    if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub | ast.UAdd):
        operand = _walk(tree.operand, names)
        if operand is None or isinstance(tree.op, ast.UAdd):
            return operand
        return operand.times(-1)
    if isinstance(tree, ast.BinOp):
        left, right = _walk(tree.left, names), _walk(tree.right, names)
        if left is not None and right is not None:
            return combine(type(tree.op), left, right)
    return None


def combine(kind: type[ast.operator], left: Linear, right: Linear) -> Linear | None:
    """``left (kind) right`` for ``ast.Add``, ``ast.Sub`` and ``ast.Mult``, if it is affine."""
    if kind is ast.Add:
        return left.plus(right)
    if kind is ast.Sub:
        return left.plus(right, -1)
    if kind is ast.Mult and not left.terms:
        return right.times(left.constant)
    if kind is ast.Mult and not right.terms:
        return left.times(right.constant)
    return None


def affine(text: str, names: Mapping[str, sympy.Expr | int | None]) -> sympy.Expr | None:
    """``text`` as an affine sympy expression, or ``None`` where it is not one.

    ``names`` maps the names that may occur to what they stand for. The text is parsed, not
    evaluated.
    """
    forms = {name: None if e is None else linear(sympy.sympify(e)) for name, e in names.items()}
    found = affine_linear(text, forms)
    return None if found is None else found.expr()


def trip_count(
    start: sympy.Expr | int, stop: sympy.Expr | int, step: sympy.Expr | int = 1
) -> sympy.Expr:
    """How many trips ``range(start, stop, step)`` makes.

    Raises:
        ValueError: when the step is zero.
    """
    if isinstance(start, int) and isinstance(stop, int) and isinstance(step, int):
        return sympy.Integer(len(range(start, stop, step)))
    start, stop, step = sympy.sympify(start), sympy.sympify(stop), sympy.sympify(step)
    if step.is_zero:
        raise ValueError("range() arg 3 must not be zero")
    return sympy.Max(0, sympy.ceiling((stop - start) / step))


def total_cost(per_trip: sympy.Expr | float, trips: sympy.Expr | int) -> sympy.Expr:
    """Seconds that all trips of a loop take, at ``per_trip`` seconds each."""
    return sympy.sympify(per_trip) * sympy.sympify(trips)


def lower_bound(
    critical_path: sympy.Expr | float, work: sympy.Expr | float, capacity: float
) -> sympy.Expr:
    """No schedule takes fewer seconds: the longest chain, or all work on a full machine.

    ``work`` is in core-seconds (or SM-seconds) of the operations at their best single-unit time,
    ``capacity`` in units that run at once.

    Raises:
        ValueError: when the capacity is not positive.
    """
    if capacity <= 0:
        raise ValueError(f"capacity must be positive, not {capacity}")
    return sympy.Max(sympy.sympify(critical_path), sympy.sympify(work) / capacity)


def evaluate(expr: sympy.Expr | float, values: Mapping[str, float]) -> float:
    """The value of an expression, its symbols given by name.

    Raises:
        KeyError: when a symbol has no value.
    """
    expr = sympy.sympify(expr)
    return float(expr.subs({s: values[s.name] for s in expr.free_symbols}))


def distance(
    a: Region | None,
    b: Region | None,
    symbol: sympy.Symbol | None,
    *,
    step: int | None = 1,
) -> int | Never | None:
    """How many trips after ``a`` touches its region ``b`` touches the same.

    ``symbol`` is the index of the loop, which grows by ``step`` a trip (``None``: by an unknown
    amount other than zero); all other symbols keep their value. The answer is an exact number of
    trips, negative where ``b`` comes first; ``None`` where it may be any number; ``"never"``.
    """
    if a is None or b is None:
        return None
    found: int | None = None
    for i, j in zip(a.index, b.index, strict=False):
        if i is None or j is None:
            continue
        axis = _axis_distance(i, j, symbol, step)
        if axis == "never" or (axis is not None and found is not None and axis != found):
            return "never"
        found = axis if axis is not None else found
    return found


@lru_cache(maxsize=8192)
def _axis_distance(
    i: sympy.Expr, j: sympy.Expr, symbol: sympy.Symbol | None, step: int | None
) -> int | Never | None:
    a, b = linear(i), linear(j)
    if a is None or b is None or a.without(symbol) != b.without(symbol):
        return None
    gap = a.constant - b.constant
    factor = a.coefficient(symbol)
    if factor != b.coefficient(symbol):
        return None
    if factor == 0:
        return None if gap == 0 else "never"
    if gap == 0:
        return 0
    if step is None:
        return None
    # factor * t + a0 == factor * (t + d * step) + b0
    d, rest = divmod(gap, factor * step)
    return "never" if rest else d
