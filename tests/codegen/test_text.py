"""The text of emitted code: readable, with modes, states and guards where they belong."""

from __future__ import annotations

import textwrap
from dataclasses import replace

import pytest
import torch

from rose_compiler.codegen import emit, load
from rose_compiler.ir import facts
from rose_compiler.ir.parse import parse
from rose_compiler.ir.program import Program
from rose_compiler.runtime.support import Runtime
from tests.codegen.texts import check, emitted_run, program


def test_a_loop_reads_as_it_was_written() -> None:
    p = program("""
    def fn(x, n, *, buf):
        for t, acc in loop0(0, n, 1, acc=x):
            put(buf, acc)
            big = odd(acc)
            if big:
                y = f(acc)
                nxt = y
            else:
                nxt = acc
            break_if(big, (nxt,))
            after = g(nxt, t)
            yield after
        last = loop0.acc
        return last, x
    """)
    assert emitted_run(p) == textwrap.dedent("""\
        def run(rt, x, n, buf):
            acc = x
            for t in range(n):
                put(buf, acc)
                big = odd(acc)
                if big:
                    y = f(acc)
                    nxt = y
                else:
                    nxt = acc
                if big:
                    acc = nxt
                    break
                acc = g(nxt, t)
            return acc, x""")
    check(p, (2, 4), buf=[])
    check(p, (3, 4), buf=[])
    check(p, (3, 0), buf=[])


def test_values_that_change_places() -> None:
    p = program("""
    def fn(x, y, n):
        for t, a, b, c in loop0(3, n, -2, a=x, b=y, c=0):
            yield b, a, t
        a1 = loop0.a
        b1 = loop0.b
        c1 = loop0.c
        return a1, b1, c1
    """)
    assert "x, y, c = y, x, t" in emitted_run(p)
    assert check(p, (1, 2, -4)) == (1, 2, -3)


def test_an_initial_value_that_is_read_later_keeps_its_variable() -> None:
    p = program("""
    def fn(x, n):
        y = f(x)
        for t, a in loop0(0, n, 1, a=y):
            b = g(a, y)
            yield b
        r = loop0.a
        return r, y
    """)
    check(p, (1, 3))


def test_results_of_an_inner_loop_are_not_overwritten() -> None:
    p = program("""
    def fn(x, n):
        for t, a, b in loop0(0, n, 1, a=x, b=x):
            for k, c in inner(0, 2, 1, c=b):
                d = f(c)
                yield d
            e = inner.c
            h = g(t, t)
            yield e, h
        r = loop0.a
        s = loop0.b
        return r, s
    """)
    check(p, (1, 3))
    q = program("""
    def fn(x, n):
        for t, b in loop0(0, n, 1, b=x):
            for k, c in inner(0, 2, 1, c=b):
                d = f(c)
                yield d
            e = inner.c
            h = g(e, t)
            yield h
        s = loop0.b
        return s
    """)
    check(q, (1, 3))
    assert "b = g(b, t)" in emitted_run(q).replace("x", "b")


def test_loops_of_all_kinds() -> None:
    p = program("""
    def fn(items, x):
        for v, a in each(items, a=x):
            for trip, k in count(k=0):
                done = odd(k)
                break_if(done, (k,))
                k1 = f(k)
                yield k1
            k2 = count.k
            b = g(a, v)
            skip = odd(b)
            continue_if(skip, (b,))
            c = g(b, k2)
            yield c
        r = each.a
        return r
    """)
    text = emitted_run(p)
    assert "for v in items:" in text
    assert "while True:" in text
    assert "continue" in text
    check(p, ([1, 2, 3, 4], 5))


def test_the_trips_of_an_endless_loop_can_be_counted() -> None:
    p = program("""
    def fn(x):
        for trip, a in loop0(a=x):
            done = odd(trip)
            break_if(done, (a,))
            b = g(a, trip)
            yield b
        r = loop0.a
        return r
    """)
    check(p, (4,))


def test_neighbours_share_a_mode_and_a_loop_takes_it_along() -> None:
    bind = {"modes": lambda: (torch.is_grad_enabled(), torch.is_inference_mode_enabled())}
    ops = "@op(reads=[], writes=[])\ndef modes(): ...\n"
    p = parse(
        ops
        + textwrap.dedent("""
    def fn(n):
        a = modes()
        with no_grad():
            b = modes()
            c = modes()
            for t in loop0(0, n, 1):
                d = modes()
                with enable_grad():
                    e = modes()
            for t in loop1(0, n, 1):
                h = modes()
        for t in loop2(0, n, 1):
            with inference_mode():
                i = modes()
                j = modes()
        k = modes()
        return a, b, c, k
    """),
        bind,
    )
    assert emitted_run(p) == textwrap.dedent("""\
        def run(rt, n):
            a = modes()
            with torch.no_grad():
                b = modes()
                c = modes()
                for t in range(n):
                    modes()
                    with torch.enable_grad():
                        modes()
                for t_2 in range(n):
                    modes()
            with torch.inference_mode():
                for t_3 in range(n):
                    modes()
                    modes()
            k = modes()
            return a, b, c, k""")
    check(p, (2,))


def test_autocast_stays_inside_the_loop() -> None:
    # it keeps casts of weights until it ends, and a trip may have changed the weights
    p = program("""
    def fn(x, n):
        for t, a in loop0(0, n, 1, a=x):
            with autocast("cpu", torch.bfloat16):
                b = f(a)
            yield b
        r = loop0.a
        return r
    """)
    text = emitted_run(p)
    assert text.index("for t in") < text.index('with torch.autocast("cpu", torch.bfloat16):')
    check(p, (1, 3))


def one_thread(p: Program) -> None:
    loop = p.loops()[0]
    facts.put(loop.node, loop=replace(loop.facts, threads=1))


def test_threads_are_set_around_the_loops_that_ask_for_it() -> None:
    p = program("""
    def fn(x, n):
        for t, a in loop0(0, n, 1, a=x):
            b = f(a)
            yield b
        r = loop0.a
        return r
    """)
    one_thread(p)
    assert emitted_run(p) == textwrap.dedent("""\
        def run(rt, x, n):
            threads = rt.set_threads(1)
            try:
                for t in range(n):
                    x = f(x)
            finally:
                rt.set_threads(threads)
            return x""")
    seen: list[int] = []
    p = program(
        """
    def fn(x, n):
        for t, a in loop0(0, n, 1, a=x):
            b = f(a)
            yield b
        r = loop0.a
        return r
    """,
        f=lambda x: (seen.append(torch.get_num_threads()), 1 // x)[1],
    )
    one_thread(p)
    before = torch.get_num_threads()
    run = load(emit(p))
    run(Runtime(), 1, 2)
    assert seen == [1, 1]
    with pytest.raises(ZeroDivisionError):
        run(Runtime(), 0, 2)
    assert torch.get_num_threads() == before


UNBOUND = """
def fn(x, n):
    for t, a in loop0(0, n, 1, a=UNBOUND):
        b = f(t)
        yield b
    r = loop0.a
    s = g(r, x)
    return s
"""


def test_reading_an_unbound_variable_raises() -> None:
    p = program(UNBOUND)
    assert "if a is UNBOUND:" in emitted_run(p)
    check(p, (1, 3))
    with pytest.raises(UnboundLocalError, match=r"local variable '(a|r)'"):
        load(emit(p))(Runtime(), 1, 0)


def test_only_what_may_be_unbound_is_checked() -> None:
    p = program("""
    def fn(x, n):
        for t, a in loop0(0, n, 1, a=x):
            b = f(a)
            yield b
        r = loop0.a
        return r
    """)
    assert "UNBOUND" not in emitted_run(p)


def test_a_branch_with_one_empty_arm() -> None:
    p = program("""
    def fn(x, *, buf):
        c = odd(x)
        if c:
            put(buf, x)
        return x
    """)
    assert "else" not in emitted_run(p)
    check(p, (3,), buf=[])
    check(p, (4,), buf=[])


def test_users_lines_stand_behind_the_code() -> None:
    from rose_compiler.base.errors import SourceLocation

    p = program("""
    def fn(x):
        y = f(x)
        return y
    """)
    node = p.find("y")
    facts.put(node, origin=facts.Origin(SourceLocation("/home/me/ppo.py", 41)))
    p.ops.by_name["f"].source = ("y = x + 1",)
    emitted = emit(p)
    assert "y = f(x)  # ppo.py:41  y = x + 1" in emitted.source
    (line,) = emitted.places
    assert emitted.source.splitlines()[line - 1].strip().startswith("y = f(x)")


def test_values_without_text_are_bound_by_name() -> None:
    thing = object()
    p = program("""
    def fn(x):
        y = g(x, 3)
        return y
    """)
    node = p.find("y")
    node.args = (node.args[0], thing)
    emitted = emit(p)
    assert "g(x, object_2)" in emitted.source or "g(x, object)" in emitted.source
    assert thing in emitted.namespace.values()
