"""Dependences of one feature at a time: values, indices, loops, states."""

from __future__ import annotations

import pytest

from rose_compiler.ir import facts
from rose_compiler.ir.deps import Dependences
from rose_compiler.ir.program import LoopView
from tests.ir.depending import OPS, edges, program

# -- one feature each


def test_values_of_the_same_trip_and_of_the_trip_before() -> None:
    p = program(
        OPS,
        """
def f(x0):
    for t, x, y in L(0, 9, 1, x=x0, y=x0):
        a = pure(x)
        b = pure(a)
        c = pure(y)
        yield b, x
    return x0
""",
    )
    # y is x of the trip before, so c uses b of two trips before
    assert edges(p, "L") == {
        "a->b value 0",
        "b->a value 1",
        "b->c value 2",
    }


def test_reads_never_wait_for_each_other() -> None:
    p = program(OPS, "def f(*, s):\n    a = read(s)\n    b = read(s)\n    return a, b")
    assert edges(p) == set()


def test_an_unindexed_write_meets_every_trip() -> None:
    p = program(
        OPS,
        """
def f(*, s):
    for t in L(0, 9, 1):
        a = read(s)
        w = write(s)
        yield ()
    return 0
""",
    )
    assert edges(p, "L") == {
        "a->w anti s 0..",
        "w->a flow s 1..",
        "w->w output s 1..",
    }


@pytest.mark.parametrize(
    ("bounds", "reader", "expected"),
    [
        ("0, 9, 1", "read_t", "r->w anti s 0"),
        ("0, 9, 1", "read_next", "r->w anti s 1"),
        ("1, 9, 1", "read_last", "w->r flow s 1"),
        ("9, -1, -1", "read_next", "w->r flow s 1"),
        ("9, 0, -1", "read_last", "r->w anti s 1"),
        ("0, 9, 2", "read_next", None),
        # t - 1 is -1 on the first trip, and that is the last element
        ("0, 9, 1", "read_last", "r->w anti s 0.. w->r flow s 1.."),
    ],
)
def test_indices_give_exact_distances(bounds: str, reader: str, expected: str | None) -> None:
    p = program(
        OPS,
        f"""
def f(*, s):
    for t in L({bounds}):
        r = {reader}(s, t)
        w = write_t(s, t)
        yield ()
    return 0
""",
    )
    found = edges(p, "L") - {"w->w output s 1.."}
    assert " ".join(sorted(found)) == (expected or "")
    assert ("w->w output s 1.." in edges(p, "L")) is False


def test_an_index_of_another_loop_leaves_every_distance_open() -> None:
    p = program(
        OPS,
        """
def f(*, s):
    for e in outer(0, 3, 1):
        for t in L(0, 9, 1):
            w = write_t(s, e)
            r = read_t(s, t)
            yield ()
        yield ()
    return 0
""",
    )
    assert edges(p, "L") == {
        "w->r flow s 0..",
        "r->w anti s 1..",
        "w->w output s 1..",
    }
    # one trip of the outer loop writes s[e] alone, and reads everything
    assert edges(p, "outer") == {"L->L flow s 1..", "L->L anti s 1.."}


def test_equal_names_of_nested_indices_are_two_symbols() -> None:
    p = program(
        OPS,
        """
def f(*, s):
    for t in outer(0, 3, 1):
        w = write_t(s, t)
        for t in L(0, 3, 1):
            r = read_t(s, t)
            yield ()
        yield ()
    return 0
""",
    )
    assert "w->L flow s 0.." in edges(p, "outer")


def test_equal_names_of_nested_indices_do_not_cancel() -> None:
    p = program(
        OPS,
        """
def f(*, s):
    for t in outer(0, 3, 1):
        o = t + 0
        for t in L(0, 3, 1):
            w = write_t(s, o)
            r = read_next(s, t)
            yield ()
        yield ()
    return 0
""",
    )
    assert {"w->r flow s 0..", "r->w anti s 1.."} <= edges(p, "L")


def test_an_index_from_outside_a_branch_is_known_inside() -> None:
    p = program(
        OPS,
        """
def f(c, *, s):
    for t in L(0, 9, 1):
        r = read_next(s, t)
        if c:
            write_t(s, t)
            n = 1
        else:
            n = 0
        yield ()
    return 0
""",
    )
    b = next(
        n for n in LoopView(p.find("L")).graph.nodes if n.op == "call_function" and n.name[0] == "b"
    )
    assert {e for e in edges(p, "L") if "value" not in e} == {f"r->{b} anti s 1"}


def test_inner_loops_are_summarised_without_their_index() -> None:
    p = program(
        OPS,
        """
@op(reads=[], writes=["s[t, n]"])
def write_tn(s, t, n): ...
def f(*, s):
    for t in outer(0, 4, 1):
        for n in L(0, 9, 1):
            w = write_tn(s, t, n)
            yield ()
        r = read_t(s, t)
        yield ()
    return 0
""",
    )
    loop = p.find("L")
    assert [str(e) for e in Dependences(p).effects(loop)] == ["W s[t, :]"]
    assert edges(p, "outer") == {"L->r flow s 0"}
    assert edges(p, "L") == set()
    assert [str(e) for e in Dependences(p).effects(p.find("outer"))] == ["W s", "R s"]


def test_index_arithmetic_in_nodes_is_followed() -> None:
    p = program(
        OPS,
        """
def f(*, s):
    for t in L(0, 9, 1):
        n = t + 2
        w = write_t(s, n)
        r = read_t(s, t)
        yield ()
    return 0
""",
    )
    assert "w->r flow s 2" in edges(p, "L")
    assert not any(e.startswith("r->w") for e in edges(p, "L"))


def test_items_of_an_iterator_are_no_indices() -> None:
    p = program(
        OPS,
        """
def f(xs, *, s):
    for t in L(xs) @ loop(kind="iter"):
        w = write_t(s, t)
        r = read_next(s, t)
        yield ()
    return 0
""",
    )
    assert "w->r flow s 0.." in edges(p, "L")


def test_taking_from_an_unknown_iterator_orders_whole_trips() -> None:
    p = program(
        OPS,
        """
def f(xs, *, s):
    for x in L(xs):
        a = read(s)
        yield ()
    return 0
""",
    )
    facts.put(p.find("xs"), spec=facts.Spec("object", "torch.utils.data.DataLoader"))
    assert edges(p, "L") == {
        "x->a flow s 0..",
        "a->x anti s 1..",
        "x->x flow * 1..",
        "x->x anti * 1..",
        "x->x output * 1..",
    }
    facts.put(p.find("xs"), spec=facts.Spec("object", "list"))
    assert edges(p, "L") == set()


def test_no_item_is_taken_ahead_of_a_break() -> None:
    p = program(
        OPS,
        """
def f(xs, c):
    for x in L(xs):
        break_if(c, ())
        yield ()
    return 0
""",
    )
    facts.put(p.find("xs"), spec=facts.Spec("object", "generator"))
    assert "break_if->x control 1.." in edges(p, "L")


def test_states_below_each_other_conflict_and_beside_each_other_do_not() -> None:
    p = program(
        """
@op(reads=[], writes=["b.obs"])
def obs(b): ...
@op(reads=[], writes=["b.act"])
def act(b): ...
@op(reads=["b"], writes=[])
def all_of(b): ...
""",
        "def f(*, b):\n    o = obs(b)\n    a = act(b)\n    r = all_of(b)\n    return 0",
    )
    assert edges(p) == {"o->r flow b.obs 0", "a->r flow b.act 0"}


def test_unknown_effects_conflict_with_everything() -> None:
    p = program(
        OPS,
        "def f(x, *, s):\n    d = sample()\n    o = opaque(x)\n    r = read(s)\n    h = log(x)\n"
        "    return 0",
    )
    pairs = {e.split(" ")[0] for e in edges(p)}
    assert pairs == {"d->o", "o->r", "o->h"}


@pytest.mark.parametrize("signature", ["reads=[]", "writes=[]", ""])
def test_effects_that_are_unknown_in_part_are_unknown(signature: str) -> None:
    p = program(
        OPS + f"@op({signature})\ndef half(x): ...\n",
        "def f(x, *, s):\n    h = half(x)\n    r = read(s)\n    return 0",
    )
    assert edges(p) == {"h->r flow s 0"}
    assert {str(e) for e in Dependences(p).effects(p.find("h"))} == {"R *", "W *"}


def test_draws_and_host_writes_keep_their_order() -> None:
    p = program(
        OPS,
        """
def f(x):
    a = sample()
    h = log(x)
    b = sample()
    k = log(x)
    return 0
""",
    )
    assert {e for e in edges(p) if "output" in e} == {
        "a->b output rng:torch 0",
        "h->k output host 0",
    }
    assert {e.split(" ")[0] for e in edges(p)} == {"a->b", "h->k"}


def test_absolute_entries_reach_states_that_are_not_handed_over() -> None:
    p = program(
        OPS + '@op(reads=["@s.w"], writes=[])\ndef forward(x): ...\n',
        "def f(x, *, s):\n    y = forward(x)\n    w = write(s)\n    return y",
    )
    assert edges(p) == {"y->w anti s.w 0"}
