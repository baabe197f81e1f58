"""Dependences through shared memory: aliases, lent buffers, shards, mutable locals."""

from __future__ import annotations

from rose_compiler.ir.deps import Dependences, why
from tests.ir.depending import OPS, edges, program

STEPPING = """
def f(o0, *, env, s):
    for t, obs in L(0, 9, 1, obs=o0):
        a = pure(obs)
        r = step(a, env)
        o = r[0] @ facts(alias=["env.outputs"], borrowed=True)
        k = pure(obs)
        yield o
    return o0
"""


def test_a_reader_of_a_borrowed_value_waits_for_no_later_step() -> None:
    p = program(OPS, STEPPING)
    found = edges(p, "L")
    # k reads what the step of the trip before lent, behind the step of its own trip
    assert "r->k flow env.outputs 0.." in found
    assert "k->r anti env.outputs 1.." in found
    assert "a->r anti env.outputs 0.." in found
    blocked = why(p, p.find("k"), p.find("step"), distance=1)
    assert blocked is not None
    assert blocked.code == "borrowed-buffer"
    assert blocked.allow == "a snapshot of the value"


def test_a_snapshot_frees_a_reader_of_a_borrowed_value() -> None:
    p = program(
        OPS,
        STEPPING.replace("        k = pure(obs)\n", "        k = pure(n)\n").replace(
            "        a = pure(obs)\n", "        n = snapshot(obs)\n        a = pure(obs)\n"
        ),
    )
    assert why(p, p.find("k"), p.find("step"), distance=1) is None
    assert "n->r anti env.outputs 0.." in edges(p, "L")


def test_borrowed_without_alias_means_the_buffers_of_its_maker() -> None:
    p = program(
        OPS,
        """
def f(a, *, env):
    r = step(a, env)
    o = r[0] @ facts(borrowed=True)
    k = pure(o)
    q = step(a, env)
    return 0
""",
    )
    assert "k->q anti env.outputs 0" in edges(p)


def test_shards_are_independent_and_the_whole_is_not() -> None:
    p = program(
        OPS,
        """
def f(a, *, env):
    e0: state("env.0") = shard(env, 0)
    e1: state("env.1") = shard(env, 1)
    p = step(a, e0)
    q = step(a, e1)
    k = pure(a) @ facts(alias=["env.outputs"])
    w = step(a, env)
    return 0
""",
    )
    found = edges(p)
    pairs = {e.split(" ")[0] for e in found}
    assert "p->q" not in pairs
    assert {"p->w", "q->w"} <= pairs
    assert why(p, p.find("p"), p.find("q")) is None


def test_a_reader_of_the_wholes_outputs_waits_for_a_shard() -> None:
    p = program(
        OPS,
        """
def f(a, *, env):
    w = step(a, env)
    o = w[0] @ facts(alias=["env.outputs"])
    k = pure(o)
    e0: state("env.0") = shard(env, 0)
    p = step(a, e0)
    return 0
""",
    )
    assert "k->p anti env.outputs 0" in edges(p)


def test_an_instance_born_in_a_trip_is_private_to_it() -> None:
    p = program(
        OPS,
        """
def f(*, s):
    for t in L(0, 9, 1):
        x: state = alloc()
        w = write(x)
        r = read(x)
        yield ()
    return 0
""",
    )
    assert edges(p, "L") == {
        "x->w value 0",
        "x->r value 0",
        "w->r flow %x 0",
    }
    assert Dependences(p).effects(p.find("L")) == ()


def test_indices_of_a_private_instance_do_not_meet_over_trips() -> None:
    p = program(
        OPS,
        """
def f():
    for t in L(0, 9, 1):
        x: state = alloc()
        w = write_t(x, t)
        r = read_next(x, t)
        yield ()
    return 0
""",
    )
    assert {e for e in edges(p, "L") if "value" not in e} == set()


def test_an_instance_born_in_a_branch_or_inner_loop_is_private_to_the_trip() -> None:
    p = program(
        OPS,
        """
def f(c):
    for t in L(0, 9, 1):
        for n in inner(0, 2, 1):
            x: state = alloc()
            w = write(x)
            yield ()
        if c:
            y: state = alloc()
            v = write(y)
            k = 1
        else:
            k = 2
        yield ()
    return 0
""",
    )
    assert {e for e in edges(p, "L") if "value" not in e} == set()
    assert all("%" not in e for e in edges(p))


def test_an_instance_that_leaves_a_branch_belongs_to_the_trip() -> None:
    p = program(
        OPS,
        """
def f(c, z, *, s):
    for t in L(0, 9, 1):
        if c:
            y: state = alloc()
            k = y
        else:
            k = z
        w = inplace(k)
        r = pure(k)
        yield ()
    return 0
""",
    )
    assert "w->r flow %y 0" in edges(p, "L")
    assert not any("%y" in e and e.endswith("..") for e in edges(p, "L"))


def test_an_instance_born_outside_is_carried() -> None:
    p = program(
        OPS,
        """
def f(*, s):
    x: state = alloc()
    for t in L(0, 9, 1):
        w = write(x)
        r = read(x)
        yield ()
    return 0
""",
    )
    assert "r->w anti %x 1.." in edges(p, "L")
    assert [str(e) for e in Dependences(p).effects(p.find("L"))] == ["W %x", "R %x"]


def test_an_instance_that_is_handed_on_is_not_private() -> None:
    p = program(
        OPS,
        """
def f(x0, *, s):
    for t, v in L(0, 9, 1, v=x0):
        r = pure(v)
        x: state = alloc()
        y = read(x) @ facts(alias=["%x"])
        w = write(x)
        yield y
    return 0
""",
    )
    # v is a view of the x that w of the trip before still writes to
    assert "w->r flow %x 1.." in edges(p, "L")


def test_an_instance_that_an_unknown_call_was_handed_is_not_private() -> None:
    p = program(
        OPS,
        """
def f(*, s):
    for t in L(0, 9, 1):
        x: state = alloc()
        w = write(x)
        k = opaque(x)
        yield ()
    return 0
""",
    )
    assert "w->w output %x 1.." in edges(p, "L")
    found = why(p, p.find("w"), p.find("w"), distance=1)
    assert found is not None
    assert found.code in ("retained-instance", "unknown-effects")


def test_a_write_to_a_value_without_state_orders_its_other_users() -> None:
    p = program(
        OPS,
        """
def f(x0):
    a = pure(x0)
    b = pure(a)
    w = inplace(a)
    c = pure(a)
    d = pure(b)
    return 0
""",
    )
    assert {e for e in edges(p) if "value" not in e} == {
        "b->w anti %a 0",
        "w->c flow %a 0",
    }


def test_a_write_through_a_view_of_rows_reaches_the_whole() -> None:
    p = program(
        OPS,
        """
def f(x0):
    a = pure(x0)
    h = rows(a, 0, 4)
    w = inplace(h)
    c = pure(a)
    return 0
""",
    )
    assert "w->c flow %a 0" in edges(p)


def test_a_write_in_a_body_reaches_users_of_the_captured_value() -> None:
    p = program(
        OPS,
        """
def f(x0):
    a = pure(x0)
    for t in L(0, 9, 1):
        w = inplace(a)
        r = pure(a)
        yield ()
    c = pure(a)
    return 0
""",
    )
    assert {"w->r flow %a 0..", "r->w anti %a 1..", "w->w output %a 1.."} <= edges(p, "L")
    assert "L->c flow %a 0" in edges(p)


KEEPING = """
@op(reads=["c"], writes=["c"], attributes={"keeps": (("c", "x"),)})
def keep(c, x): ...
"""


def test_who_reads_a_container_reads_what_it_keeps() -> None:
    p = program(
        OPS + KEEPING,
        """
def f(x0, *, s):
    a = pure(x0)
    k = keep(s, a)
    w = inplace(a)
    r = read(s)
    b = pure(x0)
    m = keep(s, b)
    q = read(s)
    return 0
""",
    )
    found = edges(p)
    assert "w->r flow %a 0" in found
    assert "k->w anti %a 0" in found
    # nobody writes b in place, so keeping it is no hazard
    assert not any("%b" in e for e in found)


def test_an_instance_that_an_outer_container_keeps_is_not_private() -> None:
    body = """
def f(*, s):
    for t in L(0, 9, 1):
        c: state = alloc()
        x: state = alloc()
        k = keep(KEEPER, x)
        w = write(x)
        r = read(KEEPER)
        yield ()
    return 0
"""
    outer = edges(program(OPS + KEEPING, body.replace("KEEPER", "s")), "L")
    assert "w->r flow %x 0.." in outer
    inner = edges(program(OPS + KEEPING, body.replace("KEEPER", "c")), "L")
    assert "w->r flow %x 0" in inner
    assert not any(e.endswith("..") for e in inner)


def test_indices_of_views_and_items_say_nothing_about_the_whole() -> None:
    p = program(
        OPS,
        """
def f(x0):
    a = pure(x0)
    h = rows(a, 0, 4)
    g = rows(a, 1, 4)
    w = write_t(h, 1)
    r = read_t(g, 0)
    return 0
""",
    )
    assert "w->r flow %a 0" in edges(p)
