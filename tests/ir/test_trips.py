"""Trips of a loop as a function: what the reference executor does with the loop."""

from __future__ import annotations

import pytest

from rose_compiler.ir import interp
from rose_compiler.ir.parse import parse
from rose_compiler.ir.trips import Trips

TEXT = """
@op(reads=[], writes=["out[t]"], results=2)
def both(a, b, out, t): ...

def f(a, b, *, out):
    for t, x, y in for_t(1, 5, 1, x=a, y=b):
        two = both(x, y, out, t)
        swapped = two[1]
        again = two[0] * 3
        yield swapped, again
    return for_t.x, for_t.y
"""


def both(a: int, b: int, out: list[int], t: int) -> tuple[int, int]:
    out.append(a + t)
    return a + b, a - 2 * b + t


def test_the_values_of_the_loop() -> None:
    program = parse(
        TEXT.replace("return for_t.x, for_t.y", "p = for_t.x\n    q = for_t.y\n    return p, q"),
        {"both": both},
    )
    first: list[int] = []
    expected = interp.run(program, [2, 3], {"out": first})
    (loop,) = program.loops()
    captured = [[] if n.name == "out" else None for n in loop.captured]
    made = Trips(loop.body, range(1, 5), 2, "trips")(2, 3, *captured)
    assert made == expected
    assert captured == [first]
    dynamic = Trips(loop.body, None, 2, "trips")
    assert dynamic(2, 3, [], 1, 5, 1) == expected
    assert dynamic(2, 3, [], 5, 1, 1) == (2, 3)
    assert dynamic.over(range(1, 3), (2, 3, [])) == Trips(loop.body, range(1, 3), 2, "t")(2, 3, [])


LOOP = "for s in inner(0, 2, 1):\n            yield ()"
OTHERS = {
    "two = both((x, y), y, out, t)": "inside a container",
    f"two = both(x, y, out, t)\n        {LOOP}": "is no operation",
}


@pytest.mark.parametrize("statement", OTHERS)
def test_bodies_of_another_kind(statement: str) -> None:
    text = TEXT.replace("two = both(x, y, out, t)", statement)
    program = parse(text.replace("return for_t.x, for_t.y", "return a"), {"both": both})
    loop = program.loops()[-1]
    with pytest.raises(ValueError, match=OTHERS[statement]):
        Trips(loop.body, range(3), 2, "trips")
